"""The placement policies that `cluster.placement` names. Imports Numba: for processes that solve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgemoe.policy.placement.gimbal_placement import gimbal
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, by_size, protect
from edgemoe.policy.placement.rendezvous import RendezvousCosts, rendezvous
from edgemoe.policy.placement.route_score import Routes
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.arrays import IntArray
from edgemoe.types.placement import PlacementPolicy


@dataclass(frozen=True, slots=True, eq=False)
class PlacementOptions:
    """Options that policies use besides the problem."""

    routes: Sequence[Routes]  # of each node, [T, L, k]
    costs: RendezvousCosts
    replicas: int  # nodes that should hold each expert, in memory or on disk, as far as there is room
    # [L - 1, E, E] how often tokens chose an expert, and then one of the next layer; [0, 0, 0] where unknown
    passed: Values = field(default_factory=lambda: np.zeros((0, 0, 0)))


PlacementFunction = Callable[[PlacementProblem, PlacementOptions], Placement]
POLICIES: dict[PlacementPolicy, PlacementFunction] = {
    "uniform": lambda problem, options: uniform(problem, options.replicas),
    "prism": lambda problem, _: prism(problem),
    "rendezvous": lambda problem, options: rendezvous(problem, options.routes, options.costs),
    "gimbal": lambda problem, options: gimbal(problem, options.passed),
}


def place(
    policy: PlacementFunction,
    problem: PlacementProblem,
    options: PlacementOptions,
    layer_bytes: Sequence[int],
    rooms: Sequence[Sequence[int]],
) -> Placement:
    """Returns the policy's placement of experts of all sizes; see `by_size`. Raises PlacementInfeasible."""
    _, count, experts = problem.activations.shape
    passed = options.passed if len(options.passed) else np.zeros((max(0, count - 1), experts, experts))

    def solve(part: PlacementProblem, layers: IntArray) -> Placement:
        beside = (np.diff(layers) == 1)[:, None, None]
        ours = replace(
            options,
            routes=[each[:, layers] for each in options.routes],
            costs=options.costs.of_layers(layers),
            passed=np.where(beside, passed[layers[:-1]], 0.0),
        )
        found = policy(part, ours)
        kept = found.homes & part.experts
        protect(part, kept, options.replicas)
        return replace(found, homes=kept)

    return by_size(problem, layer_bytes, rooms, solve)
