"""Gimbal's literal placement: an expert's number has one node in all layers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.policy.placement.problem import PlacementProblem, Values
from tools.research.placement.compared_placements import columns


@st.composite
def clusters(draw: st.DrawFn) -> tuple[PlacementProblem, Values]:
    """Draws small clusters with room for replicas, or too little for all, and any successions."""
    nodes, layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 7))
    most = 2 * layers * experts // nodes + 2
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = tuple((int(each),) for each in rng.integers(0, most + 1, nodes))
    activations = rng.integers(0, draw(st.sampled_from([2, 1000])), (nodes, layers, experts)).astype(np.float64)
    on_disk = rng.random(activations.shape) < 0.6
    on_disk[0] |= ~on_disk.any(axis=0)
    passed = rng.integers(0, draw(st.sampled_from([1, 2, 500])), (layers - 1, experts, experts)).astype(np.float64)
    return PlacementProblem(slots, activations, 10, on_disk, from_disk=True), passed


def test_columns_go_through_all_layers_together_and_the_strongest_pair_to_the_largest_node() -> None:
    activations, passed = np.tile(np.array([1.0, 5, 4, 3, 2, 9]), (2, 2, 1)), np.zeros((1, 6, 6))
    passed[0, 0, 4] = 8.0
    placement = columns(PlacementProblem(((4,), (8,)), activations), passed)
    assert (placement.homes[:, 0] == placement.homes[:, 1]).all()
    assert (placement.homes.sum(axis=0) == 1).all()
    assert placement.homes[1, 0, [0, 4]].all(), "the least asked for, but they follow each other"


@settings(max_examples=40, deadline=None)
@given(cluster=clusters())
def test_columns_that_no_node_has_room_for_are_covered_all_the_same(cluster: tuple[PlacementProblem, Values]) -> None:
    problem, passed = cluster
    placement = columns(problem, passed)
    assert (placement.homes | placement.disk).any(axis=0).all()
    assert (placement.homes.sum(axis=(1, 2)) <= problem.room).all()
