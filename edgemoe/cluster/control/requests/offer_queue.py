"""The leader's queue of requests that wait at their fronts. Pure: events in, actions out; `desk` performs them.

    Led          this box leads in another epoch now: what was offered is another leader's
    Offers       a front offers a request
    Withdraws    a front takes offers back
    Uses         an engine has said what it has to do
    Serving      these boxes are here, and these engines take requests
    Waited       time has passed
    ->
    Grants       an engine takes the request of an offer
    TurnsDown    an offer is not taken in: its front has too many here

Which engine takes what, a `RoutingPolicy` decides. It sees of each user the next request only, as old as that has been
the next for its user and its principal, so that principals take turns as in an engine's own queue (`policy.sjf`), and
so do the users of each. What was granted since an engine's last word counts as there until it says so. Offers end by
themselves; the requests stay with their fronts, so that nothing is lost with this queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from edgemoe.cluster.control.messages import EngineStatus, RequestOffer
from edgemoe.cluster.control.requests.engine_memory import EngineMemory
from edgemoe.cluster.control.requests.reading import offered_as
from edgemoe.policy import shares
from edgemoe.policy.route import node_of
from edgemoe.policy.routing.dispatches import Dispatches
from edgemoe.policy.routing.locality_band import LocalityBand
from edgemoe.policy.routing.offers import EngineView, Offered, RoutingPolicy
from edgemoe.policy.routing.told import ModelSizes

MAX_OFFERS = 512  # of one front
MAX_TURNS = 4096  # principals, and users, whose last turn is remembered
AGING_SHARE = 0.4  # of the speed of prefill, as in the engines
MOST_HEADS = 64  # users whose next requests are compared, the longest waiting ones
MOST_FORECAST_BYTES = 64 << 20  # of what is foreseen of those that wait; of more requests nothing is


class Led(NamedTuple):
    epoch: int


class Offers(NamedTuple):
    node: str
    offer: RequestOffer


class Withdraws(NamedTuple):
    node: str
    numbers: tuple[int, ...]


class Uses(NamedTuple):
    node: str
    use: EngineStatus


class Serving(NamedTuple):
    nodes: frozenset[str]
    places: frozenset[str]
    sizes: ModelSizes = ModelSizes()  # of the model that they serve
    writing: frozenset[str] = frozenset()  # engines that go on with what others have prefilled


class Waited(NamedTuple):
    pass


class Grants(NamedTuple):
    node: str
    number: int
    place: str
    why: str = ""  # in a word, if anything is to be said of it


class TurnsDown(NamedTuple):
    node: str
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """An offer that stands."""

    node: str
    number: int
    offered: Offered
    until_s: float


class LastTurns:
    """Owns when a request of each was granted last."""

    def __init__(self) -> None:
        self._at_s = OrderedDict[str, float]()

    def note(self, name: str, now_s: float) -> None:
        """Takes note that a request is granted."""
        self._at_s[name] = now_s
        self._at_s.move_to_end(name)
        if len(self._at_s) > MAX_TURNS:
            self._at_s.popitem(last=False)

    def aged(self, name: str, arrived_s: float) -> float:
        """Returns since when a request that arrived at `arrived_s` can have been the next one."""
        return max(arrived_s, self._at_s.get(name, arrived_s))


Event = Led | Offers | Withdraws | Uses | Serving | Waited
Action = Grants | TurnsDown


class OfferQueue:
    """One owner, one event loop."""

    def __init__(self, policy: Callable[[], RoutingPolicy], band: LocalityBand, clock: Callable[[], float]) -> None:
        """`policy` makes one that remembers nothing yet; `band` says who goes on with what is prefilled."""
        self.granted = 0
        self._make, self._band, self._clock = policy, band, clock
        self._serving = Serving(frozenset(), frozenset())
        self._forget()

    def __len__(self) -> int:
        return len(self._waiting)

    def handle(self, event: Event) -> list[Action]:
        """Takes note of what has happened. Returns what is to be done."""
        now_s = self._clock()
        match event:
            case Led():
                self._forget()
            case Offers(node, offer):
                if not self._take_in(node, offer, now_s):
                    return [TurnsDown(node, offer.number)]
            case Withdraws(node, numbers):
                for number in numbers:
                    self._waiting.pop(_name(node, number), None)
                    self._dispatches.withdraw(_name(node, number))
            case Uses(node, use):
                self._hear(node, use, now_s)
            case Serving():
                self._look_at(event)
            case Waited():
                self._drop_ended(now_s)
        return self._assign(now_s)

    def decoder(self, node: str, offer: RequestOffer) -> str:
        """Returns the engine that is to go on with a request that is prefilled; "" where none has room."""
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

    def writing(self) -> list[EngineView]:
        """Returns how engines are that write answers."""
        return [view for view in self._dispatches.views() if view.place in self._serving.writing]

    @property
    def writers(self) -> frozenset[str]:
        """Returns the engines that write answers, those that have said nothing yet included."""
        return self._serving.writing

    @property
    def sizes(self) -> ModelSizes:
        """Returns those of the model that is served."""
        return self._serving.sizes

    @property
    def foreseen_bytes(self) -> int:
        """Counts what tables of experts of those that wait take."""
        tables = (table for one in self._waiting.values() for table in (one.offered.signature, one.offered.chance))
        return sum(table.nbytes for table in tables if table is not None)

    def _forget(self) -> None:
        self._policy = self._make()
        self._waiting: dict[str, Waiting] = {}  # by name, in order of arrival here
        self._dispatches = Dispatches()
        self._memories: dict[str, EngineMemory] = {}  # by place
        self._principals, self._users = LastTurns(), LastTurns()

    # --- what is known ----------------------------------------------------------------------------------------

    def _take_in(self, node: str, offer: RequestOffer, now_s: float) -> bool:
        if node not in self._serving.nodes:
            return False
        name = _name(node, offer.number)
        offered = self._offered(name, offer, now_s)
        waiting = [one.offered.principal for one in self._waiting.values() if one.node == node]
        if not shares.fits(1, waiting.count(offered.principal), MAX_OFFERS - len(waiting)):
            return False
        self._waiting[name] = Waiting(node, offer.number, offered, now_s + offer.remaining_ms / 1e3)
        return True

    def _offered(self, name: str, offer: RequestOffer, now_s: float) -> Offered:
        offered = offered_as(name, offer, self._serving.sizes, now_s, self._home(name))
        return offered if self.foreseen_bytes < MOST_FORECAST_BYTES else _unforeseen(offered)

    def _home(self, name: str) -> str:
        return next((place for place in self._memories if node_of(place) == node_of(name)), "")

    def _hear(self, node: str, use: EngineStatus, now_s: float) -> None:
        place = f"{node}:{use.engine}"
        for other in [known for known in self._memories if known.startswith(f"{node}:") and known != place]:
            self._drop(other)
        if not use.engine or place not in self._serving.places | self._serving.writing:
            return
        memory = self._memories.setdefault(place, EngineMemory())
        self._dispatches.hear(memory.hear(place, use, self._serving.sizes, now_s))

    def _look_at(self, serving: Serving) -> None:
        for place in self._memories.keys() - serving.places - serving.writing:
            self._drop(place)
        self._waiting = {name: one for name, one in self._waiting.items() if one.node in serving.nodes}
        if serving.sizes != self._serving.sizes:  # what was said of experts is of another model's
            self._dispatches = Dispatches()
            self._waiting = {n: replace(one, offered=_unforeseen(one.offered)) for n, one in self._waiting.items()}
        self._serving = serving

    def _drop(self, place: str) -> None:
        del self._memories[place]
        self._dispatches.forget(place)

    # --- who goes where ---------------------------------------------------------------------------------------

    def _assign(self, now_s: float) -> list[Action]:
        """Grants what engines with room take. While none has any, what waits costs an event nothing."""
        actions: list[Action] = []
        while self._waiting and self._policy.takes(views := self._reading()):
            self._drop_ended(now_s)
            assigned = self._policy.assign(self._heads(views, now_s), views, now_s)
            for name, place in assigned:
                why = self._band.why(self._waiting[name].offered, views, place)
                actions.append(self._grant(self._waiting.pop(name), place, why, now_s))
            if not assigned:
                break
        return actions

    def _drop_ended(self, now_s: float) -> None:
        self._waiting = {name: one for name, one in self._waiting.items() if one.until_s > now_s}

    def _reading(self) -> list[EngineView]:
        return [view for view in self._dispatches.views() if view.place in self._serving.places]

    def _grant(self, one: Waiting, place: str, why: str, now_s: float) -> Grants:
        self.granted += 1
        offered = one.offered
        self._dispatches.dispatch(offered, place, now_s)
        self._memories[place].note(offered.prefix)
        self._principals.note(offered.principal, now_s)
        self._users.note(offered.user, now_s)
        return Grants(one.node, one.number, place, why)

    def _heads(self, views: list[EngineView], now_s: float) -> list[Offered]:
        """Returns the next request of each user, the oldest first and not all; none is older than its user's last turn.

        Where several principals wait, each one's first is none the older than the principal's last turn, and those of
        its other users are as if they had just come.
        """
        principals: dict[str, list[tuple[float, Offered]]] = {}
        for head in self._heads_of_users(views, now_s):
            since_s = self._users.aged(head.user, head.arrived_s)
            principals.setdefault(head.principal, []).append((since_s, head))
        aged: list[tuple[float, Offered]] = []
        for principal, heads in principals.items():
            heads.sort(key=lambda pair: pair[0])
            if len(principals) > 1:
                (since_s, first), *rest = heads
                heads = [(self._principals.aged(principal, since_s), first), *((now_s, head) for _, head in rest)]
            aged += heads
        aged.sort(key=lambda pair: pair[0])
        return [replace(one, arrived_s=since_s) for since_s, one in aged[:MOST_HEADS]]

    def _heads_of_users(self, views: list[EngineView], now_s: float) -> list[Offered]:
        speed = AGING_SHARE * float(np.mean([view.tokens_per_s for view in views]))
        heads: dict[tuple[str, str], tuple[float, Offered]] = {}
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


def _unforeseen(offered: Offered) -> Offered:
    """Returns the request without what is foreseen of its experts."""
    return replace(offered, signature=None, chance=None)


def _name(node: str, number: int) -> str:
    return f"{node}:{number}"
