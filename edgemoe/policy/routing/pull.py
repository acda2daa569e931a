"""Leaves requests in one queue until an engine has room, which then takes the request that costs it least, aged.

    key = seconds until its prompt would be computed there + other costs - k * seconds waited              (1)

Ours, in place of [Gimbal, Algorithm 1]. docs/design/routing.md has the costs and the starvation bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.policy.routing.gimbal import UserPlaces
from edgemoe.policy.routing.offers import (
    OfferAssignment,
    RoutingTarget,
    Values,
    WaitingRequest,
    cached_tokens,
    with_offer,
)
from edgemoe.types.arrays import BoolArray
from edgemoe.types.step import BLOCK_TOKENS

CostTerm = Callable[[Sequence[WaitingRequest], Sequence[RoutingTarget]], Values]
"""Returns seconds [W, R], for full engines too. Only the excess over the cheapest engine counts for an offer."""


@dataclass(frozen=True, slots=True)
class PullLimits:
    """States when an engine has room, the cost of a request there, and how fast requests age."""

    ahead_tokens: int = 1024  # an engine with as many tokens to prefill takes no request,
    ahead_s: float = 0.25  # unless it prefills more than that in `ahead_s`
    ahead_requests: int = 0  # taken beyond an engine's slots, as work until its next report arrives
    aging: float = 0.2  # seconds of prefill that a second of waiting makes up for: k
    output_reserve: float = 0.25  # of the expected remaining output, kept free in KV
    crowding: float = 0.04  # share of an answer's time that a request costs more in a full engine than in an empty one
    step_s: float = 0.03  # a decode step of an engine that reports none
    affinity_s: float = 600.0  # for which the engine of a user's last request is preferred
    affinity: float = 0.5  # pieces of the prompt expected in its cache beside the known keys
    away_s: float = 0.005  # extra cost on another box than the front's


class PullRouting:
    """Gives each engine with room the requests that cost it least. Remembers the engine of each user's last request."""

    def __init__(self, limits: PullLimits, *terms: CostTerm) -> None:
        """Adds `terms` to the cost of a request at an engine, beside its prefill."""
        self._limits, self._terms = limits, terms
        self._users = UserPlaces(limits.affinity_s)

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        """Returns whether an engine has room."""
        return any(map(self._has_room, views))

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        """Assigns offers to the engines with room. The others must be offered again."""
        there, answer = list(views), list[OfferAssignment]()
        open_ = np.array([self._has_room(view) for view in there], np.bool_)
        if not offers or not open_.any():
            return answer
        table = _Table(self._limits, self._terms, offers, self._users, now_s)
        table.fill(there)
        left = np.ones(len(offers), np.bool_)
        while left.any() and open_.any():
            asked = open_[:, None] & left
            keys = np.where(asked, table.keys(), np.inf)
            fits = asked & table.fits
            first = int(np.argmin(keys.min(axis=0)))
            if keys[:, first].min() <= 0.0 and not fits[:, first].any():
                w, r = max(np.flatnonzero(open_).tolist(), key=lambda w: there[w].free_blocks), first
                open_[w] = False
            elif fits.any():
                w, r = _least(np.where(fits, keys, np.inf), there)
                answer.append(OfferAssignment(offers[r].request, there[w].place))
                self._users.note(offers[r].user, there[w].place, now_s)
                there[w] = with_offer(there[w], offers[r])
                open_[w] = self._has_room(there[w])
                if open_.any():
                    table.update_row(w, there[w])
            else:
                break
            left[r] = False
        return answer

    def _has_room(self, view: RoutingTarget) -> bool:
        most = min(view.slots + self._limits.ahead_requests, view.capacity)
        ahead = max(self._limits.ahead_tokens, self._limits.ahead_s * view.tokens_per_s)
        return view.requests < most and view.prefill_tokens < ahead


