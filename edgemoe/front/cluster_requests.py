"""Connects the state machine of requests with other boxes: their engines by way of their fronts, and the leader."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.coordination.coord_store import wait_event
from edgemoe.cluster.control.messages import (
    MAX_UNWANTED,
    ForwardedFrame,
    FrameAccepted,
    Heartbeat,
    LostRequestsQuery,
    LostRequestsReply,
    OfferWithdrawal,
    RequestGrant,
    RequestOffer,
)
from edgemoe.config.settings import Route
from edgemoe.errors import EdgemoeError, PeerError
from edgemoe.front import request_events as events
from edgemoe.front.engine_meter import EnginePace, LocalCapacity, LocalLoad
from edgemoe.front.hosted_requests import HostedRequests, RequestNews
from edgemoe.front.prompt_hints import PrefixKeys, PromptSignatures, better_signature
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.request_table import HeldRequest
from edgemoe.ipc.messages import (
    Cancel,
    ExpertDemandReport,
    FetchPrefixKV,
    LastChunkStarted,
    PrefixKVFetched,
    PrefixSignatureReply,
    PrefixSignatureRequest,
    PromptSignature,
    Submit,
    ToEngine,
    encode,
)
from edgemoe.policy.routing.eldr import BAND_REASONS
from edgemoe.policy.routing.least_loaded import TargetLoad, node_of
from edgemoe.ticking import until_tick
from edgemoe.types.request import Emission, Phases, Request

log = logging.getLogger(__name__)
LOOK_S = 0.05  # at most, between measurements while the engine has anything to do
GAP_S = 0.01  # at least, between reports
REPEAT_S = 0.5  # after which an unchanged measurement is reported again
ASK_S = 2.0  # that another box has to answer
CHECK_S = 1.0  # between questions whether other boxes still have our requests
OFFER_ASK_S = 1.0  # that the leader has to take in an offer
STARTS_HERE_ASK_S = 0.1  # the same, of a request that this box's engine could start at once
OFFER_STANDS_S = 20.0  # that an offer stands with the leader
CACHED_PART_S = 0.05  # that an offer waits for this box's engine to tell of the prompt's cached part


class LoadReporter:
    """Reports the measurements to the leader whenever they have changed."""

    def __init__(self, plane: ControlPlane, meter: LocalLoad) -> None:
        self._changed = asyncio.Event()
        self._plane, self._meter = plane, meter
        self._leadership: tuple[str, int] = ("", 0)  # to which the last report went
        self._reported: tuple[tuple[object, ...], float] = ((), 0.0)  # the last report, and when
        self._idle = False  # the engine, at the last measurement
        self._waited_s = 0.0  # when `wait` returned last

    def on_work_changed(self) -> None:
        """Marks that the engine's work has changed."""
        self._changed.set()

    def on_choosing(self, message: ExpertDemandReport) -> None:
        """Keeps the experts that the engine's requests choose."""
        self._meter.on_choosing(message)
        self._changed.set()

    def on_beat(self) -> None:
        """Reports soon if the leader or this box's engine is another one."""
        if (self._plane.state.leader_tracker.current, self._meter.engine) != self._reported[0][:2]:
            self._changed.set()

    async def wait(self, busy: bool) -> None:
        """Waits until there may be a change to report: LOOK_S at most if `busy` or while the engine has work."""
        await wait_event(self._changed, LOOK_S if busy or not self._idle else until_tick(REPEAT_S))
        await asyncio.sleep(max(0.0, self._waited_s + GAP_S - time.monotonic()))
        self._waited_s = time.monotonic()

    def report(self) -> None:
        """Reports to the leader if the measurement has changed, or the last report is REPEAT_S old."""
        plane, meter, now = self._plane, self._meter, time.monotonic()
        leadership = plane.state.leader_tracker.current
        self._idle = True
        if not plane.leader or not any(plane.state.members):
            return
        use = meter.use()
        self._idle = not use.running and not use.waiting
        marks = leadership, use.engine, use.running, use.waiting, use.prefill_tokens, meter.demand
        if marks == self._reported[0] and now - self._reported[1] < REPEAT_S:
            return
        if leadership != self._leadership:
            self._leadership = leadership
            meter.mark_unreported()
        again, self._reported = marks == self._reported[0], (marks, now)
        report = meter.report(use, again)
        if plane.leader == plane.state.node:
            plane.desk.on_engine_status(plane.leader, report)
        elif not plane.channel.notify_peer(plane.leader, report):
            meter.mark_unreported()


