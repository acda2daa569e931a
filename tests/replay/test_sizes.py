"""Experts of different sizes are replayed by the objects that serve, and nobody misses fewer bytes than the bound."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.gate import in_gate
from support.replay_kit import LAW, random_trace

from edgemoe.errors import ConfigError
from edgemoe.replay import main
from edgemoe.replay.bound import ByteBelady
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.replay_policies import MAKERS
from edgemoe.replay.run import replay
from edgemoe.replay.trace import Trace, chosen
from edgemoe.types.experts import PAGE_BYTES

MACHINE = BoxSpec(1e-3, 2 * PAGE_BYTES, 8e9, 3e9, 1.0, False)
MIXED = replace(MACHINE, layer_bytes=(PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES))
SLOTS = [16, 20, 28]


@pytest.mark.parametrize("seed", in_gate(range(12), range(4)))
@pytest.mark.parametrize("name", ["lru", "two-tier", "learned"])
def test_nobody_misses_fewer_bytes_than_the_bound(name: str, seed: int) -> None:
    trace, batch = random_trace(seed), 1 + seed % 2
    for mine, bound in zip(
        replay(trace, name, SLOTS, batch, 0.0, MIXED), replay(trace, "belady", SLOTS, batch, 0.0, MIXED), strict=True
    ):
        assert mine.demanded_bytes == bound.demanded_bytes
        assert bound.missed_bytes <= mine.missed_bytes <= mine.demanded_bytes


def test_the_bound_keeps_parts_of_experts() -> None:
    ids = np.array([[[0], [0]]] * 4, np.int16)  # one expert of each of two layers, in turns
    trace = Trace([ids], 1)
    machine = replace(MACHINE, layer_bytes=(4 * PAGE_BYTES, 2 * PAGE_BYTES))
    geometry = machine.geometry(2, 1, 1)
    bound, policy = ByteBelady(geometry, 5 * PAGE_BYTES), MAKERS["belady"](trace, 1)
    for step in trace.steps(1):
        for layer in range(2):
            policy.touch(layer, chosen(step.ids[:, layer]))
            bound.run(layer, np.zeros(1, np.int64), policy.rank(layer))
    assert bound.counts.missed_bytes == (6 + 6) * PAGE_BYTES, "6 pages at first, then one page at each of 6 layer-steps"


def test_memory_follows_use_in_replay_too() -> None:
    """The small experts are all used, of the large ones a few: the first division, by bytes, is wrong for that."""
    rng, tokens = np.random.default_rng(1), 1200
    small = np.sort(np.argsort(rng.random((tokens, 1, 48)), axis=2)[..., :3], axis=2)
    large = np.sort(np.argsort(rng.random((tokens, 1, 4)), axis=2)[..., :3], axis=2)
    trace = Trace([np.concatenate([small, large], axis=1).astype(np.int16)], 48)
    machine = replace(MACHINE, layer_bytes=(PAGE_BYTES, 4 * PAGE_BYTES))
    found = replay(trace, "lru", [32], 1, 0.7, machine)[0]
    assert found.missed_bytes < 0.02 * found.demanded_bytes


def test_the_command_takes_sizes_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(LAW), "--policies", "lru,belady", "--tokens", "60", "--no-prefetch", "--json"]
    assert main([*words, "--expert-bytes", "9MiB"]) == 0
    even = json.loads(capsys.readouterr().out.splitlines()[-1])
    layers = even["trace"]["layers"]
    assert main([*words, "--expert-bytes", f"1x9MiB,{layers - 1}x2MiB"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    for lru, belady in zip(rows[::2], rows[1::2], strict=True):
        assert belady["bytes_missed"] <= lru["bytes_missed"]
        assert belady["gap_closed"] == 1.0
        assert lru["bytes_to_vram"] == pytest.approx(lru["bytes_missed"], rel=1e-3)
    with pytest.raises(ConfigError, match=f"states 2 layers, the trace has {layers}"):
        main([*words, "--expert-bytes", "9MiB,2MiB"])
    with pytest.raises(SystemExit):
        main([*words, "--expert-bytes", "2000x9MiB"])


@pytest.mark.parametrize("seed", range(3))
def test_experts_of_different_sizes_are_prefetched_and_read_from_disk_too(seed: int) -> None:
    trace = random_trace(seed, tokens=120)
    on_demand = replay(trace, "learned", [16], 1, 0.0, MIXED)[0]
    small = replace(MIXED, ram_share=0.7)
    scarce = replay(trace, "learned", [16], 1, 0.0, small)[0]
    assert scarce.box.to_ram_bytes > 0 == on_demand.box.to_ram_bytes
    assert scarce.box.stall_s > on_demand.box.stall_s
    foreseeing = replay(trace, "learned", [16], 1, 0.0, replace(MIXED, prefetch=True))[0]
    assert foreseeing.box.prefetched > 0
    assert foreseeing.missed_bytes == on_demand.missed_bytes
