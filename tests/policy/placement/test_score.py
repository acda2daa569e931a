"""Scores agree with counting by hand, and with trying every set of peers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgemoe.policy.placement.problem import Placement
from edgemoe.policy.placement.route_score import fewest, remote_calls, score


def placement_of(homes: np.ndarray, disk: np.ndarray | None = None) -> Placement:
    return Placement(homes, np.where(homes, 0, -1).astype(np.int8), np.zeros_like(homes) if disk is None else disk)


# 3 nodes, 1 layer, 4 experts: node 0 keeps 0 and 1, node 1 keeps 1 and 2, node 2 keeps 3
HOMES = np.array([[[1, 1, 0, 0]], [[0, 1, 1, 0]], [[0, 0, 0, 1]]], bool)


def test_a_small_example_counted_by_hand() -> None:
    tokens = [
        np.array([[[0, 1]], [[0, 2]], [[2, 3]]], np.int16),  # none missing; one peer; two peers
        np.array([[[1, 2]], [[0, 3]]], np.int16),  # none; two peers
        np.array([[[1, 2]]], np.int16),  # both at node 1: one peer
    ]
    found = score(placement_of(HOMES), tokens)
    assert found.remote_share == pytest.approx(7 / 12)
    assert found.rendezvous == pytest.approx(6 / 6)
    assert found.local_layers == pytest.approx(2 / 6)


def test_experts_on_the_own_disk_need_no_peer_and_are_not_in_memory() -> None:
    disk = np.zeros_like(HOMES)
    disk[0, 0, 2] = True
    found = score(placement_of(HOMES, disk), [np.array([[[1, 2]]], np.int16)])
    assert (found.remote_share, found.rendezvous, found.local_layers) == (0.5, 0.0, 1.0)


def test_remote_calls_count_choices_without_a_local_home() -> None:
    activations = np.arange(12.0).reshape(3, 1, 4)
    assert remote_calls(placement_of(HOMES), activations) == 2 + 3 + 4 + 7 + 8 + 9 + 10


@pytest.mark.parametrize("seed", range(200))
def test_the_fewest_peers_equal_an_exhaustive_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, count = int(rng.integers(2, 8)), int(rng.integers(1, 9))
    has = rng.random((count, nodes)) < rng.uniform(0.15, 0.6)
    has[np.arange(count), rng.integers(0, nodes, count)] = True
    sets = [
        set(chosen)
        for size in range(1, nodes + 1)
        for chosen in itertools.combinations(range(nodes), size)
        if has[:, chosen].any(axis=1).all()
    ]
    least = min(map(len, sets))
    useful = set().union(*(each for each in sets if len(each) == least))
    masks = (has * (1 << np.arange(nodes))).sum(axis=1).astype(np.uint64)
    number, good = fewest(masks, count, np.zeros((count + 2, count), np.uint64))
    assert number == least
    assert {node for node in range(nodes) if int(good) >> node & 1} == useful
