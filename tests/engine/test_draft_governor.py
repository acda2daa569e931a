"""The governor drafts where drafted tokens are worth their experts, and loses little where they are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgemoe.engine.draft_governor import LOSS, AcceptanceCounts, DraftedStep, DraftGovernor

LAYERS_TIMES_K = 96  # experts of one token


class World:
    """A box in which a step takes a fixed time, and more for each row and distinct expert."""

    def __init__(self, row_s: float, expert_s: float, accepts: Callable[[int], float], added: float = 0.7) -> None:
        self.row_s, self.expert_s, self.accepts, self.added = row_s, expert_s, accepts, added
        self.governor, self.random = DraftGovernor(), np.random.default_rng(0)
        self.request = AcceptanceCounts(self.governor.acceptance)
        self.took_s, self.tokens, self.drafted = 0.0, 0, 0

    def run(self, steps: int, sure: int = 1, match: int = 6, most: int = 8) -> None:
        for number in range(steps):
            chances = [self.request.chances(match, most)] if self.governor.is_asked() else [np.empty(0)]
            (length,) = self.governor.lengths(chances, sure, 16 - sure)
            right = next((n for n in range(length) if self.random.random() > self.accepts(number)), length)
            sure_experts = int(LAYERS_TIMES_K * sure**0.8)
            experts = sure_experts + int(self.added * LAYERS_TIMES_K * length)
            noise = self.random.normal(1.0, 0.1)
            step_s = (1e-3 + self.row_s * (sure + length) + self.expert_s * experts) * noise
            self.governor.observe(DraftedStep(sure + length, length, right, experts, sure_experts, step_s, 0.0))
            if length:
                self.request.observe(match, length, right)
            self.took_s += step_s
            self.tokens += sure + right
            self.drafted += length

    def plain_s(self, sure: int = 1) -> float:
        """Returns the time of as many tokens without drafts."""
        step_s = 1e-3 + self.row_s * sure + self.expert_s * int(LAYERS_TIMES_K * sure**0.8)
        return self.tokens / sure * step_s


def test_right_drafts_on_a_box_with_slow_experts_are_worth_it() -> None:
    world = World(row_s=1e-5, expert_s=2e-4, accepts=lambda _: 0.95, added=0.4)
    world.run(600)
    assert world.took_s < 0.65 * world.plain_s()


def test_cheap_rows_are_drafted_at_length() -> None:
    world = World(row_s=1e-5, expert_s=1e-6, accepts=lambda _: 0.9)
    world.run(600)
    assert world.took_s < 0.4 * world.plain_s()


@pytest.mark.parametrize("sure", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("expert_s", [1e-5, 1e-4, 1e-3])
def test_drafts_never_cost_more_than_one_percent(expert_s: float, chance: float, sure: int) -> None:
    world = World(row_s=2e-4, expert_s=expert_s, accepts=lambda _: chance, added=0.9)
    world.run(3000, sure)
    assert world.took_s < 1.01 * world.plain_s(sure)


def test_a_change_for_the_worse_is_noticed() -> None:
    world = World(row_s=1e-5, expert_s=2e-5, accepts=lambda number: 0.95 if number < 1500 else 0.02)
    world.run(1500)
    won_s, before = world.plain_s() - world.took_s, world.tokens
    world.run(1500)
    assert won_s > 0
    lost_s = world.took_s - (world.plain_s() - won_s)
    assert lost_s < 0.02 * (world.tokens - before) / world.tokens * world.plain_s()


def test_a_change_for_the_better_is_noticed() -> None:
    world = World(row_s=1e-5, expert_s=2e-5, accepts=lambda _: 0.0)
    world.run(1500)
    world.accepts = lambda _: 0.95
    before_s, before = world.took_s, world.tokens
    world.run(3000)
    assert world.took_s - before_s < 0.8 * (world.tokens - before) / world.tokens * world.plain_s()


def test_a_request_is_judged_by_its_own_drafts() -> None:
    overall = AcceptanceCounts()
    good, bad = AcceptanceCounts(overall), AcceptanceCounts(overall)
    for _ in range(10):
        good.observe(6, 8, 8)
        bad.observe(6, 8, 0)
    assert good.chances(6, 4)[0] > 0.8 > 0.3 > bad.chances(6, 4)[0]
    assert 0.3 < AcceptanceCounts(overall).chances(6, 1)[0] < 0.8
    assert (np.diff(good.chances(6, 8)) <= 0).all()


def test_nothing_is_drafted_before_a_step_was_measured_or_without_room() -> None:
    governor = DraftGovernor()
    likely = [np.full(4, 0.99)]
    assert governor.lengths(likely, 1, 8) == [0]
    governor.observe(DraftedStep(1, 0, 0, 96, 96, 0.01, 0.0))
    assert governor.lengths(likely, 1, 0) == [0]
    assert governor.lengths(likely, 1, 2)[0] <= 2
    assert governor.lengths([], 1, 8) == []
    assert LOSS < 0.01
