"""Prism's two algorithms as corrected end and keep everything."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.placement.prism import assign, entropy, layer_counts, prism
from edgemoe.policy.placement.problem import PlacementProblem


def all_of(problem: PlacementProblem) -> np.ndarray:
    return np.ones(problem.activations.shape[1:], bool)


def test_entropy_is_in_bits_and_zero_where_nothing_or_one_expert_is_chosen() -> None:
    activations = np.array([[[1.0, 1, 1, 1], [4, 4, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]])
    assert entropy(activations).tolist() == [[2.0, 1.0, 0.0, 0.0]]


def test_layers_that_are_chosen_from_evenly_get_more_places() -> None:
    activations = np.array([[[5.0, 5, 5, 5, 5, 5, 5, 5], [20, 20, 0, 0, 0, 0, 0, 0]]] * 3)
    counts = layer_counts(PlacementProblem(((4,), (4,), (8,)), activations), np.ones((2, 8), bool))
    assert counts.sum(axis=1).tolist() == [4, 4, 8]
    assert counts.sum(axis=0).tolist() == [8, 8]  # as many as experts, lent by the first
    spread = layer_counts(PlacementProblem(((8,), (8,), (8,)), activations), np.ones((2, 8), bool))
    assert spread.sum(axis=0).tolist() == [16, 8]


@pytest.mark.parametrize("seed", range(20))
def test_counts_use_all_room_and_leave_a_place_for_every_expert(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, layers, experts = 4, 5, 9
    activations = rng.exponential(size=(nodes, layers, experts)) ** rng.uniform(0, 8)
    activations[rng.random((nodes, layers)) < 0.2] = 0
    room = rng.multinomial(int(layers * experts * rng.uniform(1, 2)), rng.dirichlet(np.ones(nodes)))
    problem = PlacementProblem(tuple((int(each),) for each in room), activations)
    if problem.room.sum() < layers * experts:
        return
    counts = layer_counts(problem, all_of(problem))
    assert counts.sum(axis=1).tolist() == problem.room.tolist()
    assert counts.max() <= experts
    assert (counts.sum(axis=0) >= experts).all()


def test_room_that_rounding_leaves_over_is_handed_out() -> None:
    activations = np.array([[[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]] * 2)
    problem = PlacementProblem(((5,), (7,)), activations)  # 5 / 3 and 7 / 3, rounded down: 3 places a layer
    assert layer_counts(problem, all_of(problem)).sum(axis=0).tolist() == [4, 4, 4]


def test_nodes_do_not_replace_the_same_duplicate_for_ever() -> None:
    homes = assign(np.array([[5.0, 1], [5, 1]]), np.array([1, 1]), np.ones(2, bool))
    assert homes.any(axis=0).all()
    assert homes.sum(axis=1).tolist() == [1, 1]


def test_only_an_expert_that_somebody_else_keeps_is_replaced() -> None:
    activations = np.array([[9.0, 8, 1, 0], [9, 1, 2, 8], [1, 9, 8, 2]])
    homes = assign(activations, np.array([2, 1, 1]), np.ones(4, bool))
    assert homes.any(axis=0).all()
    assert homes.sum(axis=1).tolist() == [2, 1, 1]


def test_a_node_without_activations_keeps_experts_for_the_others() -> None:
    activations = np.zeros((3, 1, 6))
    activations[:2, 0] = [[9, 8, 1, 1, 1, 1], [9, 8, 1, 1, 1, 1]]
    assert prism(PlacementProblem(((6,), (6,), (2,)), activations)).homes[2, 0].tolist() == [True] * 2 + [False] * 4
