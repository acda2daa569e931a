"""Experts on nodes by their successions: the invariants of an exchange, and its gain."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from edgemoe.policy.placement.gimbal_placement import cut_between, exchanged, gimbal, refined_cost
from edgemoe.policy.placement.policies import POLICIES, PlacementOptions, place
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values
from edgemoe.policy.placement.rendezvous import RendezvousCosts


@st.composite
def clusters(draw: st.DrawFn) -> tuple[PlacementProblem, Values]:
    """Draws small clusters with room for replicas, or too little for all experts, and any successions."""
    nodes, layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 7))
    most = 2 * layers * experts // nodes + 2
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = tuple((int(each),) for each in rng.integers(0, most + 1, nodes))
    activations = rng.integers(0, draw(st.sampled_from([2, 1000])), (nodes, layers, experts)).astype(np.float64)
    on_disk = rng.random(activations.shape) < 0.6
    on_disk[0] |= ~on_disk.any(axis=0)
    passed = rng.integers(0, draw(st.sampled_from([1, 2, 500])), (layers - 1, experts, experts)).astype(np.float64)
    return PlacementProblem(slots, activations, 10, on_disk, from_disk=True), passed


@settings(max_examples=examples(40), deadline=None)
@given(cluster=clusters())
def test_a_refined_plan_costs_no_more_and_leaves_nodes_and_experts_their_numbers(
    cluster: tuple[PlacementProblem, Values],
) -> None:
    problem, passed = cluster
    before, after = prism(problem), gimbal(problem, passed)
    assert refined_cost(problem, after, passed) <= refined_cost(problem, before, passed) * (1 + 1e-9)
    np.testing.assert_array_equal(after.homes.sum(axis=2), before.homes.sum(axis=2))  # of each node and layer
    np.testing.assert_array_equal(after.homes.sum(axis=0), before.homes.sum(axis=0))  # homes of each expert
    np.testing.assert_array_equal(after.disk, before.disk)


@settings(max_examples=examples(20), deadline=None)
@given(cluster=clusters(), price=st.floats(0.0, 3.0))
def test_no_exchange_is_left_that_pays(cluster: tuple[PlacementProblem, Values], price: float) -> None:
    """The same as a plain count of every exchange's cost."""
    problem, passed = cluster
    start = prism(problem)
    after = exchanged(start, problem.activations, price * passed)

    def cost(homes: np.ndarray) -> float:
        plan = replace(start, homes=homes)
        return float(problem.activations[~homes].sum()) + price * cut_between(plan, passed)

    least = cost(after) - 1e-6 * (1 + problem.activations.sum())
    for layer in range(after.shape[1]):
        for a, b in combinations(range(len(after)), 2):
            for e in np.flatnonzero(after[a, layer] & ~after[b, layer]):
                for f in np.flatnonzero(after[b, layer] & ~after[a, layer]):
                    homes = after.copy()
                    homes[a, layer, [e, f]], homes[b, layer, [e, f]] = [False, True], [True, False]
                    assert cost(homes) >= least
    np.testing.assert_array_equal(exchanged(replace(start, homes=after), problem.activations, price * passed), after)


def test_experts_that_follow_each_other_come_to_lie_together() -> None:
    """Both nodes choose all experts equally often, so that successions alone decide."""
    activations, passed = np.ones((2, 3, 4)), np.zeros((2, 4, 4))
    for at, (e, f) in enumerate([(0, 2), (1, 3), (2, 0), (3, 1)]):
        passed[0, e, f] = passed[1, f, e] = 10 + at
    problem = PlacementProblem(((6,), (6,)), activations)
    assert cut_between(prism(problem), passed) > 0
    placement = gimbal(problem, passed)
    assert cut_between(placement, passed) == 0
    assert (placement.homes.sum(axis=0) == 1).all()


def test_a_cut_counts_successions_that_no_node_has_together() -> None:
    home = np.array([[0, 1, 1], [0, 0, 1]])
    passed = np.arange(9.0).reshape(1, 3, 3)
    homes = np.asarray(home == np.arange(2)[:, None, None])
    plan = Placement(homes, np.where(homes, 0, -1).astype(np.int8), np.zeros_like(homes))
    assert cut_between(plan, passed) == 2 + 3 + 4 + 6 + 7
    homes[1, 1, 0] = True  # a replica beside its predecessors
    assert cut_between(plan, passed) == 2 + 4 + 7


@pytest.mark.parametrize("sizes", [[10, 25, 10, 25], [10, 10, 25, 25]])
def test_successions_between_layers_of_two_sizes_are_passed_over(sizes: list[int]) -> None:
    """Each size is placed by itself; layers count as consecutive only if they are."""
    rng = np.random.default_rng(5)
    activations = rng.random((2, 4, 6))
    passed = np.zeros((3, 6, 6))
    between = [layer for layer in range(3) if sizes[layer] != sizes[layer + 1]]
    passed[between] = 100 * rng.random((len(between), 6, 6))
    problem = PlacementProblem(((30,), (30,)), activations)
    rooms = [[8, 8], [8, 8]]
    wishes = PlacementOptions([np.zeros((1, 4, 2), np.int16)] * 2, RendezvousCosts(), 1)
    with_them = place(POLICIES["gimbal"], problem, replace(wishes, passed=passed), sizes, rooms)
    np.testing.assert_array_equal(with_them.homes, place(POLICIES["gimbal"], problem, wishes, sizes, rooms).homes)
