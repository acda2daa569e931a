"""EPLB gives the published algorithm's results; the cases were computed by hand from its description."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.policy.placement.problem import PlacementProblem, pack
from tools.research.placement.eplb import device_slots, eplb, rebalance, replicate
from tools.research.placement.smartmoe import smartmoe

# load of each expert, slots, groups, nodes, devices -> the expert in each slot
CASES = {
    "one device: the hottest is copied while it has most a copy": ([3, 8, 1], 5, 1, 1, 1, [0, 1, 1, 1, 2]),
    "a slot a device: in order": ([3, 9, 1], 4, 1, 1, 4, [0, 1, 2, 1]),
    "no copies: heavy and light together": ([7, 1, 3, 5], 4, 1, 1, 2, [0, 1, 3, 2]),
    "copies are packed by their share of the load": ([8, 2, 3.2, 3], 6, 1, 1, 2, [2, 0, 1, 3, 0, 0]),
    "groups go to nodes whole": ([10, 1.5, 2, 3, 9, 1, 0.8, 0.6], 8, 4, 2, 2, [0, 1, 6, 7, 4, 3, 2, 5]),
    "groups that nodes do not divide count as one": ([7, 1, 3, 5], 4, 1, 2, 2, [0, 1, 3, 2]),
    "copies stay within a node": ([10, 2, 1.5, 1], 6, 2, 2, 2, [0, 0, 1, 3, 2, 2]),
}
# the example of its README: two layers, 4 groups, 2 nodes, 8 devices
README = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@pytest.mark.parametrize("name", CASES)
def test_slots_equal_the_published_algorithm_s(name: str) -> None:
    load, slots, groups, nodes, devices, expected = CASES[name]
    assert rebalance(np.array([load], float), slots, groups, nodes, devices)[0].tolist() == expected


def test_its_own_example_comes_out() -> None:
    assert rebalance(np.array(README, float), 16, 4, 2, 8).tolist() == README_SLOTS


def test_a_uniform_clusters_homes_equal_the_published_algorithm_s() -> None:
    rng = np.random.default_rng(0)
    activations = rng.permutation(4 * 3 * 12).reshape(4, 3, 12).astype(float)
    homes = eplb(PlacementProblem(((12,),) * 4, activations)).homes
    slots = rebalance(activations.sum(axis=0), 16, 1, 4, 4).reshape(3, 4, 4)
    expected = np.zeros_like(homes)
    for layer in range(3):
        for node in range(4):
            expected[node, layer, slots[layer, node]] = True
    np.testing.assert_array_equal(homes, expected)


def test_load_is_packed_in_proportion_to_slots() -> None:
    assert [each.tolist() for each in pack(np.array([6.0, 5, 4, 3, 2, 1]), np.array([2, 4]))] == [[0, 4], [1, 2, 3, 5]]


def test_copies_go_to_the_expert_with_most_load_per_copy() -> None:
    assert replicate(np.array([12.0, 7, 2]), 6).tolist() == [0, 1, 2, 0, 1, 0]


def test_slots_are_spread_evenly_over_layers() -> None:
    slots, node_of = device_slots(PlacementProblem(((5,), (3, 6)), np.ones((2, 4, 3))))
    assert node_of.tolist() == [0, 1, 1]
    assert slots.sum(axis=0).tolist() == [5, 3, 6]
    assert set(slots.sum(axis=1).tolist()) == {3, 4}


def test_smartmoe_keeps_every_expert_once_with_equal_loads() -> None:
    activations = np.array([[[8.0, 7, 6, 5, 4, 3, 2, 1]]] * 2)
    homes = smartmoe(PlacementProblem(((6,), (6,)), activations)).homes
    assert homes.sum(axis=0).tolist() == [[1] * 8]
    assert (activations[0] * homes).sum(axis=(1, 2)).tolist() == [18, 18]
