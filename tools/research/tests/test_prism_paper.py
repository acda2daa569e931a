"""Prism's two algorithms to the letter may run for ever; the corrected ones end and keep everything."""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.prism import assign, layer_counts
from edgemoe.policy.placement.problem import PlacementProblem
from tools.research.placement.prism_paper import published, published_assign, published_counts


def all_of(problem: PlacementProblem) -> np.ndarray:
    return np.ones(problem.activations.shape[1:], bool)


def test_rounding_s_rest_is_assigned_where_the_literal_algorithm_never_ends() -> None:
    activations = np.array([[[1.0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]] * 2)
    problem = PlacementProblem(((5,), (7,)), activations)  # 5 / 3 and 7 / 3, rounded down: 3 places a layer
    counts, endless = published_counts(problem)
    assert endless
    assert counts.sum(axis=0).max() <= 4
    assert layer_counts(problem, all_of(problem)).sum(axis=0).tolist() == [4, 4, 4]
    assert published(problem).homes.any(axis=0).all()


def test_the_letter_ends_where_places_suffice() -> None:
    activations = np.array([[[1.0, 1, 1, 1], [9, 1, 1, 1]]] * 2)
    problem = PlacementProblem(((4,), (6,)), activations)
    counts, endless = published_counts(problem)
    assert not endless
    assert (counts.sum(axis=0) >= 4).all()


def test_nodes_that_replace_the_same_duplicate_swap_for_ever_by_the_letter() -> None:
    activations = np.array([[5.0, 1], [5, 1]])
    one_each = np.array([1, 1])
    _, endless = published_assign(activations, one_each, np.ones(2, bool))
    assert endless
    homes = assign(activations, one_each, np.ones(2, bool))
    assert homes.any(axis=0).all()
    assert homes.sum(axis=1).tolist() == [1, 1]
