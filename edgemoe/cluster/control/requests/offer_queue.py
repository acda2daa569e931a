"""The leader's queue of offered requests: events in, actions out, no I/O. `RequestDesk` performs the actions.

A `RoutingPolicy` assigns requests to engines. It sees the next request of each user, so that principals and their users
take turns as in an engine's own queue (`engine.fairness`). A granted request counts as there until its engine
reports it. Offers expire; the requests themselves stay with their fronts, so nothing is lost with this queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from edgemoe.cluster.control.messages import PREFIX_TOKENS, LoadReport, RequestOffer
from edgemoe.policy import shares
from edgemoe.policy.routing.eldr import LocalityBand
from edgemoe.policy.routing.least_loaded import node_of
from edgemoe.policy.routing.marginal_union import PromptForecast
from edgemoe.policy.routing.offers import RecentDispatches, RoutingPolicy, RoutingTarget, WaitingRequest
from edgemoe.policy.routing.signatures import MOST_S, ModelSizes, counts_of, experts_of, resident_of, union_of
from edgemoe.types.arrays import FloatArray
from edgemoe.types.expert_signatures import ExpertDemand

MAX_KEYS = 4096  # of prompts; the longest unused go first, as they do in the engine's cache
TOKENS_PER_S = 1000.0  # prefill speed of an engine without a measurement
NO_DEMAND = ExpertDemand(b"", b"", (), 0.0, 0.0)


class PromptMemory:
    """One engine's prompts by keyed hashes, the latest last, and its last reported expert demand."""

    def __init__(self) -> None:
        self._demand = NO_DEMAND
        self._experts = 0.0  # that a step loads there
        self._sizes = ModelSizes()
        self._tables: tuple[FloatArray | None, FloatArray | None] = None, None  # resident, union: of the last report
        self._keys: OrderedDict[int, None] = OrderedDict()
        self._prefixes: frozenset[int] = frozenset()

    def note(self, prefix: Iterable[int]) -> None:
        """Adds the prompts of requests granted to the engine."""
        known, new = self._keys, False
        for key in prefix:
            new |= key not in known
            known[key] = None
            known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
        if new:
            self._prefixes = frozenset(known)

    def on_report(self, place: str, use: LoadReport, sizes: ModelSizes, now_s: float) -> RoutingTarget:
        """Merges the engine's report. Returns the view of the engine."""
        self.note(keys_of(use.prefixes))
        if use.choices is not None:
            self._demand, self._experts = use.choices, experts_of(use.choices.absent)
        demand = self._demand
        if use.choices is not None or sizes != self._sizes:
            self._sizes = sizes
            self._tables = resident_of(demand.far, demand.far_s, sizes), union_of(demand.absent, sizes)
        resident, union = self._tables
        return RoutingTarget(
            place,
            use.slots,
            use.capacity,
            use.blocks,
            use.free_blocks,
            running=use.running,
            waiting=use.waiting,
            prefill_tokens=use.prefill_tokens,
            remaining_tokens=float(use.remaining_tokens),
            tokens_per_s=max(use.tokens_per_s, 1.0) if use.tokens_per_s else TOKENS_PER_S,
            prefixes=self._prefixes,
            taken=frozenset(f"{node}:{number}" for node, number in use.taken),
            reported_s=now_s,
            resident=resident,
            union=union,
            step_s=min(demand.step_s, MOST_S),
            expert_s=min(demand.expert_s, MOST_S),
            decode_s=min(demand.step_s + demand.expert_s * self._experts, MOST_S),
        )


def offered_as(name: str, offer: RequestOffer, sizes: ModelSizes, now_s: float, home: str) -> WaitingRequest:
    """Returns the policy's view of an offer, without a forecast if that cannot be of this model's experts."""
    told = offer.signature
    counts = None if told is None else counts_of(told.tokens, told.chosen, sizes)
    return WaitingRequest(
        name,
        offer.prompt_tokens,
        now_s - offer.waited_ms / 1e3,
        max_tokens=offer.max_tokens,
        expected_tokens=float(min(offer.expected_tokens, offer.max_tokens)),
        user=str(offer.user) if offer.user else "",
        principal=str(offer.principal or offer.user or ""),
        home=home,
        prefix=tuple(keys_of(offer.prefix)),
        key_tokens=PREFIX_TOKENS,
        signature=counts,
        chance=None if told is None or counts is None else _chance(counts, told.tokens),
    )


