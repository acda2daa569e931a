"""Times of simulated engines' experts: the ones that a step's tokens choose by real routes; all, if it has prompts.

Requests have lengths of one trace and routes of another; a route shorter than an answer is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.offers import OfferAssignment, RoutingPolicy, RoutingTarget, WaitingRequest
from edgemoe.types.arrays import FloatArray
from tools.research.simulate.decode_pool import DecodeCosts, places_of
from tools.research.simulate.decode_traffic import Source
from tools.research.simulate.serving.engine_steps import FREE_SLOT, Batch, StepCosts
from tools.research.simulate.serving.simulated_engine import Engine

CONTEXT_S = 1e-7  # for each token that a decoding sequence attends to
_compiled: Any = numba.njit(nogil=True, error_model="numpy")


class RoutedRequests(NamedTuple):
    """The routes of requests by their numbers, and the times of experts."""

    first: npt.NDArray[np.int64]  # [N] row of the first decoded token
    length: npt.NDArray[np.int64]  # [N]
    places: npt.NDArray[np.int32]  # [rows, L * k] numbers of (layer, expert)
    seconds: npt.NDArray[np.float64]  # [experts of all layers] that loading each takes
    counted: npt.NDArray[np.float64]  # [2] tokens of steps without prompts, and distinct experts for each of them


@_compiled
def experts_s(batch: Batch, data: RoutedRequests) -> float:
    """Returns the seconds of a step's experts, and counts them."""
    seen = np.zeros(len(data.seconds), np.bool_)
    tokens = distinct = 0
    took_s = 0.0
    for s in range(len(batch.request)):
        if batch.request[s] == FREE_SLOT:
            continue
        if batch.todo[s] != 0:  # a prompt, whose many tokens choose all experts
            return data.seconds.sum()
        tokens += 1
        r = batch.request[s]
        row = data.first[r] + batch.emitted[s] % data.length[r]
        for place in data.places[row]:
            if not seen[place]:
                seen[place] = True
                distinct += 1
                took_s += data.seconds[place]
    data.counted[0] += tokens
    data.counted[1] += tokens * distinct
    return took_s


def routed(sources: Sequence[Source], costs: DecodeCosts, far_s: FloatArray | None = None) -> RoutedRequests:
    """Returns the routes of requests [N], each cut from a source; `far_s` [L, E] is additional time of experts."""
    unique = {id(each): each for each in sources}
    lengths = np.array([len(each.routes) for each in unique.values()])
    first = dict(zip(unique, (np.cumsum(lengths) - lengths).tolist(), strict=True))
    layers = sources[0].routes.shape[1]
    return RoutedRequests(
        np.array([first[id(each)] for each in sources]),
        np.array([len(each.routes) for each in sources]),
        np.concatenate([places_of(each.routes, costs.experts) for each in unique.values()]),
        np.full(layers * costs.experts, costs.expert_s) + (0.0 if far_s is None else far_s.reshape(-1)),
        np.zeros(2),
    )


def step_costs_of(costs: DecodeCosts) -> StepCosts:
    """Returns the costs of a step without its experts."""
    return StepCosts(costs.step_s, costs.token_s, costs.token_s, CONTEXT_S)


class Apart:
    """Keeps requests of one source on different engines: their choices are more similar than two users' ever are."""

    def __init__(self, policy: RoutingPolicy, sources: Sequence[Source]) -> None:
        self._policy, self._sources = policy, sources
        self.engines: dict[str, Engine] = {}

    def takes(self, views: Sequence[RoutingTarget]) -> bool:
        """Whether an engine has room by the policy."""
        return self._policy.takes(views)

    def assign(
        self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
    ) -> list[OfferAssignment]:
        """Returns the policy's assignment if that keeps sources apart, else its choice among the other engines."""
        there = {place: {self._source(name) for name in engine.requests()} for place, engine in self.engines.items()}
        named = {offered.request: offered for offered in offers}
        answer = []
        for request, place in self._policy.assign(offers, views, now_s):
            source = self._source(request)
            if source in there[place]:
                others = [view for view in views if source not in there[view.place]]
                again = self._policy.assign([named[request]], others, now_s) if others else []
                if not again:
                    continue
                place = again[0].place
            there[place].add(source)
            answer.append(OfferAssignment(request, place))
        return answer

    def _source(self, request: str) -> int:
        return id(self._sources[int(request)])
