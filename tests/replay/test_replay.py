"""Replay against naive references, on the command line, and on a real trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gate import in_gate
from support.replay_kit import LAW, events_of, naive_misses, random_trace

from edgemoe.errors import ConfigError
from edgemoe.replay import main
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import replay
from edgemoe.replay.trace import Trace, load

MACHINE = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 1.0, False)
SLOTS = [4, 9, 18]
WIDE = [9, 14, 18]  # room for three requests' experts of a layer


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([str(LAW), *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", ["lru", "belady"])
@pytest.mark.parametrize("batch", [1, 3])
def test_misses_equal_a_naive_cache_s(name: str, batch: int) -> None:
    trace = random_trace(7)
    events = events_of(trace, batch)
    capacities = SLOTS if batch == 1 else WIDE
    for slots, metrics in zip(capacities, replay(trace, name, capacities, batch, 0.0, MACHINE), strict=True):
        assert metrics.misses == naive_misses(events, slots, name)
        assert metrics.demands == sum(len(experts) for _, experts in events)


@pytest.mark.parametrize("name", ["lru", "two-tier", "learned"])
def test_nobody_misses_less_than_belady(name: str) -> None:
    trace = random_trace(11)
    for mine, optimum in zip(
        replay(trace, name, SLOTS, 1, 0.0, MACHINE), replay(trace, "belady", SLOTS, 1, 0.0, MACHINE), strict=True
    ):
        assert mine.misses >= optimum.misses


def test_scoring_leaves_the_first_part_out_but_carries_its_state_over() -> None:
    trace = random_trace(3)
    whole = replay(trace, "lru", [9], 1, 0.0, MACHINE)[0]
    late = replay(trace, "lru", [9], 1, 0.5, MACHINE)[0]
    first = replay(Trace(trace.requests[:2], trace.experts), "lru", [9], 1, 0.0, MACHINE)[0]
    assert late.misses == whole.misses - first.misses
    assert late.steps * 2 == whole.steps


def test_a_box_that_never_prefetches_stalls_as_its_misses_tell() -> None:
    metrics = replay(random_trace(5), "lru", [9], 2, 0.0, MACHINE)[0]
    assert metrics.box.stall_s == pytest.approx(metrics.misses * MACHINE.expert_bytes / MACHINE.link_bytes_per_s)
    assert metrics.box.to_vram_bytes == metrics.missed_bytes == metrics.misses * MACHINE.expert_bytes


def test_ram_that_holds_a_part_makes_misses_dearer() -> None:
    trace = random_trace(5)
    small = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 0.5, False)
    here, there = (replay(trace, "lru", [9], 1, 0.0, machine)[0] for machine in (MACHINE, small))
    assert here.misses == there.misses
    assert there.box.stall_s > here.box.stall_s
    assert there.box.to_ram_bytes > here.box.to_ram_bytes == 0


def test_the_learned_policy_closes_a_good_part_of_the_gap_on_a_real_trace(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "lru,belady,learned", "--score-from", "0.5", "--no-prefetch")
    rows = {(row["capacity"], row["policy"]): row for row in run(capsys, *words)["results"]}
    assert rows[0.25, "learned"]["gap_closed"] >= 0.35
    assert rows[0.5, "learned"]["gap_closed"] >= 0.35
    for capacity in (0.25, 0.5):
        assert rows[capacity, "learned"]["miss_ratio"] <= 1.01 * rows[capacity, "lru"]["miss_ratio"]
        assert rows[capacity, "belady"]["gap_closed"] == 1.0


@pytest.mark.parametrize("gb_per_s", in_gate([2, 8, 25], [8]))
def test_prefetch_stalls_less_than_none_at_every_speed_of_the_link(gb_per_s: float) -> None:
    trace, slots = load([LAW], limit=800), [96]
    machine = BoxSpec(1e-3, 9 << 20, gb_per_s * 1e9, 3e9, 1.0, True)
    metrics = replay(trace, "learned", slots, 1, 0.0, machine)[0]
    on_demand_s = metrics.missed_bytes / machine.link_bytes_per_s
    assert metrics.box.prefetched > 20
    assert metrics.box.stall_s < on_demand_s
    assert metrics.box.to_vram_bytes > metrics.missed_bytes
    assert metrics.misses == replay(trace, "learned", slots, 1, 0.0, replace(machine, prefetch=False))[0].misses


def test_a_change_of_workload_is_recovered_from_within_four_hundred_tokens() -> None:
    law = np.concatenate(load([LAW]).requests)
    half = law[:900]
    shuffled = ((law[900:1700].astype(np.int64) * 37 + 11) % 64).astype(np.int16)  # other experts, alike in structure
    shuffled.sort(axis=2)
    changed = Trace([half, shuffled], 64)
    fresh = Trace([shuffled], 64)
    slots = [96]
    late = replay(changed, "learned", slots, 1, (900 + 400) / 1700, MACHINE)[0]
    settled = replay(fresh, "learned", slots, 1, 400 / 800, MACHINE)[0]
    assert late.misses <= 1.05 * settled.misses


def test_rows_have_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policies", "lru,two-tier", "--tokens", "100", "--batch", "2", "--alpha", "1e-9")
    result = run(capsys, *words)
    promised = {
        "capacity",
        "policy",
        "miss_ratio",
        "stall_s",
        "bytes_moved",
        "bytes_wasted",
        "moves_per_token",
        "gap_closed",
    }
    assert [(row["capacity"], row["policy"]) for row in result["results"]] == [
        (0.25, "lru"), (0.25, "two-tier"), (0.5, "lru"), (0.5, "two-tier"),
    ]  # fmt: skip
    for row in result["results"]:
        assert promised <= row.keys()
        assert row["objective_s"] == pytest.approx(row["stall_s"] + 1e-9 * row["bytes_to_vram"], abs=2e-6)
    assert result["trace"]["tokens"] == 100


def test_a_table_and_a_picture_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "stall.png"
    assert main([str(LAW), "--tokens", "60", "--policies", "lru,belady", "--plot", str(picture)]) == 0
    assert "belady" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        main([str(LAW), "--tokens", "60", "--policies", "nonsense"])


def test_nothing_is_scored_after_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(LAW), "--score-from", "1"])
    assert "nothing comes after 1" in capsys.readouterr().err
