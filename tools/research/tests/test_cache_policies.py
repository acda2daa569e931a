"""The policies that served ones are compared with rank as their names say."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from support.replay_kit import LAW, events_of, naive_misses, random_trace

from edgemoe.errors import ConfigError
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import replay
from tools.research.cache.compared_caches import CyclicEWMA, RandomPolicy, ResidentWatermark
from tools.research.cache.replay import MAKERS, main

MACHINE = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 1.0, False)


def test_random_is_the_same_for_the_same_seed() -> None:
    assert np.array_equal(RandomPolicy(2, 8, 1).rank(0), RandomPolicy(2, 8, 1).rank(0))


def test_a_layer_that_has_run_is_the_farthest_to_the_corrected_average() -> None:
    assert CyclicEWMA.reuse_weights(1, 4, 0.5).tolist() == pytest.approx(np.exp([-1.5, -2, -0.5, -1]).tolist())
    assert CyclicEWMA(3, 2, 1).rank(1).argmax() // 2 == 2


def test_a_price_by_resident_bytes_only_falls() -> None:
    b = np.random.default_rng(5).random(400).astype(np.float32)
    mark = ResidentWatermark(100)
    mark.price = float(b.max())
    prices = [mark.price]
    for _ in range(100):
        mark.update_resident(b, 90)
        prices.append(mark.price)
    assert all(later <= earlier for earlier, later in pairwise(prices))
    assert mark.price < prices[0]


@pytest.mark.parametrize("name", ["lfu", "lfru"])
@pytest.mark.parametrize(("batch", "slots"), [(1, [4, 9, 18]), (3, [9, 14, 18])])
def test_misses_equal_a_naive_cache_s(name: str, batch: int, slots: list[int]) -> None:
    trace = random_trace(7)
    events = events_of(trace, batch)
    for each, metrics in zip(slots, replay(trace, name, slots, batch, 0.0, MACHINE, MAKERS), strict=True):
        assert metrics.misses == naive_misses(events, each, name)


@pytest.mark.parametrize("name", MAKERS)
def test_nobody_misses_less_than_belady(name: str) -> None:
    trace, slots = random_trace(11), [4, 9, 18]
    for mine, optimum in zip(
        replay(trace, name, slots, 1, 0.0, MACHINE, MAKERS),
        replay(trace, "belady", slots, 1, 0.0, MACHINE),
        strict=True,
    ):
        assert mine.misses >= optimum.misses


def rows_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, float | None]]:
    assert main([str(LAW), "--tokens", "300", "--capacity", "0.5", "--json", *words]) == 0
    rows: list[dict[str, float | None]] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    return rows


def test_the_gap_starts_from_the_best_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "--policies", "lru,lfu,lfru,belady")
    assert max(row["gap_closed"] for row in rows[:3]) == 0.0
    assert rows[3]["gap_closed"] == 1.0


def test_libcachesim_replays_its_policies(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("libcachesim")
    rows = rows_of(capsys, "--policies", "sieve,lru,belady")
    assert rows[2]["miss_ratio"] <= rows[0]["miss_ratio"] < 1
    assert rows[0]["stall_s"] is None  # misses alone are known of it


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        main([str(LAW), "--tokens", "60", "--policies", "nonsense"])
