"""Placement policies by name: the served ones, other papers', and the sources' literal forms."""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.policies import POLICIES as SERVED_POLICIES
from edgemoe.policy.placement.policies import PlacementFunction
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, cover, disk_homes, placed, required
from tools.research.placement.eplb import eplb
from tools.research.placement.prism_paper import published
from tools.research.placement.relocate import by_columns
from tools.research.placement.smartmoe import smartmoe
from tools.research.placement.traffic import ExpertTraffic

PAIRS = 32  # of expert numbers, the strongest, that `columns` puts on the anchor


def redundance(problem: PlacementProblem, rng: np.random.Generator) -> Placement:
    """Places every expert once at random, and random ones in the remaining room."""
    disk = disk_homes(problem)
    homes = np.zeros((len(disk), disk[0].size), np.bool_)
    places = rng.permutation(np.repeat(np.arange(len(disk)), problem.room))
    must = rng.permutation(np.flatnonzero(required(problem, disk).ravel()))
    homes[places[: len(must)], must] = True
    for node, room in enumerate(problem.room):
        others = rng.permutation(np.flatnonzero(~homes[node] & problem.experts.ravel()))
        homes[node, others[: int(room) - int(homes[node].sum())]] = True
    return placed(problem, homes.reshape(disk.shape), disk)


def columns(problem: PlacementProblem, passed: Values) -> Placement:
    """Returns Gimbal's literal placement: an expert's number has one node in all layers [Gimbal, Eq. 2 to 4].

    `passed` [L - 1, E, E] counts successions. The anchor is the node with the most room. There are no replicas, so some
    memory may stay empty.
    """
    disk = disk_homes(problem)
    traffic = ExpertTraffic(problem.activations.sum(axis=0), passed)
    home = by_columns(traffic, problem.room // disk.shape[1], int(np.argmax(problem.room)), PAIRS)
    must = required(problem, disk)
    homes = (home == np.arange(len(disk))[:, None])[:, None] & must
    cover(problem, homes, must)
    return placed(problem, homes, disk)


SERVED: dict[str, PlacementFunction] = dict(SERVED_POLICIES.items())
POLICIES: dict[str, PlacementFunction] = {
    **SERVED,
    "redundance": lambda problem, _: redundance(problem, np.random.default_rng(0)),
    "smartmoe": lambda problem, _: smartmoe(problem),
    "eplb": lambda problem, _: eplb(problem),
    "published": lambda problem, _: published(problem),
    "exact": lambda problem, _: exact(problem),
    "columns": lambda problem, options: columns(problem, options.passed),
}
