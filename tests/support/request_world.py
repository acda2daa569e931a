"""A front's requests among simulated engines and a simulated leader, with events in any order.

`World` performs the instructions of a `RequestStateMachine` and collects the resulting events. A test delivers any of
them next, twice, or never. `World` checks each client's answer, and that nothing is left once all has ended.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgemoe.config.settings import Route
from edgemoe.errors import EngineCrashed, RequestError
from edgemoe.front import request_events as events
from edgemoe.front.request_state import RequestStateMachine
from edgemoe.front.request_table import RequestRecord, RequestState
from edgemoe.ipc.messages import Submit
from edgemoe.policy.routing.least_loaded import TargetLoad, node_of
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission, Phases, Request, Sampling

T = TypeVar("T")
OWN = "own"  # this box
TABLE = ExpertSignature(4, b"ab")


@dataclass(slots=True)
class RunningAttempt:
    """An attempt at an engine, and the tokens that this has computed of it."""

    message: Submit
    index: int


@dataclass(slots=True)
class FakeEngine:
    """One incarnation of a box's engine."""

    node: str
    boot: int = 1
    is_up: bool = True
    is_still: bool = False  # it says nothing
    step_s: float = 0.0  # that its box says
    role: Phases = "both"
    attempts: dict[tuple[str, int], RunningAttempt] = field(default_factory=dict)
    fetches: set[tuple[str, int]] = field(default_factory=set)

    @property
    def place(self) -> str:
        """Returns its place, as the front names it."""
        return f"boot{self.boot}" if self.node == OWN else f"{self.node}:boot{self.boot}"


@dataclass(slots=True)
class Client:
    """The answer that one request's client has so far."""

    tokens: list[int] = field(default_factory=list)
    ended: str = ""  # how; "" while it waits


def token_of(name: str, index: int) -> int:
    """Returns the only right token of a request at that index."""
    return 10_000 * (1 + sum(map(ord, name)) % 1000) + index


class WatchedMachine(RequestStateMachine):
    """Remembers which transitions there were."""

    went: set[tuple[RequestState, RequestState]]

    def _set_state(self, record: RequestRecord, state: RequestState, place: str = "") -> None:
        self.went.add((record.state, state))
        super()._set_state(record, state, place)


