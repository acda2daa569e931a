"""The compiled choice of victims equals a plain statement of the rule, in random states."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest

from edgemoe.experts.tiers.eviction import LAST, TRANSIENT_KEY
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS, TRANSIENT, UNUSED
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool, SlotTransfer
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.size_classes import SlabLayout

L, E = 5, 24


class Ranks:
    """A policy whose ranks the test sets, and which counts how often it is asked."""

    margin = 0.0

    def __init__(self) -> None:
        self.ranks: FloatArray = np.zeros((L, E), np.float32)
        self.asked = 0

    def touch(self, layer: int, experts: IntArray) -> None:
        pass

    def rank(self, layer: int) -> FloatArray:
        self.asked += 1
        return self.ranks

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return chance, chance


class Model:
    """The rule, stated plainly: the experts that a pool may evict, and the utility of keeping each."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.clock, self.layer = 0, 0
        self.visited = np.full(L, -1)
        self.needed: set[int] = set()
        self.homes, self.former = set[int](), set[int]()
        self.flags: dict[tuple[int, int], int] = {}  # by pool and expert
        self.request: dict[tuple[int, int], tuple[float, int]] = {}  # utility, and layer-step at which it began

    def begin(self, layer: int) -> None:
        self.clock += 1
        self.layer, self.visited[layer] = layer, self.clock
        self.needed.clear()

    def keep(self, homes: BoolArray) -> None:
        there = set(np.flatnonzero(self.residency.ram.where >= 0).tolist())
        now = set(np.flatnonzero(homes).tolist())
        self.former = ((self.former | self.homes) & there) - now
        self.homes = now

    def copy_of(self, key: int) -> SlotPool | None:
        """Returns the device whose copy is evicted with the expert's slot in RAM."""
        residency = self.residency
        if not residency.devices or not residency.containment:
            return None
        pool = residency.devices[residency.device_of.ravel()[key]]
        return pool if pool.where.ravel()[key] >= 0 else None

    def may_evict(self, pool: SlotPool, key: int) -> bool:
        if pool.pins[pool.where.ravel()[key]]:
            return False
        if pool is not self.residency.ram:
            return True
        top = self.copy_of(key)
        return key not in self.homes and (top is None or not top.pins[top.where.ravel()[key]])

    def utility(self, pool: SlotPool, key: int, ranks: FloatArray) -> float:
        ram = pool is self.residency.ram
        if key in self.needed:
            return ALWAYS
        if ram and key in self.former:
            return float(LAST)
        flags, layer, value = self.flags.get((pool.index, key), 0), key // E, float(ranks.ravel()[key])
        top = self.copy_of(key) if ram else None
        if flags & TRANSIENT and (top is None or self.flags.get((top.index, key), 0) & TRANSIENT):
            value = float(np.float32(float(TRANSIENT_KEY) * (1 + (layer - self.layer - 1) % L / L)))
        if flags & UNUSED and self.visited[layer] <= self.request[pool.index, key][1]:
            value = max(value, self.request[pool.index, key][0])
        return value

    def order(self, pool: SlotPool, layer: int, ranks: FloatArray) -> list[tuple[float, int]]:
        """Returns (utility, expert) of all that may be evicted for the layer, in order of eviction.

        All have the layer's size. Of equals the one in the lower slot goes first.
        """
        mine = pool.layer_class == pool.layer_class[layer]
        keys = [key for key in np.flatnonzero(pool.where >= 0).tolist() if mine[key // E] and self.may_evict(pool, key)]
        keys.sort(key=lambda key: (self.utility(pool, key, ranks), pool.where.ravel()[key]))
        return [(self.utility(pool, key, ranks), key) for key in keys]


class Bed:
    """A residency in a random state, and the model after the same operations."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.policy, containment = Ranks(), bool(rng.integers(2))
        self.policy.ranks[:] = rng.integers(0, 40, (L, E))  # with equals
        sizes = tuple((PAGE_BYTES * rng.integers(1, 1 + rng.integers(1, 4), L)).tolist())  # up to three
        geometry = ExpertGeometry(L, E, 2, 8, 8, "float32", layer_bytes=sizes)
        devices = [self._pool(Tier.VRAM, geometry, int(rng.integers(8, 24))) for _ in range(rng.integers(3))]
        ram = self._pool(Tier.RAM, geometry, int(rng.integers(24, 60)))
        self.residency = Residency(ram, devices, containment=containment)
        self.model, self.held = Model(self.residency), list[tuple[SlotPool, int]]()
        for _ in range(rng.integers(100, 400)):
            self._happens()

    def _pool(self, tier: Tier, geometry: ExpertGeometry, slots: int) -> SlotPool:
        layout = SlabLayout.within(slots * geometry.largest_bytes, geometry)
        assert layout is not None
        return SlotPool(tier, L, E, layout, self.policy)

    def _happens(self) -> None:
        rng, residency, model = self.rng, self.residency, self.model
        layer, priority = int(rng.integers(L)), PrefetchPriority(rng.integers(6))
        what = rng.choice(
            ["begin", "wish", "use", "keep", "hold", "move", "let go"], p=[0.1, 0.63, 0.1, 0.02, 0.07, 0.03, 0.05]
        )
        if what == "begin":
            residency.begin_layer(layer, np.array([], np.int64))
            model.begin(layer)
        elif what == "wish":
            target, score = Tier(rng.integers(0 if residency.devices else 1, 2)), float(rng.integers(0, 60))
            self.wish(Move(ExpertId(layer, int(rng.integers(E))), Tier(target + 1), target, score), priority)
        elif what == "use":
            self.use(layer)
        elif what == "keep" and rng.random() < 0.8:
            homes = rng.random((L, E)) < min(residency.homes.capacities) / (3 * L * E)
            residency.homes.set_homes(homes)
            model.keep(homes)
        elif what == "keep":
            residency.homes.forget_former()
            model.former.clear()
        elif what == "hold":
            key = int(rng.integers(L * E))
            slot = residency.pin(*divmod(key, E))
            if slot >= 0:
                self.held.append((residency.ram, slot))
        elif what == "move":
            self.move(residency.tops[rng.integers(len(residency.tops))] if rng.random() < 0.5 else residency.ram)
        elif self.held:
            residency.unpin(self.held.pop(int(rng.integers(len(self.held))))[1])

    def wish(self, move: Move, priority: PrefetchPriority) -> None:
        key = move.expert.layer * E + move.expert.expert
        load = self.residency.reserve(move, priority)
        if load is not None:
            self.model.flags[load.pool.index, key] = priority.flags
            self.model.request[load.pool.index, key] = move.score, self.model.clock
            self._land(load)

    def _land(self, load: SlotTransfer) -> None:
        for follower in self.residency.complete_load(load):
            self._land(follower)
        if load.source >= 0:
            self.residency.unpin(load.source)

    def move(self, pool: SlotPool) -> None:
        """Moves an extent from one class to another, unless an expert in it must stay."""
        number, size_class = int(self.rng.integers(len(pool.extents))), int(self.rng.integers(len(pool.classes)))
        first, count = pool.extent(number, int(pool.extents[number]))
        inside = [key for key in pool.owner[first : first + count].tolist() if key >= 0]
        stay = pool.pins[first : first + count].any() or not all(self.model.may_evict(pool, key) for key in inside)
        assert self.residency.extents.remove(pool, number) != stay
        if not stay:
            assert (pool.where.ravel()[inside] < 0).all()
            self.residency.check_integrity()
            self.residency.extents.add(pool, number, size_class)
        self.residency.check_integrity()

    def use(self, layer: int) -> None:
        """Uses some loaded experts of a layer, for decode or prefill; one time in ten they stay pinned."""
        for device, pool in enumerate(self.residency.tops):
            there = np.flatnonzero(pool.where[layer] >= 0)[:3]
            if len(there):
                only_prefill = self.rng.random(len(there)) < 0.3
                slots = self.residency.acquire(device, layer, there, SimpleQueue(), prefill_only=only_prefill).slots
                for expert, only in zip(there.tolist(), only_prefill.tolist(), strict=True):
                    key = (pool.index, layer * E + expert)
                    self.model.flags[key] = self.model.flags.get(key, 0) & (TRANSIENT if only else 0)
                    self.model.needed.add(layer * E + expert)
                if self.rng.random() < 0.9:
                    self.residency.release(device, slots)


@pytest.mark.parametrize("seed", range(60))
def test_demands_evict_experts_of_the_lowest_utility(seed: int) -> None:
    bed = Bed(seed)
    residency, model = bed.residency, bed.model
    model.begin(layer := seed % L)
    residency.begin_layer(layer, np.array([], np.int64))
    bed.use((layer + 1) % L)
    top, device = residency.tops[-1], len(residency.tops) - 1
    mine = np.flatnonzero(residency.device_of[layer] == device)
    absent = mine[(top.where[layer, mine] < 0) & (residency.ram.where[layer, mine] >= 0 if residency.devices else True)]
    wanted = absent[: 1 + seed % 7]
    model.needed.update((layer * E + wanted).tolist())
    before, free = top.where.ravel().copy(), len(top.classes[top.layer_class[layer]].free)
    for expert in wanted.tolist() if residency.devices else ():  # their sources are pinned first
        residency.pin(layer, expert)
    expected = {key for _, key in model.order(top, layer, bed.policy.ranks)[: max(0, len(wanted) - free)]}
    bed.policy.asked = 0
    claim = residency.acquire(device, layer, wanted, SimpleQueue())
    gone = set(np.flatnonzero((before >= 0) & (top.where.ravel() < 0)).tolist())
    assert gone == expected
    assert bed.policy.asked == (len(wanted) > free), "asked only where something has to go"
    assert np.count_nonzero(claim.slots >= 0) == min(len(wanted), free + len(expected))
    residency.check_integrity()


@pytest.mark.parametrize("seed", range(60))
def test_prefetches_evict_the_lowest_utility_if_it_is_below_their_own(seed: int) -> None:
    bed = Bed(1000 + seed)
    residency, model = bed.residency, bed.model
    residency.begin_layer(layer := seed % L, np.array([], np.int64))
    model.begin(layer)
    bed.use(layer)
    ram, absent = residency.ram, np.flatnonzero(residency.ram.where < 0)
    wanted = ExpertId(*divmod(int(bed.rng.choice(absent)), E))
    score, free = float(bed.rng.integers(0, 60)), len(ram.classes[ram.layer_class[wanted.layer]].free)
    order = model.order(ram, wanted.layer, bed.policy.ranks)
    before = ram.where.ravel().copy()
    load = residency.reserve(Move(wanted, Tier.NVME, Tier.RAM, score), PrefetchPriority.FAR)
    gone = np.flatnonzero((before >= 0) & (ram.where.ravel() < 0)).tolist()
    if free:
        assert (load is not None, gone) == (True, [])
    elif order and order[0][0] < score:
        assert (load is not None, gone) == (True, [order[0][1]])
    else:
        assert (load, gone) == (None, [])
    residency.check_integrity()