def keys_of(prefix: bytes) -> list[int]:
    """Splits the hashes; an incomplete one at the end is dropped."""
    keys: list[int] = np.frombuffer(prefix[: len(prefix) // 8 * 8], "<u8").tolist()
    return keys


def _chance(counts: FloatArray, tokens: int) -> FloatArray:
    """Returns the probability [L, E] that a request's token chooses each expert."""
    return PromptForecast(max(1, round(float(counts.sum()) / (len(counts) * tokens)))).chance(counts)


MAX_OFFERS = 512  # of one front
MAX_TURNS = 4096  # principals, and users, whose last grant is remembered
AGING_SHARE = 0.4  # of the prefill speed, as in the engines
MOST_HEADS = 64  # users whose next requests are compared, the longest waiting ones
MOST_FORECAST_BYTES = 64 << 20  # of expert forecasts of waiting offers; further offers get none


class LeadershipChanged(NamedTuple):
    """This box leads in another epoch; earlier offers were another leader's."""

    epoch: int


class RequestOffered(NamedTuple):
    """A front offers a request."""

    node: str
    offer: RequestOffer


class OfferWithdrawn(NamedTuple):
    """A front withdraws offers."""

    node: str
    numbers: tuple[int, ...]


class EngineReported(NamedTuple):
    """A front reported the work of its engine."""

    node: str
    use: LoadReport


class ServingEngines(NamedTuple):
    """The boxes that are here, and the engines that take requests, have changed."""

    nodes: frozenset[str]
    places: frozenset[str]
    sizes: ModelSizes = ModelSizes()  # of the model that they serve
    writing: frozenset[str] = frozenset()  # engines that decode


class QueueTimePassed(NamedTuple):
    """Some time has passed; the clock says how much."""


class GrantOffer(NamedTuple):
    """Tell a front which engine takes the request of its offer."""

    node: str
    number: int
    place: str
    why: str = ""  # a word for the metrics, if any


class RefuseOffer(NamedTuple):
    """Tell a front that it has too many offers here."""

    node: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class WaitingOffer:
    """An offer that is not decided."""

    node: str
    number: int
    offered: WaitingRequest
    until_s: float


class LastTurns:
    """Owns the times at which each user, or principal, was granted a request last."""

    def __init__(self) -> None:
        self._at_s = OrderedDict[str, float]()

    def note(self, name: str, now_s: float) -> None:
        """Records a grant to this user or principal."""
        self._at_s[name] = now_s
        self._at_s.move_to_end(name)
        if len(self._at_s) > MAX_TURNS:
            self._at_s.popitem(last=False)

    def aged(self, name: str, arrived_s: float) -> float:
        """Returns the later of a request's arrival and the last grant to the same user or principal."""
        return max(arrived_s, self._at_s.get(name, arrived_s))


Event = LeadershipChanged | RequestOffered | OfferWithdrawn | EngineReported | ServingEngines | QueueTimePassed
Action = GrantOffer | RefuseOffer


class OfferQueue:
    """Owns the waiting offers, and the reported state of engines."""

    def __init__(self, policy: Callable[[], RoutingPolicy], band: LocalityBand, clock: Callable[[], float]) -> None:
        """Takes `policy`, which makes a fresh policy, and the `band` that chooses the engine to decode a prefilled
        request.
        """
        self.granted = 0
        self._make, self._band, self._clock = policy, band, clock
        self._serving = ServingEngines(frozenset(), frozenset())
        self._forget()

    def __len__(self) -> int:
        return len(self._waiting)

    def handle(self, event: Event) -> list[Action]:
        """Updates the queue by an event. Returns the actions to perform."""
        now_s = self._clock()
        match event:
            case LeadershipChanged():
                self._forget()
            case RequestOffered(node, offer):
                if not self._take_in(node, offer, now_s):
                    return [RefuseOffer(node, offer.number)]
            case OfferWithdrawn(node, numbers):
                for number in numbers:
                    self._waiting.pop(_name(node, number), None)
                    self._dispatches.withdraw(_name(node, number))
            case EngineReported(node, use):
                self._on_engine_status(node, use, now_s)
            case ServingEngines():
                self._look_at(event)
            case QueueTimePassed():
                self._drop_ended(now_s)
        return self._assign(now_s)

    def decoder(self, node: str, offer: RequestOffer) -> str:
        """Chooses the engine that decodes a prefilled request; "" if none has room."""
        if node not in self._serving.nodes:
            return ""
        now_s = self._clock()
        offered = self._offered(_name(node, offer.number), offer, now_s)
        views = self.writing()
        open_ = [view for view in views if view.requests < min(view.slots, view.capacity)]
        if not open_:
            return ""
        place = self._band(offered, open_, now_s).place
        self._dispatches.dispatch(offered, place, now_s)
        self._memories[place].note(offered.prefix)
        return place

    def writing(self) -> list[RoutingTarget]:
        """Returns the state of the engines that decode."""
        return [view for view in self._dispatches.views() if view.place in self._serving.writing]

    @property
    def writers(self) -> frozenset[str]:
        """Returns the places of engines that decode, with or without a report."""
        return self._serving.writing

    @property
    def sizes(self) -> ModelSizes:
        """Returns the sizes of the served model."""
        return self._serving.sizes

    @property
    def foreseen_bytes(self) -> int:
        """Counts the bytes of the expert forecasts of waiting offers."""
        tables = (table for one in self._waiting.values() for table in (one.offered.signature, one.offered.chance))
        return sum(table.nbytes for table in tables if table is not None)

    def _forget(self) -> None:
        self._policy = self._make()
        self._waiting: dict[str, WaitingOffer] = {}  # by name, in order of arrival here
        self._dispatches = RecentDispatches()
        self._memories: dict[str, PromptMemory] = {}  # by place
        self._principals, self._users = LastTurns(), LastTurns()

    # --- state ------------------------------------------------------------------------------------------------

    def _take_in(self, node: str, offer: RequestOffer, now_s: float) -> bool:
        if node not in self._serving.nodes:
            return False
        name = _name(node, offer.number)
        offered = self._offered(name, offer, now_s)
        waiting = [one.offered.principal for one in self._waiting.values() if one.node == node]
        if not shares.fits(1, waiting.count(offered.principal), MAX_OFFERS - len(waiting)):
            return False
        self._waiting[name] = WaitingOffer(node, offer.number, offered, now_s + offer.remaining_ms / 1e3)
        return True

    def _offered(self, name: str, offer: RequestOffer, now_s: float) -> WaitingRequest:
        offered = offered_as(name, offer, self._serving.sizes, now_s, self._home(name))
        return offered if self.foreseen_bytes < MOST_FORECAST_BYTES else _unforeseen(offered)

    def _home(self, name: str) -> str:
        return next((place for place in self._memories if node_of(place) == node_of(name)), "")

    def _on_engine_status(self, node: str, use: LoadReport, now_s: float) -> None:
        place = f"{node}:{use.engine}"
        for other in [known for known in self._memories if known.startswith(f"{node}:") and known != place]:
            self._drop(other)
        if not use.engine or place not in self._serving.places | self._serving.writing:
            return
        memory = self._memories.setdefault(place, PromptMemory())
        self._dispatches.on_engine_view(memory.on_report(place, use, self._serving.sizes, now_s))

    def _look_at(self, serving: ServingEngines) -> None:
        for place in self._memories.keys() - serving.places - serving.writing:
            self._drop(place)
        self._waiting = {name: one for name, one in self._waiting.items() if one.node in serving.nodes}
        if serving.sizes != self._serving.sizes:  # forecasts are of another model's experts
            self._dispatches = RecentDispatches()
            self._waiting = {n: replace(one, offered=_unforeseen(one.offered)) for n, one in self._waiting.items()}
        self._serving = serving

    def _drop(self, place: str) -> None:
        del self._memories[place]
        self._dispatches.forget(place)

    # --- who goes where ---------------------------------------------------------------------------------------

    def _assign(self, now_s: float) -> list[Action]:
        """Grants offers to engines with room. While no engine has room, an event costs nothing for waiting offers."""
        actions: list[Action] = []
        while self._waiting and self._policy.takes(views := self._reading()):
            self._drop_ended(now_s)
            assigned = self._policy.assign(self._heads(views, now_s), views, now_s)
            for name, place in assigned:
                why = self._band.reason(self._waiting[name].offered, views, place)
                actions.append(self._grant(self._waiting.pop(name), place, why, now_s))
            if not assigned:
                break
        return actions

    def _drop_ended(self, now_s: float) -> None:
        self._waiting = {name: one for name, one in self._waiting.items() if one.until_s > now_s}

    def _reading(self) -> list[RoutingTarget]:
        return [view for view in self._dispatches.views() if view.place in self._serving.places]

    def _grant(self, one: WaitingOffer, place: str, why: str, now_s: float) -> GrantOffer:
        self.granted += 1
        offered = one.offered
        self._dispatches.dispatch(offered, place, now_s)
        self._memories[place].note(offered.prefix)
        self._principals.note(offered.principal, now_s)
        self._users.note(offered.user, now_s)
        return GrantOffer(one.node, one.number, place, why)

    def _heads(self, views: list[RoutingTarget], now_s: float) -> list[WaitingRequest]:
        """Returns the next request of each of MOST_HEADS users, the oldest first. Ages start at the user's last grant.

        If several principals wait, the age of a principal's first request starts at the principal's last grant. The
        requests of its other users then count as new.
        """
        principals: dict[str, list[tuple[float, WaitingRequest]]] = {}
        for head in self._heads_of_users(views, now_s):
            since_s = self._users.aged(head.user, head.arrived_s)
            principals.setdefault(head.principal, []).append((since_s, head))
        aged: list[tuple[float, WaitingRequest]] = []
        for principal, heads in principals.items():
            heads.sort(key=lambda pair: pair[0])
            if len(principals) > 1:
                (since_s, first), *rest = heads
                heads = [(self._principals.aged(principal, since_s), first), *((now_s, head) for _, head in rest)]
            aged += heads
        aged.sort(key=lambda pair: pair[0])
        return [replace(one, arrived_s=since_s) for since_s, one in aged[:MOST_HEADS]]

    def _heads_of_users(self, views: list[RoutingTarget], now_s: float) -> list[WaitingRequest]:
        speed = AGING_SHARE * float(np.mean([view.tokens_per_s for view in views]))
        heads: dict[tuple[str, str], tuple[float, WaitingRequest]] = {}
        for one in self._waiting.values():
            offered = one.offered
            name = offered.principal, offered.user
            key = offered.prompt_tokens - speed * (now_s - offered.arrived_s)
            if name not in heads or key < heads[name][0]:
                heads[name] = key, offered
        return [offered for _, offered in heads.values()]

    def check_integrity(self) -> None:
        """Raises AssertionError where the queue contradicts itself."""
        assert all(name == _name(one.node, one.number) for name, one in self._waiting.items())
        assert {one.node for one in self._waiting.values()} <= self._serving.nodes, "offers of boxes that are gone"
        here = self._serving.places | self._serving.writing
        assert self._memories.keys() <= here, "engines are remembered that are gone"
        assert len(self._waiting) <= MAX_OFFERS * len(self._serving.nodes), "more offers than there is room for"


def _unforeseen(offered: WaitingRequest) -> WaitingRequest:
    """Returns the request without a forecast of its experts."""
    return replace(offered, signature=None, chance=None)


def _name(node: str, number: int) -> str:
    return f"{node}:{number}"
