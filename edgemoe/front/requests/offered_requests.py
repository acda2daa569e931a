"""Requests of this front that wait for the leader to say which engine takes them.

They stay in the request log meanwhile. Where nobody leads, the leader is another one than was asked, or has not decided
within WAIT_S, a request is served without it, by `policy.route`. Each is offered once. One that our engine can start at
once is offered only if another may have had more of its prompt, and waits for nothing but the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import MAX_TAKEN, OfferWithdrawal, RequestGrant, RequestOffer
from edgemoe.config.settings import Route
from edgemoe.errors import PeerError
from edgemoe.front.requests.engine_news import EngineNews
from edgemoe.front.requests.engine_use import EngineMeter
from edgemoe.front.requests.open_offers import OpenOffer, RouteChoice
from edgemoe.front.requests.prefix_keys import PrefixKeys
from edgemoe.front.requests.prefix_questions import PrefixQuestions
from edgemoe.front.requests.signatures import Signatures, more_telling
from edgemoe.ipc.messages import PrefixSignatureReply, PromptSignature, Submit, ToEngine
from edgemoe.policy.route import Rule
from edgemoe.policy.routing.locality_band import BAND_REASONS
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request

log = logging.getLogger(__name__)
ASK_S = 1.0  # that the leader has to take note of an offer
WAIT_S = 20.0  # that it has to decide
HERE_S = 0.1  # that it has to answer where our engine could start at once
NO_WORD = RequestGrant(0)


class OfferingLog(Protocol):
    """The request log, as far as requests are offered."""

    expected_tokens: float

    def is_live(self, request: str) -> bool:
        """Returns whether it is still to be answered."""

    def request_of(self, request: str) -> Request | None:
        """Returns a live request."""

    def submit_waiting(self, request: str) -> None:
        """Submits a request that no engine has."""


class OfferedRequests:
    """One owner, one event loop."""

    def __init__(
        self,
        plane: ControlPlane,
        route: Route,
        requests: OfferingLog,
        meter: EngineMeter,
        keys: PrefixKeys,
        spawn: Callable[..., asyncio.Task[None]],
        tell_here: Callable[[ToEngine], bool],
    ) -> None:
        """`tell_here` hands a message to our engine; false where that takes none."""
        self.offered = self.granted = 0
        self.forecast = {"cached": 0, "alike": 0}  # offers with a signature: the cached part's, an alike prompt's
        self._plane, self._route, self._requests = plane, route, requests
        self._meter, self._keys, self._spawn = meter, keys, spawn
        self._signatures, self._questions = Signatures(keys), PrefixQuestions(tell_here)
        self._numbers = itertools.count(secrets.randbits(48) + 1)
        self._offers: dict[str, OpenOffer] = {}  # by request
        self._by_number: dict[int, OpenOffer] = {}
        self.news = EngineNews(plane, meter)

    @property
    def rule(self) -> Rule:
        """Returns how an engine is chosen without the leader."""
        return "spread" if self._route == "spread" else "local"

    @property
    def waiting(self) -> int:
        """Counts the requests that wait for the leader's word."""
        return sum(not one.place and not one.over for one in self._offers.values())

    def choose(self, message: Submit, own_place: str) -> RouteChoice:
        """Returns where a request is to go; `own_place` is our engine while it takes requests."""
        request = message.request.id
        if self._route in ("local", "spread"):
            return RouteChoice("", "rule")
        if request not in self._offers:
            if message.attempt > 1:
                return RouteChoice("", "again")
            at_once = bool(own_place) and self._meter.starts_at_once(message.request)
            here = at_once and self._may_stay(message.request)
            if here and (not self._plane.leader or self._meter.knows(self._keys.cached(message.request))):
                return RouteChoice(own_place, "at once")
            if not self._plane.leader:
                return RouteChoice("", "no leader")
            self._offer(message, at_once, here)
        return self._look_up(self._offers[request])

    def waits(self, request: str) -> bool:
        """Returns whether a request has been offered and still waits for the leader's word."""
        one = self._offers.get(request)
        return one is not None and self._look_up(one).waits

    def use(self, request: str) -> int:
        """Takes note that the request goes where it was granted; returns the number of its offer, 0 for none."""
        one = self._offers.get(request)
        if one is None or not one.place or one.used:
            return 0
        one.used = True
        return one.number

    def hear(self, grant: RequestGrant) -> None:
        """Takes the leader's word about an offer; that of one who leads no longer is none."""
        one = self._by_number.get(grant.number)
        if one is None or one.over or one.reign != self._plane.state.leader_tracker.current:
            self.withdraw([grant.number])
        elif grant.place and not one.place:
            self._grant(one, grant)
            self._requests.submit_waiting(one.request)

    @property
    def learns(self) -> bool:
        """Returns whether engines are to say what prompts chose."""
        return self._route in ("pull", "eldr")

    def learn(self, message: PromptSignature | PrefixSignatureReply) -> None:
        """Takes what an engine says that a prompt of ours chose, or its cached part."""
        if isinstance(message, PrefixSignatureReply):
            self._questions.hear(message)
        elif (request := self._requests.request_of(message.request)) is not None:
            self._signatures.note(*self._hashes(request), message.signature)

    def failed(self, request: str) -> None:
        """Tells the leader that an engine did not take the request that was granted."""
        if (one := self._offers.get(request)) is not None:
            one.over = "again"
            self.withdraw([one.number])

    async def run(self) -> None:
        """Tells the leader what our engine has to do, and ends offers. Until cancelled."""
        while True:
            await self.news.wait(bool(self._offers))
            self.news.tell()
            self._prune()

    # --- offering ---------------------------------------------------------------------------------------------

    def _may_stay(self, request: Request) -> bool:
        """Returns whether a request need not be offered that our engine can begin at once."""
        return self._route == "pull" or (self._route == "eldr" and self._signatures.of(*self._hashes(request)) is None)

    def _hashes(self, request: Request) -> tuple[int, bytes]:
        return self._keys.name(request.user), self._keys.prefix(request)

    def _offer(self, message: Submit, at_once: bool, here: bool) -> None:
        """Offers a request; one that our engine could not begin at once, when that has told of its cached part."""
        request = message.request
        reign = self._plane.state.leader_tracker.current
        one = OpenOffer(request.id, next(self._numbers), reign, time.monotonic() + WAIT_S, here)
        self._offers[request.id] = self._by_number[one.number] = one
        self.offered += 1
        may_know = self.learns and not at_once and self._meter.begins_like(self._keys.cached(request))
        if not may_know or not self._questions.ask(request, lambda cached: self._go_on(one, message, cached)):
            self._post(one, message, None)

    def _go_on(self, one: OpenOffer, message: Submit, cached: ExpertSignature | None) -> None:
        """Offers a request of which our engine was asked."""
        if self._requests.is_live(one.request):
            self._post(one, message, cached)
            if one.place or one.over:
                self._requests.submit_waiting(one.request)

    def _post(self, one: OpenOffer, message: Submit, cached: ExpertSignature | None) -> None:
        plane, (leader, _) = self._plane, one.reign
        alike = self._signatures.of(*self._hashes(message.request))
        known = more_telling(cached, alike, len(message.request.prompt))
        if known is not None:
            self.forecast["alike" if known is alike else "cached"] += 1
        offer = self._told_of(message, one.number, known)
        if leader != plane.state.node:
            self._spawn(self._ask(one, offer))
            return
        try:
            self._grant(one, plane.desk.ask(leader, offer))
        except PeerError:
            one.over = "unanswered"
        self._starts_here(one)

    def _starts_here(self, one: OpenOffer) -> bool:
        """Ends an offer that the leader has no better place for than our engine, which could start at once."""
        if one.here and not one.place and not one.over:
            one.over = "at once"
            self.withdraw([one.number])
        return one.over == "at once"

    def _grant(self, one: OpenOffer, grant: RequestGrant) -> None:
        one.place, one.why = grant.place, grant.why if grant.why in BAND_REASONS else "granted"
        self.granted += bool(grant.place)

    def _told_of(self, message: Submit, number: int, signature: ExpertSignature | None) -> RequestOffer:
        """Returns what the leader is told of a request."""
        request = message.request
        return RequestOffer(
            number,
            self._plane.state.model,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            expected_tokens=int(min(self._requests.expected_tokens, request.sampling.max_tokens)),
            user=self._keys.name(request.user),
            prefix=self._keys.cached(request),
            waited_ms=message.waited_ms,
            remaining_ms=WAIT_S * 1e3,
            signature=signature,
            principal=self._keys.name(request.identity.principal),
        )

    async def _ask(self, one: OpenOffer, offer: RequestOffer) -> None:
        leader, _ = one.reign
        try:
            answer = await self._plane.channel.ask(leader, offer, timeout_s=HERE_S if one.here else ASK_S)
        except PeerError as error:
            log.debug("an offer was not answered", extra={"peer": leader, "why": str(error)})
            one.over = "unanswered"
            self._requests.submit_waiting(one.request)
            return
        if isinstance(answer.message, RequestGrant):
            self.hear(answer.message)
        if self._starts_here(one):
            self._requests.submit_waiting(one.request)

    def offer_again(
        self, message: Submit, signature: ExpertSignature | None, then: Callable[[RequestGrant], None]
    ) -> None:
        """Tells `then` which engine the leader has go on with a request that is prefilled; "" without its word."""
        leader, node = self._plane.leader, self._plane.state.node
        if self._route in ("local", "spread") or not leader:
            then(NO_WORD)
            return
        known = signature or self._signatures.of(*self._hashes(message.request))
        offer = structs.replace(self._told_of(message, next(self._numbers), known), stage="decode")
        if leader != node:
            self._spawn(self._ask_again(leader, offer, then))
            return
        try:
            granted = self._plane.desk.ask(node, offer)
        except PeerError:
            granted = NO_WORD
        then(granted)

    async def _ask_again(self, leader: str, offer: RequestOffer, then: Callable[[RequestGrant], None]) -> None:
        granted = NO_WORD
        try:
            answer = (await self._plane.channel.ask(leader, offer, timeout_s=ASK_S)).message
            if isinstance(answer, RequestGrant) and self._plane.leader == leader:
                granted = structs.replace(answer, number=offer.number)
        except PeerError as error:
            log.debug("a second offer was not answered", extra={"peer": leader, "why": str(error)})
        then(granted)

    def _look_up(self, one: OpenOffer) -> RouteChoice:
        if one.used:
            return RouteChoice("", "again")
        if one.place and not one.over:
            return RouteChoice(one.place, one.why)
        if not one.over and one.reign != self._plane.state.leader_tracker.current:
            one.over = "no leader"
        if not one.over and time.monotonic() > one.until_s:
            one.over = "too long"
            self.withdraw([one.number])
        return RouteChoice("", one.over or "waits", waits=not one.over)

    def withdraw(self, numbers: list[int]) -> None:
        """Tells the leader of offers that stand no more, or have come to nothing."""
        message, leader = OfferWithdrawal(tuple(numbers[:MAX_TAKEN])), self._plane.leader
        if leader == self._plane.state.node:
            self._plane.desk.withdraw(leader, message)
        elif leader:
            self._plane.channel.tell(leader, message)

    def _prune(self) -> None:
        """Forgets the offers of requests that have ended, and takes back those that have come to nothing."""
        ended = [one for one in self._offers.values() if not self._requests.is_live(one.request)]
        for one in ended:
            del self._offers[one.request], self._by_number[one.number]
        if idle := [one.number for one in ended if not one.used and not one.over]:
            self.withdraw(idle)
