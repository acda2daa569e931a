"""Offers of requests, views of engines, and assignments: the input and output of routing policies.

A policy is called when an offer comes and when an engine reports. Offers that it leaves unassigned are offered again.
A keyed hash of a prompt's block stands for all tokens up to its end, so an engine's keys show a prompt's cached part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.signatures import absence
from edgemoe.types.arrays import FloatArray
from edgemoe.types.step import BLOCK_TOKENS

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """The attributes of a waiting request that a policy may use. Times are the policy's clock."""

    request: str
    prompt_tokens: int
    arrived_s: float
    max_tokens: int = 1
    expected_tokens: float = 0.0  # of output, at most `max_tokens`
    user: str = ""  # of a principal; keyed; "": nobody's
    principal: str = ""  # likewise
    home: str = ""  # the engine beside its front
    prefix: tuple[int, ...] = ()  # keyed hashes of its blocks, in order
    key_tokens: int = BLOCK_TOKENS  # that each of these covers
    signature: FloatArray | None = None  # [L, E] how often its prompt chose each expert
    chance: FloatArray | None = None  # [L, E] how likely each of its tokens chooses each expert

    @property
    def blocks(self) -> int:
        """Counts the KV blocks that its prompt and its first token take."""
        return -(-(self.prompt_tokens + 1) // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTarget:
    """The known state of an engine that takes requests."""

    place: str
    slots: int  # requests that run at once
    capacity: int  # that may be there, waiting ones included
    blocks: int  # KV blocks in all
    free_blocks: int  # neither in use nor needed by the prompts that wait there
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0  # of running and waiting prompts, not computed yet
    remaining_tokens: float = 0.0  # of output, that the requests there are expected to write yet
    tokens_per_s: float = 1.0  # of prefill
    prefixes: frozenset[int] = frozenset()  # keys of the prompts that its prefix cache has
    taken: frozenset[str] = frozenset()  # requests that reached it lately
    reported_s: float = 0.0  # when it was so
    resident: FloatArray | None = None  # [L, E] its cost of reaching each expert, beside one in place
    union: FloatArray | None = None  # [L, E] log of the chance that no request there chooses the expert
    step_s: float = 0.0  # that a decode step takes beside experts; 0: it does not say
    expert_s: float = 0.0  # that each distinct expert in place adds; likewise
    decode_s: float = 0.0  # that a decode step takes now; likewise

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def kv_usage(self) -> float:
        return (self.blocks - self.free_blocks) / max(1, self.blocks)


class OfferAssignment(NamedTuple):
    """An offer's engine."""

    request: str
    place: str


class RoutingPolicy(Protocol):
    """Assigns offers to engines. Owns its memory between calls, and nothing else."""

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        """Returns whether an engine has room for any offer. If none has, nothing is assigned."""

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        """Returns an engine for each offer that goes now: each at most once, none to a full engine.

        `offers` are in order of arrival; `views` are up to date, or corrected by `RecentDispatches`.
        """


def cached_tokens(offered: WaitingRequest, view: RoutingTarget) -> int:
    """Counts the tokens of the prompt that the engine's prefix cache has; never all, for the last one gives logits."""
    known = next((n for n, key in enumerate(offered.prefix) if key not in view.prefixes), len(offered.prefix))
    return min(known * offered.key_tokens, offered.prompt_tokens - 1)


def with_offer(view: RoutingTarget, offered: WaitingRequest) -> RoutingTarget:
    """Returns the engine as it is once the offer waits there."""
    cached = cached_tokens(offered, view)
    return replace(
        view,
        waiting=view.waiting + 1,
        prefill_tokens=view.prefill_tokens + offered.prompt_tokens - cached,
        free_blocks=view.free_blocks - offered.blocks + cached // BLOCK_TOKENS,
        remaining_tokens=view.remaining_tokens + offered.expected_tokens,
        prefixes=view.prefixes.union(offered.prefix) if offered.prefix else view.prefixes,
        union=view.union if view.union is None or offered.chance is None else view.union + absence(offered.chance),
    )


class TargetChooser(Protocol):
    """Chooses one of the engines that are not full."""

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget: ...


class PushRouting:
    """Places offers one by one, in order of arrival, each where `choose` says."""

    def __init__(self, choose: TargetChooser) -> None:
        self._choose = choose

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        """Returns whether an engine is not full."""
        return any(view.requests < view.capacity for view in views)

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        """Returns an engine for each offer, while any has room."""
        there = {view.place: view for view in views}
        answer = []
        for offered in offers:
            open_ = [view for view in there.values() if view.requests < view.capacity]
            if not open_:
                break
            chosen = self._choose(offered, open_, now_s)
            there[chosen.place] = with_offer(chosen, offered)
            answer.append(OfferAssignment(offered.request, chosen.place))
        return answer


class RoundRobin:
    """Chooses engines in turn, by name: round robin."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        chosen = min(open_, key=lambda view: (view.place <= self._last, view.place))
        self._last = chosen.place
        return chosen


def fewest(offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
    """Returns the engine with the fewest requests for each that it runs at once: join the shortest queue."""
    return min(open_, key=lambda view: (view.requests / max(1, view.slots), view.place))


FORGET_S = 5.0


class RecentDispatches:
    """Owns reports, and the dispatches that they do not count yet."""

    def __init__(self) -> None:
        self._reports: dict[str, RoutingTarget] = {}
        self._since: dict[str, dict[str, tuple[float, WaitingRequest]]] = {}  # place -> request -> time sent, offer
        self._views: dict[str, RoutingTarget] = {}  # of engines of which nothing has changed since they were asked for

    def on_engine_view(self, view: RoutingTarget) -> None:
        """Keeps an engine's latest report, which arrived at `reported_s`."""
        self._reports[view.place] = view
        self._views.pop(view.place, None)
        since = self._since.setdefault(view.place, {})
        for request, (sent_s, _) in list(since.items()):
            if request in view.taken or view.reported_s - sent_s > FORGET_S:
                del since[request]

    def dispatch(self, offered: WaitingRequest, place: str, now_s: float) -> None:
        """Counts a request that is on its way to an engine."""
        self._since.setdefault(place, {})[offered.request] = (now_s, offered)
        self._views.pop(place, None)

    def withdraw(self, request: str) -> None:
        """Stops counting a request that was turned away, or has ended."""
        for place, since in self._since.items():
            if since.pop(request, None) is not None:
                self._views.pop(place, None)

    def forget(self, place: str) -> None:
        """Forgets an engine that is gone."""
        self._reports.pop(place, None)
        self._since.pop(place, None)
        self._views.pop(place, None)

    def views(self) -> list[RoutingTarget]:
        """Returns the estimated present load of every engine, in order of their names."""
        return [self._view(place) for place in sorted(self._reports)]

    def _view(self, place: str) -> RoutingTarget:
        if place not in self._views:
            sent = (offered for _, offered in self._since[place].values())
            self._views[place] = reduce(with_offer, sent, self._reports[place])
        return self._views[place]
