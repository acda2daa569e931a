"""A replay has the live tiers' misses, for it drives the same objects."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers

from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.types.step import StepMeta, StepRouting

STEPS, VRAM_SLOTS = 60, 7


def decoding(tokens: int) -> StepMeta:
    names = tuple(map(str, range(tokens)))
    zeros = np.zeros(tokens, np.int64)
    return StepMeta(names, np.ones(tokens, np.int64), np.ones(tokens, np.bool_), zeros, zeros)


def serve(tokens: int, seed: int) -> tuple[list[int], list[StepRouting]]:
    """Runs steps of random routes through live tiers; returns the misses of each, and the recorded routings."""
    weights, rng = Weights(SMALL), np.random.default_rng(seed)
    misses, routings = [], []
    with running(small_tiers(FileStore(weights), SMALL.count, (VRAM_SLOTS,), cpu_helps=False, prefetch=False)) as tiers:
        for _ in range(STEPS):
            before = tiers.residency.served
            tiers.experts.begin_step(decoding(tokens))
            for layer in range(SMALL.layers):
                tiers.experts.forward(layer, *weights.route(tokens, rng, layer))
            routings.append(tiers.experts.end_step())
            misses.append(sum(tiers.residency.served[1:]) - sum(before[1:]))
    return misses, routings


@pytest.mark.parametrize("ram_share", [1.0, 0.99], ids=["from RAM", "from disk"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_each_step_of_a_recording_has_its_live_misses(tokens: int, ram_share: float) -> None:
    misses, routings = serve(tokens, seed=tokens)
    machine = BoxSpec(1e-4, SMALL.largest_bytes, 1e10, 1e9, ram_share, prefetch=False)
    geometry = machine.geometry(SMALL.layers, SMALL.experts, SMALL.top_k)
    run = Replay(LRU(SMALL.layers, SMALL.experts), geometry)
    box = run.add(VRAM_SLOTS * SMALL.largest_bytes, machine, prefetch=False)
    again = []
    for routing in routings:
        before = box.counts.misses
        run.step(ReplayedStep(routing.meta, routing.ids))
        again.append(box.counts.misses - before)
    box.residency.check_integrity(idle=True)
    box.close()
    assert 0 < sum(misses) < STEPS * SMALL.layers * SMALL.top_k * tokens
    assert again == misses
