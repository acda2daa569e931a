"""Classes of slots get their shares of memory by the policy's ranks, and no slot in use is moved."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest

from edgemoe.experts.compute.device_spread import EVERY, Rebalancing
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slots import SlotPool
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry, LivePolicy, Tier, layers_of_sizes
from edgemoe.types.size_classes import SlabLayout

L, E = 4, 64
SIZES = ExpertGeometry(L, E, 4, 8, 8, "float32", layer_bytes=(PAGE_BYTES, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES))
SMALL, LARGE = range(2)


class Box:
    """A RAM tier for a share of the bytes, on which layer-steps demand the test's experts."""

    def __init__(self, share: float, policy: LivePolicy | None = None) -> None:
        layout = SlabLayout.within(int(share * SIZES.all_bytes), SIZES)
        assert layout is not None
        self.pool = SlotPool(Tier.RAM, L, E, layout, policy or LRU(L, E))
        self.residency = Residency(self.pool)
        self.rebalancing = Rebalancing(self.residency)
        self.missed_bytes = 0

    def use(self, layer: int, experts: IntArray) -> None:
        self.residency.begin_layer(layer, experts)
        claim = self.residency.acquire(0, layer, experts, SimpleQueue())
        for load in claim.loads:
            self.missed_bytes += SIZES.stride_bytes(layer)
            self.residency.complete_load(load)
        self.residency.release(0, claim.slots[claim.slots >= 0])

    def step(self, rng: np.random.Generator, popular: tuple[int, ...]) -> None:
        """Demands 4 experts in each layer, of its first `popular` ones."""
        for layer, most in enumerate(popular):
            self.use(layer, rng.choice(most, 4, replace=False))
        self.rebalancing.on_step_ended()

    @property
    def extents(self) -> list[int]:
        return np.bincount(self.pool.extents, minlength=2).tolist()  # type: ignore[no-any-return]


