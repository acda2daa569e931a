"""Leaves requests in one queue until an engine has room, which then takes the one that costs it least, aged.

Ours, in place of [Gimbal, Algorithm 1]. An engine has room while a slot is free there and what it has still to prefill
is less than a step or two; a request fits if its prompt does beside a share of the output that is expected of all
there. Of all pairs that fit, the one goes first that has the least

    key = seconds until its prompt would be computed there + crowding + other costs - k * seconds waited   (1)

the same rule as engines order their own queues by (`policy.sjf`, formula 1). Tokens that the prefix cache has are not
counted, so a request goes where its prefix is unless that is busy or it has waited for long.

Starvation bound. A request that costs c seconds is overtaken only by requests that come within c / k seconds after it.
If it fits nowhere by then, the engine with the most free blocks takes nothing else until it fits, at the latest when
what it has there is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.policy.routing.offers import Assignment, EngineView, Offered, Values, cached_tokens, with_offer
from edgemoe.types.arrays import BoolArray
from edgemoe.types.step import BLOCK_TOKENS

CostTerm = Callable[[Sequence[Offered], Sequence[EngineView]], Values]  # seconds, [W, R], at full engines, too


@dataclass(frozen=True, slots=True)
class PullLimits:
    """States when an engine has room, and how fast requests age."""

    ahead_tokens: int = 1024  # to be prefilled there, at which an engine takes nothing
    ahead_requests: int = 0  # that an engine takes beyond its slots, to have work while its next report is on the way
    aging: float = 0.2  # seconds of prefill that a second of waiting makes up for: k
    output_reserve: float = 0.25  # of the expected remaining output, kept free in KV
    crowding_s: float = 0.5  # that a request costs more where all slots are in use than where none is


class Pull:
    """Has engines with room take what costs them least. Remembers nothing."""

    def __init__(self, limits: PullLimits, *terms: CostTerm) -> None:
        """`terms` are what else a request costs an engine, beside its prefill."""
        self._limits, self._terms = limits, terms

    def assign(self, offers: Sequence[Offered], views: Sequence[EngineView], now_s: float) -> list[Assignment]:
        """Returns what engines with room take; the rest is to be offered again."""
        there, left = list(views), list(offers)
        open_ = np.array([self._has_room(view) for view in there], np.bool_)
        answer: list[Assignment] = []
        if not offers or not open_.any():
            return answer
        cached = _cached(left, there)
        while left and open_.any():
            keys = np.where(open_[:, None], self._keys(left, there, cached, now_s), np.inf)
            fits = open_[:, None] & self._fits(left, there, cached)
            first = int(np.argmin(keys.min(axis=0)))
            if keys[:, first].min() <= 0.0 and not fits[:, first].any():
                w, r = max(np.flatnonzero(open_).tolist(), key=lambda w: there[w].free_blocks), first
                open_[w] = False
            elif fits.any():
                w, r = _least(np.where(fits, keys, np.inf), there)
                answer.append(Assignment(left[r].request, there[w].place))
                there[w] = with_offer(there[w], left[r])
                open_[w] = self._has_room(there[w])
            else:
                break
            left.pop(r)
            cached = np.delete(cached, r, axis=1)
            if left and open_[w]:
                cached[w] = _cached(left, [there[w]])
        return answer

    def keys(self, offers: Sequence[Offered], views: Sequence[EngineView], now_s: float) -> Values:
        """Returns (1) of each offer at each engine, [W, R]; the lowest goes first."""
        return self._keys(offers, views, _cached(offers, views), now_s)

    def _keys(self, offers: Sequence[Offered], views: Sequence[EngineView], cached: Values, now_s: float) -> Values:
        tokens = np.array([offered.prompt_tokens for offered in offers])
        waited_s = now_s - np.array([offered.arrived_s for offered in offers])
        speed = np.array([view.tokens_per_s for view in views])[:, None]
        backlog = np.array([view.prefill_tokens for view in views])[:, None]
        crowded = np.array([view.requests / max(1, view.slots) for view in views])[:, None]
        cost_s = (backlog + tokens - cached) / speed + self._limits.crowding_s * crowded
        cost_s = cost_s + sum(term(offers, views) for term in self._terms)
        return np.asarray(cost_s - self._limits.aging * waited_s)

    def _has_room(self, view: EngineView) -> bool:
        most = min(view.slots + self._limits.ahead_requests, view.capacity)
        return view.requests < most and view.prefill_tokens < self._limits.ahead_tokens

    def _fits(self, offers: Sequence[Offered], views: Sequence[EngineView], cached: Values) -> BoolArray:
        """Returns which offer fits the KV of which engine, [W, R]. An idle engine takes any."""
        blocks = np.array([offered.blocks for offered in offers]) - cached // BLOCK_TOKENS
        expected = np.array([offered.expected_tokens for offered in offers])
        remaining = np.array([view.remaining_tokens for view in views])[:, None]
        reserve = self._limits.output_reserve * (remaining + expected) / BLOCK_TOKENS
        free = np.array([view.free_blocks if view.requests else np.inf for view in views])[:, None]
        return np.asarray(blocks + reserve <= free)


def _least(keys: Values, views: Sequence[EngineView]) -> tuple[int, int]:
    """Returns the engine and the offer with the least key, the engine with the fewest requests of equals."""
    ties = list(zip(*(each.tolist() for each in np.nonzero(keys == keys.min())), strict=True))
    return min(ties, key=lambda pair: (pair[1], views[pair[0]].requests / max(1, views[pair[0]].slots)))


def _cached(offers: Sequence[Offered], views: Sequence[EngineView]) -> Values:
    """Returns how much of each prompt each engine has in its prefix cache, [W, R]."""
    cached = np.zeros((len(views), len(offers)))
    for r, offered in enumerate(offers):
        if offered.prefix:
            cached[:, r] = [cached_tokens(offered, view) for view in views]
    return cached
