"""Measured load times turn utilities into densities, in each tier and device."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.experts.predict.prefetch_planner import TierPrices
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.size_classes import SlabLayout

L, E = 2, 6
SMALL, LARGE = PAGE_BYTES, 8 * PAGE_BYTES
MIXED = ExpertGeometry(L, E, 2, 16, 16, "float32", layer_bytes=(LARGE, SMALL))
EVEN = ExpertGeometry(L, E, 2, 16, 16, "float32", layer_bytes=(LARGE, LARGE))
Costs = tuple[float, float]


class Measured:
    """Measured costs of RAM's disk, and of each device's link."""

    def __init__(self, disk: Costs, *links: Costs) -> None:
        self._costs = {Tier.RAM: [disk], Tier.VRAM: list(links)}

    def miss_costs(self, tier: Tier) -> list[Costs]:
        return self._costs[tier]


def moves(geometry: ExpertGeometry, measured: Measured, devices: int, held_in_ram: int) -> list[Move]:
    """Plans moves with equal utilities, `held_in_ram` experts of each layer in RAM, and empty devices."""
    policy = LRU(L, E)
    whole = SlabLayout.within(SlabLayout.whole_bytes(geometry), geometry)
    assert whole is not None
    pools = [SlotPool(Tier.VRAM, L, E, whole, policy) for _ in range(devices)]
    residency = Residency(SlotPool(Tier.RAM, L, E, whole, policy), pools)
    for layer in range(L):
        for expert in range(held_in_ram):
            load = residency.reserve(Move(ExpertId(layer, expert), Tier.NVME, Tier.RAM, 0.0), PrefetchPriority.FILL)
            assert load is not None
            residency.complete_load(load)
    worth = np.full((L, E), 0.5, np.float32)
    return TierPrices(residency, measured, geometry, 0.1).moves(worth)


def layers(plan: list[Move], target: Tier) -> list[int]:
    return [move.expert.layer for move in plan if move.target is target]


@pytest.mark.parametrize(("tier", "held"), [(Tier.VRAM, E), (Tier.RAM, 0)])
def test_with_a_long_start_of_loads_small_experts_save_more_per_byte(tier: Tier, held: int) -> None:
    long, none = (1e-3, 1e-9), (0.0, 1e-9)
    for slow, first in ((tier, 1), (Tier(1 - tier), 0)):
        measured = Measured(long if slow is Tier.RAM else none, long if slow is Tier.VRAM else none)
        plan = layers(moves(MIXED, measured, devices=1, held_in_ram=held), tier)
        assert plan[:E] == [first] * E, "of equals those of the first layer come first"


def test_before_anything_is_measured_a_miss_costs_in_proportion_to_size() -> None:
    unknown = Measured((0.0, 0.0), (0.0, 0.0))
    assert layers(moves(MIXED, unknown, devices=1, held_in_ram=E), Tier.VRAM)[:E] == [0] * E


def test_experts_for_the_device_with_the_slower_link_are_worth_more() -> None:
    measured = Measured((0.0, 1e-9), (0.0, 1e-10), (0.0, 4e-10))
    plan = moves(EVEN, measured, devices=2, held_in_ram=E)
    densities = [move.score for move in plan]
    assert len(plan) == L * E
    assert densities == sorted(densities, reverse=True)
    assert max(densities) == pytest.approx(4 * min(densities), rel=1e-3)
