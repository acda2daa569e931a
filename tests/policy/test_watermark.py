"""Prices settle where demand meets capacity, recover after a shift, and give decisions within the rules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from edgemoe.policy.movement import TierBudget, Watermark, density, floor, miss_cost, plan
from edgemoe.types.experts import Tier

RECOVERY_VISITS = 60  # plans in which a price recovers after a shift


def workload(seed: int, n: int = 400) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Draws densities, and sizes of two precisions."""
    random = np.random.default_rng(seed)
    sizes = random.choice([4 << 20, 9 << 20], n)
    return density(random.beta(0.5, 3, n).astype(np.float32), miss_cost(sizes, 1e-4, 1e-10), sizes), sizes


def off(mark: Watermark, b: npt.NDArray[np.float32], sizes: npt.NDArray[np.int64]) -> float:
    return abs(mark.demanded_bytes(b, sizes) / mark.capacity_bytes - 1)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_demand_settles_within_five_percent_of_capacity_in_any_unit(share: float, scale: float) -> None:
    b, sizes = workload(1)
    mark = Watermark(int(share * sizes.sum()))
    for _ in range(200):
        mark.update(b * np.float32(scale), sizes)
    for _ in range(100):
        mark.update(b * np.float32(scale), sizes)
        assert off(mark, b * np.float32(scale), sizes) <= 0.05


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_after_a_shift_demand_is_back_within_sixty_visits(factor: float) -> None:
    b, sizes = workload(2)
    mark = Watermark(int(0.25 * sizes.sum()))
    for _ in range(300):
        mark.update(b, sizes)
    b, sizes = workload(3)
    b = b * np.float32(factor)
    for _ in range(RECOVERY_VISITS):
        mark.update(b, sizes)
    assert off(mark, b, sizes) <= 0.05


def test_a_tier_with_room_for_all_costs_nothing_in_the_end() -> None:
    b, sizes = workload(4)
    mark = Watermark(int(sizes.sum() * 2))
    mark.price = float(b.mean())
    for _ in range(200):
        mark.update(b, sizes)
    assert mark.demanded_bytes(b, sizes) == sizes.sum()


def test_hysteresis_lowers_moves() -> None:
    def moves(hysteresis: float) -> int:
        b, sizes = workload(6)
        random = np.random.default_rng(0)
        mark, resident, moved = Watermark(int(0.25 * sizes.sum()), hysteresis=hysteresis), np.zeros(len(b), bool), 0
        for _ in range(300):
            noisy = b * random.lognormal(0, 0.1, len(b)).astype(np.float32)
            mark.update(noisy, sizes)
            admit, drop = mark.verdict(noisy, resident)
            resident = (resident | admit) & ~drop
            moved += int(admit.sum())
        return moved

    assert moves(0.2) < 0.5 * moves(0.0)


def test_a_tier_below_the_working_set_pins_the_densest_and_leaves_room_to_stream() -> None:
    b, sizes = workload(7)
    capacity = 20 * (9 << 20)
    pinned = floor(b, sizes, capacity, working_set_bytes=2 * capacity)
    assert sizes[pinned].sum() <= capacity - sizes.max()
    assert sizes[pinned].sum() > capacity - 3 * sizes.max()
    assert b[pinned].min() >= np.sort(b[~pinned])[-1]
    assert not floor(b, sizes, capacity, working_set_bytes=capacity).any()


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.05, 0.9), st.floats(0, 0.4), st.booleans())
def test_capacity_and_containment_always_hold(seed: int, share: float, h: float, containment: bool) -> None:
    random = np.random.default_rng(seed)
    _, sizes = workload(seed, 60)
    tiers = {Tier.VRAM: int(share * sizes.sum() / 2) + 1, Tier.RAM: int(share * sizes.sum()) + 1}
    marks = {tier: Watermark(room, hysteresis=h) for tier, room in tiers.items()}
    where = {tier: np.zeros((6, 10), bool) for tier in tiers}
    sizes = sizes.reshape(6, 10)
    for _ in range(40):
        b = {tier: random.exponential(size=(6, 10)).astype(np.float32) for tier in tiers}
        for tier in tiers:
            marks[tier].update(b[tier], sizes)
            assert marks[tier].price >= 0
        drop = marks[Tier.VRAM].verdict(b[Tier.VRAM], where[Tier.VRAM]).drop
        where[Tier.VRAM] &= ~drop
        drop = marks[Tier.RAM].verdict(b[Tier.RAM], where[Tier.RAM]).drop
        where[Tier.RAM] &= ~drop | (where[Tier.VRAM] if containment else False)
        idle = {tier: float(tiers[tier] - sizes[where[tier]].sum()) for tier in tiers}
        sides = [TierBudget(b[tier], where[tier].copy(), marks[tier], idle[tier]) for tier in (Tier.VRAM, Tier.RAM)]
        for move in plan(*sides, sizes):
            assert not where[move.target][move.expert]
            assert move.source is not Tier.RAM or where[Tier.RAM][move.expert]
            where[move.target][move.expert] = True
        for tier, room in tiers.items():
            assert sizes[where[tier]].sum() <= room
        if containment:
            assert (where[Tier.RAM] | ~where[Tier.VRAM]).all()


def test_a_plan_promotes_and_stages_the_densest_first() -> None:
    sizes = np.full((1, 6), 10, np.int64)
    b = np.array([[6, 5, 4, 3, 2, 1]], np.float32)
    mark = Watermark(30)
    mark.price = 2.5
    ram = TierBudget(b, np.array([[False, True, False, True, True, True]]), mark, 100.0)
    vram = TierBudget(b, np.zeros((1, 6), bool), mark, 10.0)
    moves = [(move.expert.expert, move.source, move.target) for move in plan(vram, ram, sizes)]
    assert moves == [(1, Tier.RAM, Tier.VRAM), (0, Tier.NVME, Tier.RAM), (2, Tier.NVME, Tier.RAM)]
