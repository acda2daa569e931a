"""Prefetch is not worse than none at any speed of the link and quality of hints, measured on the serving objects."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from support.replay_kit import random_trace

from edgemoe.experts.predict.predictive_policy import LearnedPolicy
from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import ReplayCounts
from edgemoe.types.arrays import FloatArray
from edgemoe.types.experts import CachePolicy

TOKENS, LAYERS, EXPERTS, K = 40, 6, 24, 3
STEPS = [ReplayedStep.of(step) for step in random_trace(2, 6, TOKENS, LAYERS, EXPERTS, K).steps(1)]


def hints_of(step: ReplayedStep, truth: float, random: np.random.Generator) -> FloatArray:
    """Draws the gates' hints [L, 1, E]: the larger `truth`, the surer; a negative one gives the opposite."""
    logits = random.normal(0, 1.0, (LAYERS, 1, EXPERTS))
    for layer in range(LAYERS):
        logits[layer, 0, step.ids[layer, 0]] += truth
    powers = np.exp(logits)
    return (powers / powers.sum(axis=2, keepdims=True)).astype(np.float32)


def replayed(
    policy: CachePolicy, gb_per_s: float, truths: tuple[float, float], *, prefetch: bool
) -> list[ReplayCounts]:
    """Replays two halves, with hints of these `truths`, and returns each one's counts."""
    machine = BoxSpec(4e-4, 9_440_000, gb_per_s * 1e9, 1e9, 1.0, True, between_s=2e-3)
    geometry, random = machine.geometry(LAYERS, EXPERTS, K), np.random.default_rng(5)
    run = Replay(policy, geometry)
    plans = isinstance(policy, LearnedPolicy)
    box = run.add(geometry.count // 4 * geometry.largest_bytes, machine, prefetch=prefetch, plans=plans)
    halves = []
    with closing(box):
        for half, truth in enumerate(truths):
            before = box.counts
            for step in STEPS[half * len(STEPS) // 2 : (half + 1) * len(STEPS) // 2]:
                run.step(step._replace(hints=hints_of(step, truth, random)))
            halves.append(box.counts.since(before))
        box.residency.check_integrity(idle=False)
    return halves


def policies(name: str) -> CachePolicy:
    return LRU(LAYERS, EXPERTS) if name == "lru" else LearnedPolicy(LAYERS, EXPERTS, K)


@pytest.mark.parametrize("name", ["lru", "learned"])
@pytest.mark.parametrize("gb_per_s", [2, 8, 25])
def test_right_hints_save_stall_and_lies_that_follow_them_cost_next_to_nothing(name: str, gb_per_s: float) -> None:
    without = replayed(policies(name), gb_per_s, (0, 0), prefetch=False)
    helped, lied_to = replayed(policies(name), gb_per_s, (4.0, -4.0), prefetch=True)
    assert helped.stall_s < 0.98 * without[0].stall_s
    assert helped.prefetched + helped.promoted > 20
    assert lied_to.stall_s <= 1.015 * without[1].stall_s, "chances follow what comes"


@pytest.mark.parametrize("gb_per_s", [2, 8, 25])
def test_hints_that_never_told_anything_cost_next_to_nothing(gb_per_s: float) -> None:
    without, useless = (
        replayed(policies("learned"), gb_per_s, (0, 0), prefetch=prefetch)[1] for prefetch in (False, True)
    )
    assert useless.stall_s <= 1.01 * without.stall_s