class ClusterRequests:
    """Answers the state machine's questions about the cluster, and performs its instructions there."""

    def __init__(
        self,
        plane: ControlPlane,
        route: Route,
        router: RequestRouter,
        hosted_requests: HostedRequests,
        keys: PrefixKeys,
    ) -> None:
        self.forecast = {"cached": 0, "alike": 0}  # offers with a signature: the cached part's, an alike prompt's
        self.keys, self.route = keys, route
        self._plane, self._router, self._machine = plane, router, router.machine
        self._hosted_requests = hosted_requests
        self._signatures = PromptSignatures(keys)
        self._late: dict[str, asyncio.TimerHandle] = {}  # requests that this box's engine is asked about
        self.meter = LocalLoad(keys, self._facts, self._held)
        self.reporter = LoadReporter(plane, self.meter)
        self.pace = EnginePace()
        router.join(self)

    async def run(self) -> None:
        """Reports this box's work to the leader until cancelled."""
        while True:
            await self.reporter.wait(bool(len(self._machine)))
            self.reporter.report()

    async def check(self) -> None:
        """Asks other boxes whether they still have our requests, until cancelled."""
        while True:
            await asyncio.sleep(until_tick(CHECK_S))
            nodes = self.others()
            asked = [(place, some) for place, some in self._machine.arrived().items() if place in nodes]
            await asyncio.gather(*(self._check(place, nodes[place], some) for place, some in asked))

    # --- questions of the state machine -----------------------------------------------------------------------

    @property
    def node(self) -> str:
        return self._plane.state.node

    @property
    def leadership(self) -> tuple[str, int]:
        return self._plane.state.leader_tracker.current

    def own_place(self) -> str:
        return self._router.connection.place

    def stands_still(self) -> Collection[str]:
        own = [self.own_place()] if self._router.connection.stands_still else []
        return [*own, *self._plane.state.members.standing_still()]

    def hosted_count(self) -> int:
        return len(self._hosted_requests)

    def others(self) -> Mapping[str, str]:
        return self._plane.state.members.serving(self._plane.state.model)

    def reported(self, place: str, node: str) -> TargetLoad:
        beat = self._plane.state.members[node].beat
        return TargetLoad(place, False, beat.requests, beat.slots, beat.capacity, beat.step_s)

    def role(self, node: str) -> Phases:
        card = self._plane.state.members[node].announcement if node else self._plane.announcement
        return card.serves if card is not None else "both"

    def starts_at_once(self, request: Request) -> bool:
        return self.pace.is_usual(time.monotonic()) and self.meter.starts_at_once(request)

    def knows_prompt(self, request: Request) -> bool:
        return self.meter.remembers(self.keys.cached(request))

    def may_have_cached(self, request: Request) -> bool:
        return self.meter.begins_like(self.keys.cached(request))

    def has_signature(self, request: Request) -> bool:
        return self._signatures.of(request) is not None

    def look_at_pace(self) -> float:
        """Measures this box's engine. Returns the time that its decode steps take; 0 while that is not known."""
        engine, now_s = self._router.connection.engine, time.monotonic()
        self.pace.read_counters(engine.stats.values if engine is not None else {}, now_s)
        self._machine.step_s = self.pace.step_s(now_s)
        return self._machine.step_s

    # --- news -------------------------------------------------------------------------------------------------

    def on_tokens(self, node: str, items: list[Emission]) -> FrameAccepted:
        """Delivers the emissions of another box's engine. Returns the attempts that are no longer wanted."""
        unwanted = self._machine.unwanted(node, items)
        self._router.handle(events.TokensEmitted(node, items))
        return FrameAccepted(tuple(unwanted.items())[:MAX_UNWANTED])

    def on_news(self, message: RequestNews, node: str = "") -> None:
        """Handles an engine's news of a request of ours; `node` is its box, "" for this one."""
        match message:
            case PromptSignature(request=name, signature=signature):
                if (request := self._machine.request_of(name)) is not None:
                    self._signatures.note(request, signature)
            case PrefixSignatureReply(request=name, signature=found):
                if (late := self._late.pop(name, None)) is not None:
                    late.cancel()
                    self._router.handle(events.CachedPartReported(name, found))
            case LastChunkStarted(request=name, attempt=attempt, signature=known):
                self._router.handle(events.PromptEnded(node, name, attempt, known))
            case PrefixKVFetched(request=name, attempt=attempt, why=why):
                self._router.handle(events.PrefixFetched(node, name, attempt, why))

    def on_grant(self, grant: RequestGrant) -> None:
        """Follows the leader's decision on an offer."""
        if grant.place:
            self._router.handle(events.OfferGranted(grant.number, grant.place, _reason(grant)))

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        """Corrects another box's load from now on by its beat."""
        self._router.handle(events.LoadReported(node, f"{node}:{beat.engine}"))
        self.reporter.on_beat()

    def on_submitted_here(self, message: Submit, offer: int) -> None:
        """Counts a request that went to this box's engine, by that offer to the leader."""
        self.meter.note(message, (self.node, offer) if offer else None)
        self.reporter.on_work_changed()

    # --- instructions -----------------------------------------------------------------------------------------

    def perform(self, instruction: events.RequestInstruction) -> None:
        """Sends to another box's engine, to the leader, or asks this box's engine about a prompt."""
        match instruction:
            case events.SendSubmit(place, message, offer):
                self._plane.spawn(self._forward(place, message, offer))
            case events.SendCancel(place, message):
                if place in self.others():  # should it not arrive, the attempt's next tokens are answered with it
                    self._plane.spawn(self._cancel(place, message))
            case events.SendFetch(place, message):
                self._plane.spawn(self._fetch(place, message))
            case events.SendOffer():
                self._offer(instruction)
            case events.SendWithdrawal(number):
                self._withdraw(number)
            case events.AskCachedPart(request):
                self._ask_cached_part(request)

    def _ask_cached_part(self, request: Request) -> None:
        name = request.id
        if self._router.connection.send(PrefixSignatureRequest(request=name, prompt=request.prompt, salt=request.salt)):
            self._late[name] = asyncio.get_running_loop().call_later(CACHED_PART_S, self._end_asking, name)
        else:
            self._router.handle(events.CachedPartReported(name, None))

    def _end_asking(self, name: str) -> None:
        del self._late[name]
        self._router.handle(events.CachedPartReported(name, None))

    def _offer(self, asked: events.SendOffer) -> None:
        request, plane = asked.request, self._plane
        alike = self._signatures.of(request)
        known = better_signature(asked.signature, alike, len(request.prompt))
        if asked.stage == "decode":
            known = asked.signature or alike
        elif known is not None:
            self.forecast["alike" if known is alike else "cached"] += 1
        offer = RequestOffer(
            asked.number,
            plane.state.model,
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
            expected_tokens=int(min(self._machine.expected_tokens, request.sampling.max_tokens)),
            user=self.keys.name(request.user),
            prefix=self.keys.cached(request),
            waited_ms=asked.waited_ms,
            remaining_ms=OFFER_STANDS_S * 1e3,
            signature=known,
            stage=asked.stage,
            principal=self.keys.name(request.identity.principal),
        )
        if asked.leader == plane.state.node:
            try:
                self._on_answer(asked.number, plane.desk.on_offer(asked.leader, offer))
            except PeerError:
                self._router.handle(events.OfferUnanswered(asked.number))
        else:
            timeout_s = STARTS_HERE_ASK_S if asked.starts_here else OFFER_ASK_S
            plane.spawn(self._ask(asked.leader, offer, timeout_s))

    async def _ask(self, leader: str, offer: RequestOffer, timeout_s: float) -> None:
        try:
            answer = await self._plane.channel.ask(leader, offer, timeout_s=timeout_s)
        except PeerError as error:
            log.debug("an offer was not answered", extra={"peer": leader, "why": str(error)})
            self._router.handle(events.OfferUnanswered(offer.number))
            return
        self._on_answer(offer.number, answer.message)

    def _on_answer(self, number: int, answer: object) -> None:
        grant = answer if isinstance(answer, RequestGrant) else RequestGrant(number)
        self._router.handle(events.OfferAnswered(number, grant.place, _reason(grant)))

    def _withdraw(self, number: int) -> None:
        message, leader = OfferWithdrawal((number,)), self._plane.leader
        if leader == self._plane.state.node:
            self._plane.desk.on_withdrawal(leader, message)
        elif leader:
            self._plane.channel.notify_peer(leader, message)

    async def _forward(self, place: str, message: Submit, offer: int) -> None:
        name, attempt = message.request.id, message.attempt
        try:
            await self._send(place, message, offer, lambda: self._machine.place_of(name) == (place, attempt))
        except EdgemoeError as error:
            log.info("a request was turned away", extra={"peer": node_of(place), "why": str(error)})
            self._router.handle(events.SubmitRefused(name, attempt, place))
        else:
            self._router.handle(events.SubmitArrived(name, attempt, place))

    async def _fetch(self, place: str, message: FetchPrefixKV) -> None:
        name, attempt = message.request, message.attempt
        try:
            await self._send(place, message, 0, lambda: self._machine.is_fetched_by(name, attempt, place))
        except EdgemoeError as error:
            log.info("a fetch of KV blocks was turned away", extra={"peer": node_of(place), "why": str(error)})
            self._router.handle(events.FetchRefused(name, attempt, place))
        else:
            self._router.handle(events.FetchArrived(name, attempt, place))

    async def _cancel(self, place: str, message: Cancel) -> None:
        try:
            await self._send(place, message)
        except EdgemoeError as error:
            log.debug("a request was not cancelled", extra={"peer": node_of(place), "why": str(error)})

    async def _send(
        self, place: str, message: ToEngine, offer: int = 0, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Hands a message to another box's engine, by way of its front. Raises EdgemoeError where it is not taken."""
        asked = ForwardedFrame(self._plane.state.model, offer)
        await self._plane.parcels.forward(node_of(place), asked, encode(message), wanted)

    async def _check(self, place: str, node: str, requests: list[tuple[str, int]]) -> None:
        question = LostRequestsQuery(place.removeprefix(f"{node}:"), tuple(requests[:MAX_UNWANTED]))
        try:
            answer = await self._plane.channel.ask(node, question, timeout_s=ASK_S)
        except EdgemoeError as error:
            log.debug("a box did not say which requests it has", extra={"peer": node, "why": str(error)})
            return
        if isinstance(answer.message, LostRequestsReply) and answer.message.requests:
            self._router.handle(events.RequestsForgotten(place, answer.message.requests))

    # --- this box's engine ------------------------------------------------------------------------------------

    @property
    def is_going(self) -> bool:
        """Returns whether this box takes nothing more, because it is about to go."""
        return self._router.draining or self._plane.announcement.leaving

    def _facts(self) -> LocalCapacity | None:
        engine, machine = self._router.connection.engine, self._machine
        if engine is None or engine.ready is None or not engine.serving or engine.stands_still or self.is_going:
            return None
        kv_tokens, stats = engine.ready.limits.kv_tokens, engine.stats.values
        return LocalCapacity(engine.boot_id, machine.slots, machine.capacity, kv_tokens, stats, machine.expected_tokens)

    def _held(self) -> Iterator[HeldRequest]:
        yield from self._machine.held_at(self.own_place())
        yield from self._hosted_requests.held()


def _reason(grant: RequestGrant) -> str:
    return grant.why if grant.why in BAND_REASONS else "granted"
