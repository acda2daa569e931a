"""The front's requests by name: their states and transitions, their records, and questions about them.

`RequestStateMachine` moves them by events (docs/design/requests.md).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from edgemoe.config.settings import Route
from edgemoe.errors import InvalidRequest, QueueFull
from edgemoe.front.request_attempts import MOST_EVASIONS, AttemptHistory, RequestPace, RequestQuarantine
from edgemoe.front.request_events import RequestInstruction, SendCancel, SendOffer, SendWithdrawal
from edgemoe.ipc.messages import Cancel, FetchPrefixKV, Submit
from edgemoe.policy import shares
from edgemoe.policy.routing.least_loaded import TargetLoad, node_of
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission, Identity, Phases, Principal, Request

log = logging.getLogger(__name__)
AVOID_S = 1.0  # that an engine is avoided after it turned a request away
EVADED_S = 10.0  # that it is avoided after a request has left it
BY_EXPERTS: frozenset[Route] = frozenset({"pull", "eldr"})  # routes that use which experts prompts chose


class RequestState(StrEnum):
    """States of a request (docs/design/requests.md)."""

    QUEUED = "queued"  # no engine has it
    HELD = "held"  # waits while another request is tried alone
    SUSPECT = "suspect"  # engines died with it; waits to be tried alone
    ASKING = "asking"  # this box's engine is asked about the cached part of its prompt
    OFFERED = "offered"  # waits for the leader to name an engine
    RUNNING = "running"  # an engine has it
    PREFILLING = "prefilling"  # an engine that only prefills has it
    CHOOSING = "choosing"  # its prompt is computed; the engine that decodes is being chosen
    FETCHING = "fetching"  # the engine that decodes fetches the KV blocks
    DONE = "done"


_S = RequestState
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _S.QUEUED: frozenset({_S.HELD, _S.SUSPECT, _S.ASKING, _S.OFFERED, _S.RUNNING, _S.PREFILLING, _S.DONE}),
    _S.HELD: frozenset({_S.QUEUED, _S.DONE}),
    _S.SUSPECT: frozenset({_S.QUEUED, _S.DONE}),
    _S.ASKING: frozenset({_S.OFFERED, _S.QUEUED, _S.DONE}),
    _S.OFFERED: frozenset({_S.QUEUED, _S.DONE}),
    _S.RUNNING: frozenset({_S.QUEUED, _S.DONE}),
    _S.PREFILLING: frozenset({_S.CHOOSING, _S.QUEUED, _S.DONE}),
    _S.CHOOSING: frozenset({_S.FETCHING, _S.RUNNING, _S.QUEUED, _S.DONE}),
    _S.FETCHING: frozenset({_S.CHOOSING, _S.RUNNING, _S.QUEUED, _S.DONE}),
    _S.DONE: frozenset(),
}
AT_ENGINE = frozenset({_S.RUNNING, _S.PREFILLING, _S.CHOOSING, _S.FETCHING})
IN_OFFER = frozenset({_S.ASKING, _S.OFFERED})
IN_MOVE = frozenset({_S.PREFILLING, _S.CHOOSING, _S.FETCHING})


class HeldRequest(NamedTuple):
    """How much of a request an engine has computed."""

    prompt_tokens: int
    emitted: int
    max_tokens: int


@dataclass(slots=True)
class OpenOffer:
    """The one offer of a request to a leader."""

    number: int
    leadership: tuple[str, int]  # the leader and its epoch
    until_s: float
    starts_here: bool  # this box's engine could start the request at once
    place: str = ""  # that the leader granted
    why: str = ""  # that place
    closed: str = ""  # why the offer no longer stands; "" while it does


@dataclass(slots=True)
class PrefillMove:
    """A move from an engine that prefilled to one that decodes."""

    prompt: tuple[int, ...]  # its KV blocks are fetched: the prompt, and the tokens before this attempt
    signature: ExpertSignature | None = None  # of the prompt
    target: str = ""  # place that fetches the blocks
    offer: int = 0  # number of the decode offer; 0 for none
    leadership: tuple[str, int] = ("", 0)  # leader and epoch of that offer
    until_s: float = 0.0  # when the target must have answered
    failed: list[str] = field(default_factory=list)  # places that did not get the blocks


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One accepted request."""

    request: Request
    accepted_s: float
    timeout_s: float
    state: RequestState = RequestState.QUEUED
    place: str = ""  # the engine that has it; "" while none does
    attempt: int = 0  # 0 before the first submission
    emitted: list[int] = field(default_factory=list)
    arrived: bool = False  # another box has confirmed the attempt
    attempts: AttemptHistory = field(default_factory=AttemptHistory)
    offer: OpenOffer | None = None
    move: PrefillMove | None = None
    identity: Identity = field(init=False)
    deadline_s: float = field(init=False)  # of its next progress
    pace: RequestPace = field(default_factory=RequestPace)
    private_salt: bytes = b""  # of KV blocks fetched for this request; b"" before a fetch

    def __post_init__(self) -> None:
        self.identity = self.request.identity
        self.note_progress(self.accepted_s)

    def note_progress(self, now_s: float) -> None:
        """Moves the deadline to `timeout_s` from now."""
        self.deadline_s = now_s + self.timeout_s

    @property
    def id(self) -> str:
        """Returns the request's name."""
        return self.request.id

    def waited_ms(self, now_s: float) -> float:
        """Returns how long ago the request was accepted."""
        return (now_s - self.accepted_s) * 1e3

    def submit_message(self, now_s: float, *, hand_over: bool, signature: bool) -> Submit:
        """Returns the message that starts the present attempt behind the tokens emitted so far."""
        return Submit(
            request=msgspec.structs.replace(self.request, private_salt=self.private_salt),
            emitted=tuple(self.emitted),
            attempt=self.attempt,
            remaining_ms=max(0.0, (self.deadline_s - now_s) * 1e3),
            waited_ms=self.waited_ms(now_s),
            hand_over=hand_over,
            signature=signature,
        )

    def fetch_message(self, move: PrefillMove, node: str, remaining_s: float) -> FetchPrefixKV:
        """Returns the message that has an engine fetch the KV blocks of the present attempt from that box."""
        self.private_salt = hashlib.blake2b(self.id.encode(), digest_size=16).digest()
        return FetchPrefixKV(
            request=self.id,
            attempt=self.attempt,
            node=node,
            prompt=move.prompt,
            salt=self.request.salt,
            private_salt=self.private_salt,
            remaining_ms=remaining_s * 1e3,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where the record contradicts its state."""
        state, offer = self.state, self.offer
        assert bool(self.place) == (state in AT_ENGINE), f"{self.id} is {state} at '{self.place}'"
        assert len(self.emitted) <= self.request.sampling.max_tokens, f"{self.id} has emitted too much"
        assert self.attempts.fruitless <= 2 * self.attempt, f"{self.id} counts attempts that never were"
        is_open = offer is not None and not offer.closed and not offer.place
        assert is_open == (state in IN_OFFER), f"{self.id} is {state}, its offer is {offer}"
        assert (self.move is not None) == (state in IN_MOVE), f"{self.id} is {state}, its move is {self.move}"
        has_target = self.move is not None and bool(self.move.target)
        assert has_target == (state is RequestState.FETCHING), f"{self.id} is {state}, its move is {self.move}"


class RoutingFacts(Protocol):
    """The state of engines and of the leader. Questions only."""

    @property
    def node(self) -> str:
        """Returns this box's name; "" outside a cluster."""

    @property
    def route(self) -> Route:
        """Returns the setting `cluster.route`."""

    @property
    def leadership(self) -> tuple[str, int]:
        """Returns the leader, "" for none, and its epoch."""

    def own_place(self) -> str:
        """Returns this box's engine; "" while it takes no requests."""

    def stands_still(self) -> Collection[str]:
        """Returns the places of engines that have said nothing for a while."""

    def hosted_count(self) -> int:
        """Counts other boxes' requests at this box's engine."""

    def others(self) -> Mapping[str, str]:
        """Returns engines of other boxes that take requests: place -> node."""

    def reported(self, place: str, node: str) -> TargetLoad:
        """Returns the load of another box's engine as of its last beat."""

    def role(self, node: str) -> Phases:
        """Returns the phases of a request that a box runs; "" is this box."""

    def starts_at_once(self, request: Request) -> bool:
        """Returns whether this box's engine would start the request in its next step."""

    def knows_prompt(self, request: Request) -> bool:
        """Returns whether this box's engine has had half of the prompt or more."""

    def may_have_cached(self, request: Request) -> bool:
        """Returns whether this box's engine has had a prompt that begins like this one."""

    def has_signature(self, request: Request) -> bool:
        """Returns whether it is known which experts a similar prompt chose."""


class RoutingDecision(NamedTuple):
    """The engine for a request, the reason, and the offer; `place` is "" if load decides."""

    place: str
    why: str
    offer: int = 0


class RequestTable:
    """Owns every live request of this front. `go` is the only way from one state to another."""

    def __init__(self, slots: int, capacity: int, surroundings: RoutingFacts, now: Callable[[], float]) -> None:
        """Takes `slots`, the requests that run in this box's engine at once, and `capacity`, which counts waiting ones
        too.
        """
        self.slots, self.capacity = slots, capacity
        self.surroundings, self._now = surroundings, now
        self.quarantine = RequestQuarantine(now)
        self._live: dict[str, RequestRecord] = {}  # in the order of acceptance
        self._by_number: dict[int, RequestRecord] = {}  # of an offer that the leader has not decided on
        self._at = Counter[str]()  # live requests, by place
        self._in = Counter[RequestState]()  # live requests, by state
        self._suspects: dict[str, RequestRecord] = {}  # tried one by one, in this order
        self._on_trial = ""
        self._mean_s = 1.0  # a request's duration, lately
        self._most = capacity  # requests alive at once, by the room there was at the last acceptance
        self.step_s = 0.0  # that a decode step of this box's engine takes; 0 while it is not known
        self._avoided: dict[str, float] = {}  # places that turned requests away, until when
        self._ours: dict[str, int] = {}  # our requests at a node's engine as of its last beat
        self._todo: list[RequestInstruction] = []

    # --- questions --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._live)

    @property
    def room(self) -> int:
        """Returns how many requests may be alive at once, on all boxes."""
        loads = [self._load(place, node) for place, node in self.surroundings.others().items()]
        free = sum(max(0, load.capacity - load.requests) for load in loads)
        return self.capacity + free + sum(self._at[load.place] for load in loads)

    @property
    def capacity_per_principal(self) -> int:
        """Returns how many requests one principal gets while nobody else has any."""
        return shares.most_of(self.room)

    @property
    def capacity_per_user(self) -> int:
        """Returns how many requests one user gets while its principal has no others."""
        return shares.most_of(self.capacity_per_principal, shares.OF_USER)

    @property
    def uses_signatures(self) -> bool:
        """Returns whether engines should report the experts of prompts."""
        return self.surroundings.route in BY_EXPERTS

    def own_load(self) -> TargetLoad | None:
        """Returns how many requests this box's engine has, other boxes' included; None while it takes none."""
        if not (place := self.surroundings.own_place()):
            return None
        requests = self._at[place] + self.surroundings.hosted_count()
        return TargetLoad(place, True, requests, self.slots, self.capacity, self.step_s)

    def count_at(self, place: str) -> int:
        """Counts the live requests that this engine has."""
        return self._at[place]

    def count_offered(self) -> int:
        """Counts the requests that wait for the leader."""
        return sum(self._in[state] for state in IN_OFFER)

    def count_moving(self) -> int:
        """Counts the requests that move, or may."""
        return sum(record.move is not None for record in self._live.values())

    def request_of(self, request: str) -> Request | None:
        """Returns a live request."""
        record = self._live.get(request)
        return None if record is None else record.request

    def state_of(self, request: str) -> RequestState:
        """Returns the state of a request; DONE for an unknown one."""
        record = self._live.get(request)
        return RequestState.DONE if record is None else record.state

    def place_of(self, request: str) -> tuple[str, int]:
        """Returns the engine that has the request, and its attempt there; ("", 0) for an unknown one."""
        record = self._live.get(request)
        return ("", 0) if record is None else (record.place, record.attempt)

    def is_fetched_by(self, request: str, attempt: int, place: str) -> bool:
        """Whether that engine was asked to fetch the attempt's KV blocks."""
        record = self._live.get(request)
        return (
            record is not None
            and record.attempt == attempt
            and record.move is not None
            and bool(place)
            and record.move.target == place
        )

    def held_at(self, place: str) -> Iterator[HeldRequest]:
        """Returns how far the requests are that this engine has."""
        for record in self._live.values():
            if record.place == place:
                request = record.request
                yield HeldRequest(len(request.prompt), len(record.emitted), request.sampling.max_tokens)

    def arrived(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the attempts that other boxes have confirmed, by place."""
        found: dict[str, list[tuple[str, int]]] = {}
        for record in self._live.values():
            if record.arrived:
                found.setdefault(record.place, []).append((record.id, record.attempt))
        return found

    def unwanted(self, node: str, items: Sequence[Emission]) -> dict[str, int]:
        """Returns the attempts among these emissions of a box that go on for nobody: request -> attempt."""
        return {one.request: one.attempt for one in items if not one.finish and not self._is_current(node, one)}

    def check_room(self, principal: Principal, wanted: int, user: str = "") -> None:
        """Raises QueueFull, or InvalidRequest if `wanted` never fit. Without a `user`, only the principal counts."""
        room = self.room
        if wanted > (most := shares.most_of(shares.most_of(room), shares.OF_USER)):
            raise InvalidRequest(f"{wanted} choices at once are more than the {most} that one user may ever have")
        held = Counter(record.identity.user for record in self._live.values() if record.identity.principal == principal)
        left = shares.left_of(held.total(), room - len(self._live))
        if not shares.fits(wanted, held[user], left, shares.OF_USER):
            wait_s = min(60.0, max(1.0, self._mean_s * wanted / 2))
            alive = f"{len(self._live)} requests are waiting or running, {held.total()} of them yours"
            raise QueueFull(f"{alive}; try again", retry_after_s=wait_s)
        self._most = max(room, len(self._live))

    def check_integrity(self) -> None:
        """Raises AssertionError where the machine contradicts itself."""
        for name, record in self._live.items():
            assert name == record.id, f"{name} is filed under another's name"
            record.check_integrity()
        records = self._live.values()
        assert self._at == Counter(record.place for record in records), "requests are counted at other places"
        assert +self._in == Counter(record.state for record in records), "requests are counted in other states"
        suspects = {record.id for record in records if record.state is RequestState.SUSPECT}
        assert suspects == self._suspects.keys(), "other requests wait for a trial than are suspects"
        assert not self._on_trial or self._on_trial in self._live, "a request is on trial that has ended"
        numbers = {record.offer.number for record in records if record.state in IN_OFFER and record.offer is not None}
        choosing = {r.move.offer for r in records if r.state is RequestState.CHOOSING and r.move is not None} - {0}
        assert self._by_number.keys() == numbers | choosing, "offers stand of requests that wait for no leader"
        assert len(self._live) <= self._most, "more requests than there is room for"

    # --- transitions ------------------------------------------------------------------------------------------

    def _add(self, record: RequestRecord) -> None:
        self._live[record.id] = record
        self._at[""] += 1
        self._in[record.state] += 1

    def _remove(self, record: RequestRecord) -> None:
        self._set_state(record, RequestState.DONE)
        del self._live[record.id]
        self._at[""] -= 1
        del self._in[RequestState.DONE]

    def _set_state(self, record: RequestRecord, state: RequestState, place: str = "") -> None:
        """Moves a request into another state, and undoes the effects of the state that it leaves.

        `place` is the engine that has it now; by default that stays the same as long as an engine has it.
        """
        before, place = record.state, place or (record.place if state in AT_ENGINE else "")
        assert state in TRANSITIONS[before], f"{record.id} cannot go from {before} to {state}"
        if record.offer is not None:
            self._leave_offer(record.offer, before, state)
        if record.move is not None:
            self._leave_move(record, record.move, state)
        self._in[before] -= 1
        self._in[state] += 1
        self._at[record.place] -= 1
        self._at[place] += 1
        if not self._at[record.place]:
            del self._at[record.place]  # engines come and go
        record.state, record.place, record.arrived = state, place, record.arrived and place == record.place
        self._suspects.pop(record.id, None)
        if state is RequestState.SUSPECT:
            self._suspects[record.id] = record

    def _leave_offer(self, offer: OpenOffer, before: RequestState, state: RequestState) -> None:
        """Withdraws an offer that its request does not wait for any more, or that was granted and not used."""
        is_left = before in IN_OFFER and state not in IN_OFFER
        if is_left:
            del self._by_number[offer.number]
        if not offer.closed and (state is RequestState.DONE or (is_left and not offer.place)):
            offer.closed = "again"
            self._todo.append(SendWithdrawal(offer.number))

    def _leave_move(self, record: RequestRecord, move: PrefillMove, state: RequestState) -> None:
        """Cancels the fetch that a request leaves behind, and withdraws the offer by which its engine was named."""
        if record.state is RequestState.CHOOSING and self._by_number.pop(move.offer, None) is not None:
            self._todo.append(SendWithdrawal(move.offer))
        elif record.state is RequestState.FETCHING:
            self._send_cancel(move.target, record)
            if move.offer:
                self._todo.append(SendWithdrawal(move.offer))
            move.target, move.offer = "", 0
        if state not in IN_MOVE:
            record.move = None

    def _send_cancel(self, place: str, record: RequestRecord) -> None:
        self._todo.append(SendCancel(place, Cancel(request=record.id, attempt=record.attempt)))

    def _current(self, request: str, attempt: int) -> RequestRecord | None:
        """Returns the request if that is its current attempt and an engine has it."""
        record = self._live.get(request)
        return record if record is not None and record.place and record.attempt == attempt else None

    def _is_current(self, node: str, emission: Emission) -> bool:
        """Returns whether the emission is of a current attempt at that box."""
        record = self._current(emission.request, emission.attempt)
        return record is not None and node_of(record.place) == node

    def _load(self, place: str, node: str) -> TargetLoad:
        """Returns the load of another box's engine, corrected by our requests that began and ended there since."""
        load = self.surroundings.reported(place, node)
        return load._replace(requests=max(0, load.requests + self._at[place] - self._ours.get(node, 0)))

    def _role(self, place: str) -> Phases:
        return self.surroundings.role(node_of(place))

    def _loads(self, others: Mapping[str, str]) -> list[TargetLoad]:
        """Returns the engines that a request may go to, this box's first."""
        own, now_s = self.own_load(), self._now()
        self._avoided = {place: until for place, until in self._avoided.items() if until > now_s}
        out = {*self._avoided, *self.surroundings.stands_still()} if others else set()
        loads = [self._load(place, node) for place, node in others.items() if place not in out]
        return loads if own is None or own.place in out else [own, *loads]

    def _reason_to_leave(self, record: RequestRecord, still: Collection[str]) -> str:
        """Returns why a request should go on at another engine, "" if it stays: "still" or "slow".

        `still` are the places of engines that have said nothing for a while.
        """
        now_s, is_still = self._now(), record.place in still
        if not record.place or not (is_still or record.pace.is_due(now_s)):
            return ""
        stays = record.request.sampling.prompt_logprobs is not None or record.id == self._on_trial
        if stays or record.pace.evasions >= MOST_EVASIONS or not (others := self.surroundings.others()):
            return ""
        free = [load for load in self._loads(others) if load.place != record.place and load.requests < load.capacity]
        if is_still:
            return "still" if free else ""
        left_tokens = record.request.sampling.max_tokens - len(record.emitted)
        return "slow" if record.pace.is_slow(now_s, free, left_tokens) else ""

    def _avoid(self, place: str, for_s: float = AVOID_S) -> None:
        self._avoided[place] = self._now() + for_s

    # --- parts of transitions -----------------------------------------------------------------------------------

    def _send_offer(self, record: RequestRecord, offer: OpenOffer, signature: ExpertSignature | None = None) -> None:
        told = SendOffer(offer.leadership[0], offer.number, record.request, record.waited_ms(self._now()))
        self._todo.append(told._replace(starts_here=offer.starts_here, signature=signature))

    def _line_up_suspects(self, waiting: Sequence[RequestRecord]) -> None:
        """Makes suspects of those requests that may be to blame, the likeliest first."""
        suspects = [record for record in waiting if record.attempts.suspect]
        for record in sorted(suspects, key=lambda record: record.attempts.allowed):
            if record.state is RequestState.HELD:
                self._set_state(record, RequestState.QUEUED)
            self._set_state(record, RequestState.SUSPECT)

    def _stay(self, record: RequestRecord) -> None:
        log.info("a request stays where it was prefilled", extra={"place": record.place})
        self._set_state(record, RequestState.RUNNING)