class World:
    """The machine's surroundings, and the receivers of its instructions."""

    def __init__(self, route: Route = "pull", boxes: Mapping[str, Phases] | None = None, slots: int = 2) -> None:
        self.engines = {OWN: FakeEngine(OWN)}
        for node, role in (boxes or {}).items():
            self.engines[node] = FakeEngine(node, role=role)
        self.node, self.route, self.leadership = OWN, route, ("lead", 1)
        self.now_s = 100.0
        self.at_once = self.knows = self.cached = self.alike = False
        self.slots = slots
        self.loads: dict[str, int] = {}  # requests that boxes say they have
        self.hosted = 0  # other boxes' requests here
        self.looked_at = 0  # engines of other boxes
        self.went: set[tuple[RequestState, RequestState]] = set()
        self.machine = WatchedMachine(slots, 64, self, lambda: self.now_s, itertools.count(1))
        self.machine.went = self.went
        self.clients: dict[str, Client] = {}
        self.bag: list[events.RequestEvent] = []  # may arrive
        self.offers: dict[int, tuple[str, bool]] = {}  # with the present leader: number -> request, is decode
        self.granted: dict[int, str] = {}  # by it: number -> place
        self.used: set[int] = set()
        self.attempts: Counter[str] = Counter()  # highest one submitted, by request
        self.told: list[events.RequestInstruction] = []
        self.submitted: list[tuple[str, Submit, int]] = []  # place, message, offer

    # --- surroundings

    def own_place(self) -> str:
        own = self.engines[OWN]
        return own.place if own.is_up else ""

    def stands_still(self) -> set[str]:
        return {engine.place for engine in self.engines.values() if engine.is_still}

    def hosted_count(self) -> int:
        return self.hosted

    def others(self) -> Mapping[str, str]:
        return {one.place: one.node for one in self.engines.values() if one.node != OWN and one.is_up}

    def reported(self, place: str, node: str) -> TargetLoad:
        self.looked_at += 1
        return TargetLoad(place, False, self.loads.get(node, 0), self.slots, 8, self.engines[node].step_s)

    def role(self, node: str) -> Phases:
        return self.engines[node or OWN].role

    def starts_at_once(self, request: Request) -> bool:
        return self.at_once

    def knows_prompt(self, request: Request) -> bool:
        return self.knows

    def may_have_cached(self, request: Request) -> bool:
        return self.cached

    def has_signature(self, request: Request) -> bool:
        return self.alike

    # --- events

    def happen(self, event: events.RequestEvent) -> None:
        """Hands an event to the machine and performs its instructions."""
        for instruction in self.machine.handle(event):
            self.told.append(instruction)
            self._perform(instruction)
        self.machine.check_integrity()

    def accept(self, *names: str, timeout_s: float = 1e6, **sampling: Any) -> None:
        """Accepts new requests of these names, one client each."""
        asked = Sampling(**{"max_tokens": 4000, **sampling})
        some = [Request(id=name, prompt=(1, 2, 3), sampling=asked, seed=1, salt=b"of p") for name in names]
        identity = some[0].identity
        self.machine.check_room(identity.principal, len(some), identity.user)
        for name in names:
            assert name not in self.clients
            self.clients[name] = Client()
        self.happen(events.RequestsAccepted(some, timeout_s))

    def all_of(self, kind: type[T]) -> list[T]:
        """Returns the instructions of that kind so far."""
        return [told for told in self.told if isinstance(told, kind)]

    def cancel(self, name: str) -> None:
        """Has a client hang up."""
        self.clients[name].ended = self.clients[name].ended or "cancelled"
        self.happen(events.RequestCancelled(name))

    def die(self, node: str, *, is_back: bool) -> None:
        """Has an engine die, and another come in its place at once or later."""
        engine = self.engines[node]
        engine.attempts.clear()
        engine.fetches.clear()
        engine.boot += 1
        engine.is_up = is_back

    def emit(self, place: str, name: str, count: int, *, finish: bool = False) -> events.TokensEmitted | None:
        """Computes tokens of an engine's attempt at a request; returns the event of their emission."""
        engine = self._engine(place)
        found = [] if engine is None else [one for (id_, _), one in engine.attempts.items() if id_ == name]
        if not found or engine is None:
            return None
        running = found[-1]
        items = []
        for _ in range(count):
            items.append(
                Emission(
                    request=name,
                    attempt=running.message.attempt,
                    index=running.index,
                    token=token_of(name, running.index),
                )
            )
            running.index += 1
        if finish:
            items[-1] = Emission(
                request=name, attempt=items[-1].attempt, index=items[-1].index, token=items[-1].token, finish="stop"
            )
            del engine.attempts[name, running.message.attempt]
        return events.TokensEmitted("" if engine.node == OWN else engine.node, items)

    def prompt_ended(self, place: str, name: str) -> events.PromptEnded | None:
        """Has an engine that was asked to tell say that it has computed a prompt."""
        engine = self._engine(place)
        if engine is not None:
            for (id_, attempt), running in engine.attempts.items():
                if id_ == name and running.message.hand_over:
                    return events.PromptEnded(node_of(place), name, attempt, TABLE)
        return None

    def fetched(self, place: str, name: str, why: str = "") -> events.PrefixFetched | None:
        """Ends a fetch of an engine; returns its event."""
        engine = self._engine(place)
        if engine is not None:
            for id_, attempt in engine.fetches:
                if id_ == name:
                    engine.fetches.discard((id_, attempt))
                    return events.PrefixFetched(node_of(place), name, attempt, why)
        return None

    def decide(self, number: int, place: str) -> events.RequestEvent:
        """Has the leader decide on an offer."""
        _, is_decode = self.offers[number]
        if place:  # it decides once
            place = self.granted.setdefault(number, place)
        return events.OfferAnswered(number, place) if is_decode else events.OfferGranted(number, place)

    def decide_nothing(self, number: int) -> events.OfferAnswered:
        """Has the leader say that no engine has room; it thinks no more of a request that is prefilled."""
        if self.offers[number][1]:
            del self.offers[number]
        return events.OfferAnswered(number)

    def lead(self, leader: str) -> None:
        """Has another leader come, or none."""
        self.leadership = (leader, self.leadership[1] + 1)
        self.offers.clear()
        self.granted.clear()

    # --- instructions

    def _engine(self, place: str) -> FakeEngine | None:
        return next((one for one in self.engines.values() if one.place == place and one.is_up), None)

    def _perform(self, instruction: events.RequestInstruction) -> None:
        match instruction:
            case events.SendSubmit(place, message, offer):
                self._submit(place, message, offer)
            case events.SendCancel(place, message):
                for engine in [one for one in self.engines.values() if one.place == place]:  # reached or not
                    engine.attempts.pop((message.request, message.attempt), None)
                    engine.fetches.discard((message.request, message.attempt))
            case events.SendOffer(leader, number, request, _, stage):
                assert leader == self.leadership[0]
                assert number not in self.offers
                self.offers[number] = (request.id, stage == "decode")
            case events.SendWithdrawal(number):
                self.offers.pop(number, None)
                self.granted.pop(number, None)
            case events.AskCachedPart(request):
                self.bag.append(events.CachedPartReported(request.id, TABLE))
            case events.SendFetch(place, message):
                if (engine := self._engine(place)) is not None:
                    engine.fetches.add((message.request, message.attempt))
                    if node_of(place):
                        self.bag.append(events.FetchArrived(message.request, message.attempt, place))
                else:
                    self.bag.append(events.FetchRefused(message.request, message.attempt, place))
            case events.DeliverToken(emission):
                self._deliver(emission)
            case events.FailRequest(name, error):
                self._end(name, type(error).__name__ if isinstance(error, EngineCrashed) else str(error))

    def _submit(self, place: str, message: Submit, offer: int) -> None:
        name = message.request.id
        assert message.emitted == tuple(self.clients[name].tokens), "an attempt goes on behind what its client has"
        assert message.attempt == self.attempts[name] + 1, "an attempt has another's number"
        assert not self.clients[name].ended, "a request that has ended is run again"
        self.attempts[name] = message.attempt
        self.submitted.append((place, message, offer))
        if offer:
            assert self.granted.get(offer, place).removeprefix(f"{OWN}:") == place, "another engine was granted"
            self.used.add(offer)
        if (engine := self._engine(place)) is None:
            self.bag.append(events.SubmitRefused(name, message.attempt, place))
            return
        engine.attempts[name, message.attempt] = RunningAttempt(message, len(message.emitted))
        if node_of(place):
            self.bag.append(events.SubmitArrived(name, message.attempt, place))

    def _deliver(self, emission: Emission) -> None:
        client = self.clients[emission.request]
        assert not client.ended, "a client that has its answer gets more"
        assert emission.index == len(client.tokens), "a token is left out or comes twice"
        assert emission.token == token_of(emission.request, emission.index), "a token is another's"
        client.tokens.append(emission.token)
        if emission.finish:
            self._end(emission.request, "finished")

    def _end(self, name: str, how: str) -> None:
        client = self.clients[name]
        assert not client.ended, f"{name} ends twice: {client.ended}, {how}"
        client.ended = how

    # --- the end

    def come_to_an_end(self) -> None:
        """Answers each request: from now on engines live, the leader decides and messages arrive."""
        for engine in self.engines.values():
            engine.is_up, engine.is_still = True, False
        late, self.bag = self.bag, []
        for event in late:
            self.happen(event)
        for _ in range(40 * (1 + len(self.clients))):
            if not len(self.machine):
                break
            self.now_s += 2.0
            self.happen(events.EnginesChanged())
            self.happen(events.TimePassed())
            for place, requests in self._forgotten().items():
                self.happen(events.RequestsForgotten(place, requests))
            for event in self._news():
                self.happen(event)
        assert not len(self.machine), "a request is never answered"
        assert all(client.ended for client in self.clients.values()), "a client is never answered"
        for event in [*self.bag]:
            self.happen(event)
        self._check_nothing_is_left()

    def _news(self) -> list[events.RequestEvent]:
        """Returns the next events of a healthy world."""
        found, self.bag = self.bag, []
        for number in [number for number in self.offers if number not in self.granted]:
            found.append(self.decide(number, next(iter(self.others()), self.own_place())))
        for engine in self.engines.values():
            for name, _ in sorted(engine.fetches):
                found += [event for event in [self.fetched(engine.place, name)] if event is not None]
            for name, _ in list(engine.attempts):
                running = self.emit(engine.place, name, 12, finish=True)
                found += [running] if running is not None else []
        return found

    def _forgotten(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the attempts whose last words were lost, by place: their box is asked for them again and again."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name in self.clients:
            place, attempt = self.machine.place_of(name)
            engine = self._engine(place)
            if engine is not None and (name, attempt) not in engine.attempts:
                found.setdefault(place, []).append((name, attempt))
        return found

    def _check_nothing_is_left(self) -> None:
        """Raises AssertionError if engines or the leader keep anything of ended requests."""
        assert not self.machine.handle(events.TimePassed())
        left = {number for number in self.offers if number not in self.used}
        assert not left, f"the leader is left with offers {left}"
        for engine in self.engines.values():
            assert not engine.fetches, f"{engine.place} fetches for nobody: {engine.fetches}"


def failed(why: str) -> RequestError:
    """Returns an error that ends requests."""
    return RequestError(why)
