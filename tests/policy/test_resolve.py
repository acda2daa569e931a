"""Resolving the experts of a layer, against an exhaustive search."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from edgemoe.policy.resolve import PEERS_EACH, CostMatrix, WayCosts, candidates, finish_s, resolve


def exhaustive(ways: WayCosts) -> float:
    """Computes the least finish time of all assignments."""
    n, w = ways.alone.shape
    choice = np.array(list(product(range(w), repeat=n)))  # [w ** n, n]
    load = ways.load[np.arange(n), choice]  # [w ** n, n, c]
    busy = load.sum(axis=1) + (load > 0).any(axis=1) * ways.opening
    alone = ways.alone[np.arange(n), choice]
    return float(np.maximum(busy.max(axis=1), alone.max(axis=1)).min())


def random_ways(seed: int) -> WayCosts:
    """Draws costs of GPU, PCIe then GPU, CPU, two peers, disk then CPU; some of them are impossible."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    tokens = rng.integers(1, 20, n)
    gpu, pcie, cpu, disk, near, far = range(6)
    load = np.zeros((n, 6, 6))
    move, read = rng.uniform(0.5, 3), rng.uniform(2, 9)
    load[:, 0, gpu] = load[:, 1, gpu] = 0.05 + 0.002 * tokens
    load[:, 1, pcie] = move
    load[:, 2, cpu] = load[:, 5, cpu] = 0.3 + 0.1 * tokens
    load[:, 3, near] = rng.uniform(0.2, 1) + 0.05 * tokens
    load[:, 4, far] = rng.uniform(0.2, 3) + 0.1 * tokens
    load[:, 5, disk] = read
    opening = rng.uniform(0, 1.5, 6) * (np.arange(6) >= near)
    alone = load.sum(axis=2) + (load > 0) @ opening
    missing = rng.random((n, 6)) < 0.35
    missing[:, 5] = False
    alone[missing] = np.inf
    return WayCosts(load, alone, opening)


def test_the_least_finish_time_is_found_or_nearly() -> None:
    ratios = []
    for seed in range(300):
        ways = random_ways(seed)
        found = resolve(ways)
        assert found.finish_s == pytest.approx(finish_s(ways, found.way))
        ratios.append(found.finish_s / exhaustive(ways))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) < 1.05
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.97


def test_work_is_spread_over_channels_although_one_is_cheaper_for_each() -> None:
    """Minimising the sum would use the first channel alone."""
    load = np.zeros((6, 2, 2))
    load[:, 0, 0], load[:, 1, 1] = 1.0, 1.5
    found = resolve(WayCosts(load, load.sum(axis=2), np.zeros(2)))
    assert found.finish_s == pytest.approx(4.0)
    assert sorted(np.bincount(found.way).tolist()) == [2, 4]


def test_a_peer_that_got_slow_loses_its_work() -> None:
    load = np.zeros((4, 2, 2))
    load[:, 0, 0], load[:, 1, 1] = 1.0, 1.0
    even = resolve(WayCosts(load, load.sum(axis=2), np.zeros(2)))
    load[:, 1, 1] = 50.0
    slow = resolve(WayCosts(load, load.sum(axis=2), np.zeros(2)))
    assert np.count_nonzero(even.way == 1) == 2
    assert np.count_nonzero(slow.way == 1) == 0


def test_a_rendezvous_that_does_not_pay_is_not_opened() -> None:
    load = np.zeros((3, 2, 2))
    load[:, 0, 0], load[:, 1, 1] = 1.0, 0.1
    alone = load.sum(axis=2) + np.array([0.0, 5.0])
    assert resolve(WayCosts(load, alone, np.array([0.0, 5.0]))).way.tolist() == [0, 0, 0]


def test_an_expert_that_is_nowhere_is_named() -> None:
    load = np.ones((3, 1, 1))
    alone = np.ones((3, 1))
    alone[1] = np.inf
    with pytest.raises(ValueError, match="row 1"):
        resolve(WayCosts(load, alone, np.zeros(1)))


def test_work_that_a_channel_has_to_do_anyway_counts() -> None:
    load = np.zeros((3, 2, 2))
    load[:, 0, 0], load[:, 1, 1] = 1.0, 1.0
    ways = WayCosts(load, load.sum(axis=2), np.zeros(2), busy=np.array([5.0, 0.0]))
    found = resolve(ways)
    assert found.way.tolist() == [1, 1, 1]
    assert found.finish_s == pytest.approx(5.0) == finish_s(ways, found.way)


def peers_ways(its_s: CostMatrix, open_s: CostMatrix, near: np.ndarray) -> WayCosts:
    """Returns costs of a slow disk here and of each expert's peers `near` [k, n]; every peer has a channel."""
    peers, n = its_s.shape
    load = np.zeros((n, 1 + len(near), 1 + peers))
    load[:, 0, 0] = 0.01
    for k, peer in enumerate(near):
        load[np.arange(n), 1 + k, 1 + peer] = its_s[peer, np.arange(n)]
    opening = np.append(0.0, open_s)
    return WayCosts(load, load.sum(axis=2) + (load > 0) @ opening, opening)


def random_peers(seed: int, peers: int, experts: int, holders: float) -> tuple[CostMatrix, CostMatrix]:
    """Draws `its_s` and `open_s` of peers; on average `holders` of them have an expert."""
    rng = np.random.default_rng(seed)
    speed_s = rng.uniform(1e-4, 1e-3, peers) * np.exp(rng.choice([0, 0.3, 1]) * rng.standard_normal(peers))
    its_s = speed_s[:, None] * rng.uniform(0.5, 3, experts)
    its_s[rng.random((peers, experts)) >= holders / peers] = np.inf
    return its_s, rng.choice([0.0, 3e-4, 2e-3]) * rng.uniform(0.5, 1.5, peers)


def dense(its_s: CostMatrix, open_s: CostMatrix) -> WayCosts:
    return peers_ways(its_s, open_s, np.repeat(np.arange(len(its_s))[:, None], its_s.shape[1], axis=1))


def test_with_at_most_three_holders_an_early_choice_loses_nothing() -> None:
    for seed in range(60):
        its_s, open_s = random_peers(seed, peers=12, experts=6, holders=4.0)
        its_s[np.cumsum(np.isfinite(its_s), axis=0) > PEERS_EACH] = np.inf  # a column keeps its first values only
        near = candidates(its_s, open_s)
        kept = np.take_along_axis(np.isfinite(its_s), near, axis=0).sum(axis=0)
        assert kept.tolist() == np.isfinite(its_s).sum(axis=0).tolist()
        few, all_of_them = resolve(peers_ways(its_s, open_s, near)), resolve(dense(its_s, open_s))
        assert few.finish_s == pytest.approx(all_of_them.finish_s)


@pytest.mark.parametrize("holders", [4.0, 12.0, 24.0])
def test_of_many_peers_three_beforehand_make_the_layer_little_later(holders: float) -> None:
    ratios = []
    for seed in range(15):
        its_s, open_s = random_peers(seed, peers=24, experts=12, holders=holders)
        few = resolve(peers_ways(its_s, open_s, candidates(its_s, open_s)))
        ratios.append(few.finish_s / resolve(dense(its_s, open_s)).finish_s)
    assert max(ratios) < 1.25
    assert np.mean(ratios) < 1.05


def test_experts_that_all_peers_have_are_not_left_to_three_of_them() -> None:
    near = candidates(np.full((16, 16), 1e-3), np.full(16, 1e-3))
    assert len(np.unique(near)) == 16
    assert all(len(set(column)) == PEERS_EACH for column in near.T.tolist())
