"""The exact placement is the linear programme's optimum."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.policy.placement.route_score import remote_calls


def least_calls(problem: PlacementProblem) -> float:
    """Computes the least remote calls by linear programming.

    Homes [N * M] are in 0 to 1; every expert has at least one, and no node exceeds its room.
    """
    nodes = len(problem.slots)
    experts = problem.activations[0].size
    covered = -hstack([eye_array(experts)] * nodes)
    kept = kron(eye_array(nodes), csr_array(np.ones((1, experts))))
    bounds = np.concatenate([-np.ones(experts), problem.room])
    found = linprog(-problem.activations.ravel(), vstack([covered, kept]), bounds, bounds=(0, 1))
    assert found.status == 0
    return float(problem.activations.sum() + found.fun)


@pytest.mark.parametrize("seed", range(12))
def test_exact_makes_as_few_remote_calls_as_the_linear_programme(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, layers, experts = int(rng.integers(2, 9)), int(rng.integers(1, 6)), int(rng.integers(4, 30))
    liking = (
        rng.exponential(size=(1 if seed % 2 else nodes, layers, experts)) ** 3
    )  # odd numbers: all nodes choose the same experts
    activations = np.round(100 * liking * rng.uniform(0.8, 1.2, (nodes, layers, experts)))
    share = rng.dirichlet(np.ones(nodes)) * rng.uniform(1.0, 1.8)
    slots = tuple((int(np.ceil(each * layers * experts)),) for each in share)
    problem = PlacementProblem(slots, activations)
    if problem.room.sum() >= layers * experts:
        assert remote_calls(exact(problem), activations) == pytest.approx(least_calls(problem), rel=1e-7)