class _Table:
    """The cost (1) of each offer at each engine, and whether it fits; `update_row` keeps one engine's row current."""

    def __init__(
        self,
        limits: PullLimits,
        terms: Sequence[CostTerm],
        offers: Sequence[WaitingRequest],
        users: UserPlaces,
        now_s: float,
    ) -> None:
        self._limits, self._terms, self._offers = limits, terms, offers
        self._places = [users.place(offered.user, now_s) for offered in offers]
        self._aged = limits.aging * (now_s - np.array([offered.arrived_s for offered in offers]))
        self._tokens = np.array([offered.prompt_tokens for offered in offers], np.float64)
        self._expected = np.array([offered.expected_tokens for offered in offers], np.float64)
        self._pieces = limits.affinity * np.array([offered.key_tokens for offered in offers])
        self._costs: list[Values] = []  # of prefill, of crowding, of each term; [W, R]
        self.fits: BoolArray = np.zeros((0, len(offers)), np.bool_)  # the KV of which engine; of an idle one all do

    def fill(self, views: Sequence[RoutingTarget]) -> None:
        """Computes the rows of all engines."""
        self._costs, self.fits = self._rows(views)

    def update_row(self, w: int, view: RoutingTarget) -> None:
        """Computes one engine's row again."""
        costs, fits = self._rows([view])
        self.fits[w] = fits[0]
        for kept, new in zip(self._costs, costs, strict=True):
            kept[w] = new[0]

    def keys(self) -> Values:
        """Returns the costs (1) of offers at engines, [W, R], less their aging."""
        own, *terms = self._costs
        beyond = sum(costs - costs.min(axis=0) for costs in terms)
        return np.asarray(own + beyond - self._aged)

    def _rows(self, views: Sequence[RoutingTarget]) -> tuple[list[Values], BoolArray]:
        cached = _cached(self._offers, views)
        own = self._prefill_s(views, cached) + self._away_s(views)
        terms = (term(self._offers, views) for term in self._terms)
        return [own, self._crowding_s(views), *terms], self._fits(views, cached)

    def _prefill_s(self, views: Sequence[RoutingTarget], cached: Values) -> Values:
        known = np.array([[view.place == place for place in self._places] for view in views])
        more = np.minimum(self._pieces, self._tokens - 1 - cached) * known
        backlog = np.array([view.prefill_tokens for view in views])[:, None]
        speed = np.array([view.tokens_per_s for view in views])[:, None]
        return np.asarray((backlog + self._tokens - cached - more) / speed)

    def _crowding_s(self, views: Sequence[RoutingTarget]) -> Values:
        crowded = [view.requests / max(1, view.slots) * (view.decode_s or self._limits.step_s) for view in views]
        return np.asarray(self._limits.crowding * self._expected * np.array(crowded)[:, None])

    def _away_s(self, views: Sequence[RoutingTarget]) -> Values:
        away = [[offered.home not in ("", view.place) for offered in self._offers] for view in views]
        return np.asarray(self._limits.away_s * np.array(away))

    def _fits(self, views: Sequence[RoutingTarget], cached: Values) -> BoolArray:
        blocks = np.array([offered.blocks for offered in self._offers]) - cached // BLOCK_TOKENS
        remaining = np.array([view.remaining_tokens for view in views])[:, None]
        reserve = self._limits.output_reserve * (remaining + self._expected) / BLOCK_TOKENS
        free = np.array([view.free_blocks if view.requests else np.inf for view in views])[:, None]
        return np.asarray(blocks + reserve <= free)


def _least(keys: Values, views: Sequence[RoutingTarget]) -> tuple[int, int]:
    """Returns the engine and the offer with the least key, the engine with the fewest requests of equals."""
    ties = list(zip(*(each.tolist() for each in np.nonzero(keys == keys.min())), strict=True))
    return min(ties, key=lambda pair: (pair[1], views[pair[0]].requests / max(1, views[pair[0]].slots)))


def _cached(offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget]) -> Values:
    """Returns how much of each prompt each engine has in its prefix cache, [W, R]."""
    cached = np.zeros((len(views), len(offers)))
    for r, offered in enumerate(offers):
        for w, view in enumerate(views):
            if offered.prefix and offered.prefix[0] in view.prefixes:
                cached[w, r] = cached_tokens(offered, view)
    return cached
