"""Placement policies by name, over experts of several sizes. Imports Numba: for processes that solve.

Policies count memory in slots of one expert. Where layers' experts differ in size, memory is divided among the sizes as
engines divide it, in proportion to the bytes that all experts of a size take, and each size is placed by itself.
"""

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
from edgemoe.policy.placement.problem import Placement, PlacementProblem, placed
from edgemoe.policy.placement.rendezvous import RendezvousCosts, rendezvous
from edgemoe.policy.placement.smartmoe import smartmoe
from edgemoe.policy.placement.uniform import redundance, uniform
from edgemoe.types.arrays import BoolArray, IntArray
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


def place(policy: PlacementPolicy, problem: PlacementProblem, wishes: Wishes, layer_bytes: IntArray) -> Placement:
    """Returns the policy's placement of experts of these sizes [L]. Raises PlacementInfeasible."""
    homes, disk = np.zeros(problem.activations.shape, np.bool_), np.zeros(problem.activations.shape, np.bool_)
    for size in np.unique(layer_bytes):
        layers = np.flatnonzero(layer_bytes == size)
        part = _part(problem, layers, int(size))
        found = POLICIES[policy](part, replace(wishes, routes=[each[:, layers] for each in wishes.routes]))
        kept = found.homes.copy()
        protect(part, kept, wishes.replicas)
        homes[:, layers], disk[:, layers] = kept, found.disk
    return placed(problem, homes, disk)


def _part(problem: PlacementProblem, layers: IntArray, size_bytes: int) -> PlacementProblem:
    """The problem for the layers of one size of experts."""
    count, total = int(problem.experts[layers].sum()), int(problem.experts.sum())

    def of(which: BoolArray | None) -> BoolArray | None:
        return None if which is None else which[:, layers]

    return replace(
        problem,
        slots=tuple(tuple(-(-slots * count // total) for slots in devices) for devices in problem.slots),
        activations=problem.activations[:, layers],
        expert_bytes=size_bytes,
        on_disk=of(problem.on_disk),
        in_ram=of(problem.in_ram),
        exists=None if problem.exists is None else problem.exists[layers],
    )
