"""The engines that this front's requests may go to: our own, and other boxes' by way of their fronts.

Another box's engine is the place "NODE:BOOT". Which place a request goes to, the leader says (`OfferedRequests`), or
where it does not, a pure choice (`policy.route`). For that, what a box last said of how busy it is, is corrected by
what of ours has begun and ended there since. Once in CHECK_S a box that has requests of ours is asked whether it still
has them all; what it has not got runs again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import msgspec

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import (
    MAX_UNWANTED,
    ForwardedFrame,
    FrameAccepted,
    Heartbeat,
    LostRequestsQuery,
    LostRequestsReply,
    RequestGrant,
)
from edgemoe.errors import EdgemoeError
from edgemoe.front.hosted_requests import RequestNews
from edgemoe.front.requests.offered_requests import NO_WORD, OfferedRequests
from edgemoe.front.requests.open_offers import RouteChoice
from edgemoe.front.routing.hand_over import HandOver, HandOvers, MovableRequests
from edgemoe.ipc.messages import Cancel, FetchPrefixKV, PrefixSignatureReply, PromptSignature, Submit, ToEngine, encode
from edgemoe.policy.route import EngineLoad, node_of, route
from edgemoe.ticking import until_tick
from edgemoe.types.request import Emission, Phases

log = logging.getLogger(__name__)
ASK_S = 2.0
AVOID_S = 1.0  # an engine that turned a request away
CHECK_S = 1.0  # between questions whether requests are still where they were taken to


class RoutedRequests(MovableRequests, Protocol):
    """The request log, as far as engines elsewhere are concerned."""

    def take(self, emissions: list[Emission]) -> None:
        """Delivers what an engine emitted."""

    def count_at(self, place: str) -> int:
        """Counts the live requests that this engine has."""


class Router:
    """One owner, one event loop."""

    def __init__(
        self,
        plane: ControlPlane,
        offers: OfferedRequests,
        requests: RoutedRequests,
        own: Callable[[], EngineLoad | None],
        submit_here: Callable[[Submit, int], str],
        tell_here: Callable[[ToEngine], bool],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        """`own` is our engine while it takes requests; `submit_here` gives it one, by an offer of that number."""
        self.routed = Counter[tuple[str, str]]()  # requests, by where to (here | elsewhere) and why
        self._plane, self._offers, self._requests = plane, offers, requests
        self._own, self._submit_here, self._tell_here, self._spawn = own, submit_here, tell_here, spawn
        self._ours: dict[str, int] = {}  # of our requests, how many a node had when it last said how it is
        self._avoid: dict[str, float] = {}  # places that turned requests away, until when
        self._arrived: dict[str, tuple[str, int]] = {}  # request -> place and attempt that was taken there
        self.dropped = 0  # requests that another box had forgotten
        self.hand_overs = HandOvers(requests, self)
        self.ended = self.hand_overs.ended  # a request of ours

    @property
    def forwarded(self) -> int:
        """Counts requests that were handed to other boxes' engines."""
        return sum(count for (to, _), count in self.routed.items() if to == "elsewhere")

    def elsewhere(self) -> dict[str, str]:
        """Returns engines of other boxes that take requests: place -> node."""
        return self._plane.state.members.serving(self._plane.state.model)

    def places(self) -> Collection[str]:
        """Returns engines of other boxes that take requests."""
        return self.elsewhere().keys()

    def room(self) -> int:
        """Returns how many of our requests other boxes' engines have, and have room for."""
        loads = [self._load(place, node) for place, node in self.elsewhere().items()]
        free = sum(max(0, load.capacity - load.requests) for load in loads)
        return free + sum(self._requests.count_at(load.place) for load in loads)

    def submit(self, message: Submit) -> str:
        """Hands a request to the engine of choice, and names that; "" where there is none."""
        stays = self._stays(message)
        others = {} if stays else self.elsewhere()
        (place, offer), why = self.hand_overs.pop_target(message.request.id), "handed over"
        if not place:
            if others and self._offers.waits(message.request.id):  # without a look at all engines, at each beat
                return ""
            loads = self._loads(others)
            reading = [load for load in loads if self._role(load.place) != "decode"] or loads
            choice = self._ask(message, reading) if others else RouteChoice("", "stays" if stays else "alone")
            if choice.waits:
                return ""
            place, why = choice.place, choice.why
            if place:
                offer = self._offers.use(message.request.id)
            elif not (place := route(reading, self._offers.rule)) and (others or stays):
                return ""
            message = msgspec.structs.replace(message, signature=self._offers.learns and bool(others))
            if place and self._role(place) == "prefill" and not stays:
                node = others.get(place, self._plane.state.node)
                message = self.hand_overs.expect(message, place, node)
        if place in others:
            self._spawn(self._forward(place, others[place], message, offer))
            self.routed["elsewhere", why] += 1
        elif place := self._submit_here(message, offer):
            self.routed["here", why] += 1
        return place

    def _stays(self, message: Submit) -> bool:
        """Returns whether only our engine may have a request: its prompt's log probabilities may be megabytes."""
        return message.request.sampling.prompt_logprobs is not None and not message.emitted and self._own() is not None

    def _ask(self, message: Submit, reading: Collection[EngineLoad]) -> RouteChoice:
        """Returns what the leader says of a request that these engines may take, or why it says nothing."""
        ours = f"{self._plane.state.node}:"
        choice = self._offers.choose(message, next((ours + load.place for load in reading if load.here), ""))
        place = choice.place.removeprefix(ours)
        if not place or place in self.elsewhere() or any(load.here and load.place == place for load in reading):
            return choice._replace(place=place)
        self._offers.failed(message.request.id)
        return RouteChoice("", "gone")

    def choose_decoder(self, moving: HandOver, then: Callable[[str, int], None]) -> None:
        """Has the leader say which engine goes on with a request that is prefilled, or takes the least loaded one.

        Where one has failed, it is the least loaded other one that has a free slot.
        """

        def choose(granted: RequestGrant) -> None:
            writing = [load for load in self._loads(self.elsewhere()) if self._role(load.place) != "prefill"]
            others = [load for load in writing if load.place not in (moving.place, *moving.failed)]
            place = granted.place.removeprefix(f"{self._plane.state.node}:")
            if any(load.place == place for load in others):
                then(place, granted.number)
            else:
                free = [load for load in others if not moving.failed or load.requests < load.slots]
                then(route(free, "spread"), 0)

        if moving.failed:
            choose(NO_WORD)
        else:
            self._offers.offer_again(moving.message, moving.signature, choose)

    def is_open(self, place: str) -> bool:
        """Returns whether the engine there takes requests now, as far as is known."""
        return any(load.place == place for load in self._loads(self.elsewhere()))

    def is_there(self, place: str) -> bool:
        """Returns whether there is that engine, ours or another one."""
        own = self._own()
        return place in self.elsewhere() or (own is not None and own.place == place)

    def send_pull(self, place: str, message: FetchPrefixKV) -> None:
        """Asks the engine there to fetch a prompt's blocks."""
        if (node := self.elsewhere().get(place)) is not None:
            self._spawn(self._pull(place, node, message))
        elif not self._tell_here(message):
            self.hand_overs.unsent(message.request, message.attempt, place)

    def recall(self, place: str, message: Cancel, offer: int = 0) -> None:
        """Has the engine there forget a request that has moved, or that is not to move there by that offer."""
        if offer:
            self._offers.withdraw([offer])
        if ":" in place:
            self.cancel(place, message)
        else:
            self._tell_here(message)

    def cancel(self, place: str, message: Cancel) -> None:
        """Has another box's engine forget a request. Should this not arrive, its next tokens are answered with it."""
        if (node := self.elsewhere().get(place)) is not None:
            self._spawn(self._recall(node, message))

    def learn(self, message: RequestNews, node: str = "") -> None:
        """Acts on what an engine says of a request of ours; `node` is its box, if that is another."""
        if isinstance(message, PromptSignature | PrefixSignatureReply):
            self._offers.learn(message)
        else:
            self.hand_overs.hear(node, message)

    def take(self, node: str, items: list[Emission]) -> FrameAccepted:
        """Delivers what a request of ours has emitted over there; says which of it nobody waits for."""
        wanted, unwanted = [], {}
        for one in items:
            place, attempt = self._requests.place_of(one.request)
            if attempt == one.attempt and place.startswith(f"{node}:"):
                wanted.append(one)
            elif not one.finish:
                unwanted[one.request] = one.attempt
        self._requests.take(wanted)
        return FrameAccepted(tuple(unwanted.items())[:MAX_UNWANTED])

    async def check(self) -> None:
        """Has what another box no longer has run again. Until cancelled."""
        while True:
            await asyncio.sleep(until_tick(CHECK_S))
            place_of = self._requests.place_of
            self._arrived = {name: there for name, there in self._arrived.items() if place_of(name) == there}
            self.hand_overs.look()
            nodes = self.elsewhere()
            asked: dict[str, list[tuple[str, int]]] = {}
            for name, (place, attempt) in self._arrived.items():
                if place in nodes:
                    asked.setdefault(place, []).append((name, attempt))
            await asyncio.gather(*(self._check(place, nodes[place], some) for place, some in asked.items()))

    def hear(self, node: str, beat: Heartbeat) -> None:
        """Takes note of how a box says that it is."""
        self._ours[node] = self._requests.count_at(f"{node}:{beat.engine}")
        self._offers.news.look()

    def _loads(self, others: Mapping[str, str]) -> list[EngineLoad]:
        """Returns the engines that a request may go to, ours first."""
        own, now = self._own(), time.monotonic()
        self._avoid = {place: until for place, until in self._avoid.items() if until > now}
        loads = [self._load(place, node) for place, node in others.items() if place not in self._avoid]
        return loads if own is None else [own, *loads]

    def _role(self, place: str) -> Phases:
        """Returns what the box does of requests."""
        node = node_of(place)
        card = self._plane.state.members[node].announcement if node else self._plane.announcement
        return card.serves if card is not None else "both"

    def _load(self, place: str, node: str) -> EngineLoad:
        beat = self._plane.state.members[node].beat
        requests = beat.requests + self._requests.count_at(place) - self._ours.get(node, 0)
        return EngineLoad(place, False, max(0, requests), beat.slots, beat.capacity)

    async def _forward(self, place: str, node: str, message: Submit, offer: int) -> None:
        name, attempt = message.request.id, message.attempt
        try:
            await self._send(node, message, offer, lambda: self._requests.place_of(name) == (place, attempt))
        except EdgemoeError as error:
            log.info("a request was turned away", extra={"peer": node, "why": str(error)})
            self._avoid[place] = time.monotonic() + AVOID_S
            self._offers.failed(name)
            self._requests.turned_away(name, attempt)
        else:
            self._arrived[name] = (place, attempt)
            if self._requests.place_of(name) != (place, attempt):  # its Cancel may have overtaken it
                self.cancel(place, Cancel(request=name, attempt=attempt))

    async def _check(self, place: str, node: str, requests: list[tuple[str, int]]) -> None:
        question = LostRequestsQuery(place.removeprefix(f"{node}:"), tuple(requests[:MAX_UNWANTED]))
        try:
            answer = await self._plane.channel.ask(node, question, timeout_s=ASK_S)
        except EdgemoeError as error:
            log.debug("what has become of requests is not known", extra={"peer": node, "why": str(error)})
            return
        if not isinstance(answer.message, LostRequestsReply):
            return
        # what has ended meanwhile is missing there too
        lost = [one for one in answer.message.requests if self._requests.place_of(one[0]) == (place, one[1])]
        if lost:
            log.warning("requests were forgotten over there", extra={"peer": node, "count": len(lost)})
            self.dropped += len(lost)
            self._avoid[place] = time.monotonic() + AVOID_S
        for name, attempt in lost:
            self._requests.turned_away(name, attempt)

    async def _send(
        self, node: str, message: ToEngine, offer: int = 0, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Hands a message to another box's engine, by way of its front. Raises EdgemoeError where it is not taken."""
        asked = ForwardedFrame(self._plane.state.model, offer)
        await self._plane.parcels.forward(node, asked, encode(message), wanted)

    async def _pull(self, place: str, node: str, message: FetchPrefixKV) -> None:
        name, attempt = message.request, message.attempt
        try:
            await self._send(node, message, 0, lambda: self.hand_overs.awaits(name, attempt, place))
        except EdgemoeError as error:
            log.info("a hand-over was turned away", extra={"peer": node, "why": str(error)})
            self._avoid[place] = time.monotonic() + AVOID_S
            self.hand_overs.unsent(name, attempt, place)
        else:
            if not self.hand_overs.awaits(name, attempt, place):
                self.cancel(place, Cancel(request=name, attempt=attempt))

    async def _recall(self, node: str, message: Cancel) -> None:
        try:
            await self._send(node, message)
        except EdgemoeError as error:
            log.debug("a request was not recalled", extra={"peer": node, "why": str(error)})
