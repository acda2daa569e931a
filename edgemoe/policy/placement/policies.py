"""Placement policies by name, over experts of several sizes. Imports Numba: for processes that solve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgemoe.policy.placement.cover import protect
from edgemoe.policy.placement.eplb import eplb
from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.pairs import Routes
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.prism_published import published
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, by_size
from edgemoe.policy.placement.rendezvous import RendezvousCosts, rendezvous
from edgemoe.policy.placement.smartmoe import smartmoe
from edgemoe.policy.placement.uniform import redundance, uniform
from edgemoe.policy.replacement.nodes import columns, gimbal
from edgemoe.types.arrays import IntArray
from edgemoe.types.placement import PlacementPolicy


@dataclass(frozen=True, slots=True, eq=False)
class Wishes:
    """States what a placement is to be by, besides the problem."""

    routes: Sequence[Routes]  # of each node, [T, L, k]
    costs: RendezvousCosts
    replicas: int  # nodes that are to hold each expert, in memory or on disk, as far as there is room
    # [L - 1, E, E] how often tokens chose an expert, and then one of the next layer; [0, 0, 0] where that is not known
    passed: Values = field(default_factory=lambda: np.zeros((0, 0, 0)))


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
    "gimbal": lambda problem, wishes: gimbal(problem, wishes.passed),
    "columns": lambda problem, wishes: columns(problem, wishes.passed),
}


def place(
    policy: PlacementPolicy,
    problem: PlacementProblem,
    wishes: Wishes,
    layer_bytes: Sequence[int],
    rooms: Sequence[Sequence[int]],
) -> Placement:
    """Returns the policy's placement; see `by_size`. Raises PlacementInfeasible."""
    _, count, experts = problem.activations.shape
    passed = wishes.passed if len(wishes.passed) else np.zeros((max(0, count - 1), experts, experts))

    def solve(part: PlacementProblem, layers: IntArray) -> Placement:
        beside = (np.diff(layers) == 1)[:, None, None]
        ours = replace(
            wishes,
            routes=[each[:, layers] for each in wishes.routes],
            costs=wishes.costs.of_layers(layers),
            passed=np.where(beside, passed[layers[:-1]], 0.0),
        )
        found = POLICIES[policy](part, ours)
        kept = found.homes & part.experts
        protect(part, kept, wishes.replicas)
        return replace(found, homes=kept)

    return by_size(problem, layer_bytes, rooms, solve)
