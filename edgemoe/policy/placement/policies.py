"""Placement policies by name, over experts of several sizes. Imports Numba: for processes that solve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgemoe.policy.placement.cover import protect
from edgemoe.policy.placement.eplb import eplb
from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.pairs import Routes
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.prism_published import published
from edgemoe.policy.placement.problem import Placement, PlacementProblem, by_size
from edgemoe.policy.placement.rendezvous import RendezvousCosts, rendezvous
from edgemoe.policy.placement.smartmoe import smartmoe
from edgemoe.policy.placement.uniform import redundance, uniform
from edgemoe.types.arrays import IntArray
from edgemoe.types.placement import PlacementPolicy


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """States what a placement is to be by, besides the problem."""

    routes: Sequence[Routes]  # of each node, [T, L, k]
    costs: RendezvousCosts
    replicas: int  # nodes that are to hold each expert, in memory or on disk, as far as there is room


Policy = Callable[[PlacementProblem, Wishes], Placement]
POLICIES: dict[PlacementPolicy, Policy] = {
    "uniform": lambda problem, wishes: uniform(problem, wishes.replicas),
    "redundance": lambda problem, _: redundance(problem, np.random.default_rng(0)),
    "smartmoe": lambda problem, _: smartmoe(problem),
    "eplb": lambda problem, _: eplb(problem),
    "published": lambda problem, _: published(problem),
    "prism": lambda problem, _: prism(problem),
    "exact": lambda problem, _: exact(problem),
    "rendezvous": lambda problem, wishes: rendezvous(problem, wishes.routes, wishes.costs),
}


def place(
    policy: PlacementPolicy,
    problem: PlacementProblem,
    wishes: Wishes,
    layer_bytes: Sequence[int],
    rooms: Sequence[Sequence[int]],
) -> Placement:
    """Returns the policy's placement; see `by_size`. Raises PlacementInfeasible."""

    def solve(part: PlacementProblem, layers: IntArray) -> Placement:
        found = POLICIES[policy](part, replace(wishes, routes=[each[:, layers] for each in wishes.routes]))
        kept = found.homes.copy()
        protect(part, kept, wishes.replicas)
        return replace(found, homes=kept)

    return by_size(problem, layer_bytes, rooms, solve)