def test_memory_goes_to_the_class_that_is_used_and_comes_back() -> None:
    box, rng = Box(0.5), np.random.default_rng(1)
    assert box.extents[LARGE] == pytest.approx(3 * box.extents[SMALL], abs=4)
    for _ in range(60 * EVERY):
        box.step(rng, (E, E, 8, 8))
    small = -(-(2 * E) // box.pool.layout.per_extent[SMALL])
    assert box.extents[SMALL] >= small - 1, "all of the small experts are used, and few of the large ones"
    box.residency.check_integrity(idle=True)
    for _ in range(200 * EVERY):
        box.step(rng, (8, 8, E, E))
    needed = -(-16 // box.pool.layout.per_extent[SMALL])
    assert box.extents[SMALL] <= needed + 2
    box.residency.check_integrity(idle=True)


def test_a_better_division_misses_fewer_bytes() -> None:
    def missed(moves: bool) -> int:
        box, rng = Box(0.4), np.random.default_rng(2)
        if not moves:
            box.rebalancing.on_step_ended = lambda: None  # type: ignore[method-assign]
        for step in range(80 * EVERY):
            if step == 40 * EVERY:
                box.missed_bytes = 0
            box.step(rng, (E, E, 8, 8))
        return box.missed_bytes

    assert missed(True) < 0.5 * missed(False)


@pytest.mark.parametrize("seed", range(3))
def test_a_division_that_is_right_is_left_alone(seed: int) -> None:
    box, rng = Box(0.5), np.random.default_rng(seed)
    weights = 1 / np.arange(1, E + 1)
    orders = [rng.permutation(E) for _ in range(L)]

    def step() -> None:
        for layer in range(L):
            box.use(layer, orders[layer][rng.choice(E, 4, replace=False, p=weights / weights.sum())])
        box.rebalancing.on_step_ended()

    for _ in range(60 * EVERY):
        step()
    settled = box.rebalancing.moved
    for _ in range(60 * EVERY):
        step()
    assert box.rebalancing.moved - settled <= 6, "of 60 looks"


def test_nothing_that_is_pinned_or_on_its_way_is_moved() -> None:
    box, rng = Box(0.5), np.random.default_rng(3)
    for _ in range(4 * EVERY):
        box.step(rng, (E, E, E, E))
    layers = (0, 2)
    held = [box.residency.acquire(0, layer, np.arange(40), SimpleQueue()) for layer in layers]
    there = [(claim.slots >= 0).sum() for claim in held]
    for _ in range(40 * EVERY):
        box.rebalancing.on_step_ended()
        box.use(1, rng.choice(E, 4, replace=False))
        box.residency.check_integrity()
    for layer, claim, count in zip(layers, held, there, strict=True):
        for load in claim.loads:
            box.residency.complete_load(load)
        mine = claim.slots >= 0
        assert mine.sum() == count
        assert (box.pool.where[layer, :40][mine] == claim.slots[mine]).all()
        box.residency.release(0, claim.slots[mine])
    box.residency.check_integrity(idle=True)


def test_homes_keep_their_slots() -> None:
    box, rng = Box(0.5), np.random.default_rng(4)
    homes = np.zeros((L, E), np.bool_)
    homes[2:, :16] = True
    box.residency.homes.set_homes(homes)
    for _ in range(8):
        for layer in (2, 3):
            box.use(layer, rng.choice(16, 4, replace=False))
    there = box.residency.homes.in_ram().sum()
    for _ in range(60 * EVERY):
        box.step(rng, (E, E, 8, 8))
    assert box.residency.homes.in_ram().sum() >= there
    assert box.pool.slots_of(LARGE) >= homes.sum()


def test_homes_get_the_slots_that_went_to_another_size() -> None:
    box, rng = Box(0.5), np.random.default_rng(6)
    announced = box.residency.homes.capacities
    for _ in range(60 * EVERY):
        box.step(rng, (E, E, 8, 8))
    assert box.residency.homes.capacities == announced, "others plan with it"
    homes = np.zeros((L, E), np.bool_)
    for layers, room in zip(layers_of_sizes(SIZES.strides_bytes.tolist()), announced, strict=True):
        homes[layers, : room // len(layers)] = True
    box.residency.homes.set_homes(homes)
    for _ in range(120 * EVERY):
        box.step(rng, (E, E, 8, 8))
    for layer in range(L):  # as a box fetches its homes
        count = int(homes[layer].sum())
        for first in range(0, count, 4):
            box.use(layer, np.arange(first, min(first + 4, count)))
    assert not box.residency.homes.missing()
    box.residency.check_integrity(idle=True)


@pytest.mark.parametrize("containment", [True, False])
def test_ram_keeps_room_for_experts_of_devices(containment: bool) -> None:
    policy, rng = LRU(L, E), np.random.default_rng(5)
    layouts = [SlabLayout.within(int(share * SIZES.all_bytes), SIZES) for share in (0.6, 0.3)]
    pools = [SlotPool(tier, L, E, layout, policy) for tier, layout in zip((Tier.RAM, Tier.VRAM), layouts, strict=True)]
    residency = Residency(pools[0], pools[1:], containment=containment)
    settled: list[int] = []

    class Computing:
        def synchronize(self) -> None:
            assert (pools[1].extents < 0).sum() == 1, "nobody can be given it meanwhile"
            settled.append(1)

    rebalancing = Rebalancing(residency, [Computing()])  # type: ignore[list-item]
    for number in range(100 * EVERY):
        for layer, most in enumerate((8, 8, E, E) if number > 50 * EVERY else (E, E, 8, 8)):
            experts = rng.choice(most, 4, replace=False)
            residency.begin_layer(layer, experts)
            claim = residency.acquire(0, layer, experts, SimpleQueue())
            for load in claim.loads:
                for follower in residency.complete_load(load):
                    residency.complete_load(follower)
                    residency.unpin(follower.source)
                if load.source >= 0:
                    residency.unpin(load.source)
            residency.release(0, claim.slots[claim.slots >= 0])
        rebalancing.on_step_ended()
        residency.check_integrity(idle=True)
        for size_class in (SMALL, LARGE) if containment else ():
            assert pools[0].slots_of(size_class) > pools[1].slots_of(size_class)
    assert settled
