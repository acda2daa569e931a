"""The loader serves demands first and prefetches in idle time; a failed read reaches all that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue

import numpy as np
import pytest
from support.tiers_kit import SMALL, FileStore, Weights, small_tiers
from support.waiting import until

from edgemoe.errors import CorruptExpert, MissingExpert
from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotClaim, SlotTransfer
from edgemoe.experts.transfer.loader import FILL_READERS, IDLE_READERS
from edgemoe.types.experts import ExpertId, Move, Tier


@contextlib.asynccontextmanager
async def moving(tiers: ExpertTiers) -> AsyncIterator[ExpertTiers]:
    """Runs the tiers' loader on this event loop."""
    task = asyncio.create_task(tiers.loader.run())
    await settled()
    try:
        yield tiers
    finally:
        task.cancel()
        await asyncio.wait([task])
        tiers.close()


async def settled() -> None:
    """Waits until nothing more happens without a gate being opened."""
    for _ in range(50):
        await asyncio.sleep(0)


def stage(layer: int, *experts: int, score: float = ALWAYS, target: Tier = Tier.RAM) -> list[Move]:
    return [Move(ExpertId(layer, expert), Tier.NVME, target, score) for expert in experts]


def demand(tiers: ExpertTiers, layer: int, *experts: int) -> tuple[SlotClaim, SimpleQueue[SlotTransfer]]:
    arrivals: SimpleQueue[SlotTransfer] = SimpleQueue()
    claim = tiers.residency.acquire(0, layer, np.array(experts), arrivals)
    tiers.loader.start(claim.loads)
    return claim, arrivals


@pytest.fixture
def store() -> FileStore:
    return FileStore(Weights(SMALL))


async def test_demanded_reads_run_side_by_side(store: FileStore) -> None:
    store.pin(0, 0, 1, 2)
    async with moving(small_tiers(store, 8)) as tiers:
        claim, arrivals = demand(tiers, 0, 0, 1, 2)
        await settled()
        assert len(store.reads) == 3
        assert arrivals.empty()
        store.unpin(0, 0, 1, 2)
        await settled()
        assert arrivals.qsize() == 3
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_loads_from_peers_do_not_count_as_the_disk_s(store: FileStore) -> None:
    on_disk = np.ones((SMALL.layers, SMALL.experts), np.bool_)
    on_disk[0, 1] = False
    async with moving(small_tiers(store, 8, on_disk=on_disk)) as tiers:
        for expert, measured in ((1, False), (0, True)):
            claim, arrivals = demand(tiers, 0, expert)
            await until(lambda arrivals=arrivals: not arrivals.empty())  # type: ignore[misc]
            assert (tiers.loader.stats.bytes_per_s > 0) == measured
            tiers.residency.release(0, claim.slots)


async def test_prefetches_wait_while_a_demand_is_read_and_go_on_after_it(store: FileStore) -> None:
    store.pin(0, 0)
    async with moving(small_tiers(store, 8)) as tiers:
        claim, _ = demand(tiers, 0, 0)
        await settled()
        tiers.loader.prefetch(stage(1, 1, 2))
        await settled()
        assert store.reads == [(0, 0)]
        store.unpin(0, 0)
        await settled()
        assert store.reads == [(0, 0), (1, 1), (1, 2)]
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_a_prefetch_that_ends_beside_a_demand_is_followed_by_no_other(store: FileStore) -> None:
    store.pin(0, 0, 1)
    store.pin(1, 0)
    async with moving(small_tiers(store, 8)) as tiers:
        tiers.loader.prefetch(stage(0, 0, 1, 2))
        await settled()
        claim, _ = demand(tiers, 1, 0)
        await settled()
        assert store.reads == [(0, 0), (0, 1), (1, 0)]
        store.unpin(0, 0)
        await settled()
        assert len(store.reads) == 3
        store.unpin(1, 0)
        await settled()
        assert store.reads[3:] == [(0, 2)]
        store.unpin(0, 1)
        await settled()
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_prefetches_that_have_not_started_are_replaced(store: FileStore) -> None:
    store.pin(1, 0, 1)
    async with moving(small_tiers(store, 8)) as tiers:
        tiers.loader.prefetch(stage(1, 0, 1, 2, 3))
        await settled()
        assert store.reads == [(1, 0), (1, 1)], "two at a time"
        tiers.loader.prefetch(stage(1, 3, 4))
        store.unpin(1, 0, 1)
        await settled()
        assert store.reads[2:] == [(1, 3), (1, 4)]
        assert tiers.loader.prefetch_requests == 0
        tiers.check_integrity(idle=True)


async def test_another_box_s_expert_is_read_ahead_only_as_a_home_or_into_free_slots(store: FileStore) -> None:
    async with moving(small_tiers(store, 8)) as tiers:
        tiers.loader.elsewhere = lambda layer, experts: experts % 2 == 0
        for priority in (PrefetchPriority.NEAR, PrefetchPriority.PREFILL_ONLY, PrefetchPriority.FAR):
            tiers.loader.prefetch(stage(0, 0, 1, 2, 3), priority)
            await settled()
        assert all(expert % 2 for _, expert in store.reads)
        assert store.reads
        for expert, priority in ((4, PrefetchPriority.HOME), (2, PrefetchPriority.FILL)):
            tiers.loader.prefetch(stage(0, expert), priority)
            await settled()
            assert store.reads[-1] == (0, expert)
        claim, _ = demand(tiers, 0, 6)
        await settled()
        assert store.reads[-1] == (0, 6)
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_near_prefetches_go_before_far_ones(store: FileStore) -> None:
    store.pin(0, 0, 1)
    async with moving(small_tiers(store, 8)) as tiers:
        tiers.loader.prefetch(stage(0, 0, 1, 2))
        await settled()
        tiers.loader.prefetch(stage(1, 5), PrefetchPriority.NEAR)
        store.unpin(0, 0, 1)
        await settled()
        assert store.reads == [(0, 0), (0, 1), (1, 5), (0, 2)]


async def test_a_demand_joins_a_prefetch_that_is_being_read(store: FileStore) -> None:
    store.pin(1, 3)
    async with moving(small_tiers(store, 8, (4,))) as tiers:
        tiers.loader.prefetch(stage(1, 3))
        await settled()
        claim, arrivals = demand(tiers, 1, 3)
        store.unpin(1, 3)
        await until(lambda: not arrivals.empty())
        assert store.reads == [(1, 3)]
        assert tiers.residency.tiers_of(1, np.array([3])) == Tier.VRAM
        tiers.residency.release(0, claim.slots)
        await until(lambda: tiers.loader.links[0].idle())
        tiers.check_integrity()


async def test_beside_a_prefetch_that_is_demanded_while_it_is_read_no_other_begins(store: FileStore) -> None:
    store.pin(0, 0, 1)
    async with moving(small_tiers(store, 8)) as tiers:
        tiers.loader.prefetch(stage(0, 0, 1, 2))
        await settled()
        claim, arrivals = demand(tiers, 0, 0)
        store.unpin(0, 1)
        await settled()
        assert store.reads == [(0, 0), (0, 1)]
        store.unpin(0, 0)
        await settled()
        assert arrivals.get_nowait().error is None
        assert store.reads[2:] == [(0, 2)]
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_a_prefetch_to_the_device_is_staged_and_copied_on(store: FileStore) -> None:
    async with moving(small_tiers(store, 8, (4,))) as tiers:
        tiers.loader.prefetch(stage(1, 3, 4, target=Tier.VRAM))
        await until(lambda: tiers.residency.tiers_of(1, np.array([4])) == Tier.VRAM)
        assert tiers.residency.tiers_of(1, np.array([3])) == Tier.VRAM


async def test_a_cancelled_prefetch_is_not_copied_on(store: FileStore) -> None:
    store.pin(1, 3)
    async with moving(small_tiers(store, 8, (4,))) as tiers:
        tiers.loader.prefetch(stage(1, 3, target=Tier.VRAM))
        await settled()
        tiers.loader.prefetch([])
        store.unpin(1, 3)
        await settled()
        assert tiers.residency.tiers_of(1, np.array([3])) == Tier.RAM
        assert tiers.loader.prefetch_requests == 0
        tiers.check_integrity(idle=True)


async def test_a_prefetch_to_the_device_ends_when_its_layer_has_run_without_it(store: FileStore) -> None:
    async with moving(small_tiers(store, 8, (4,), link_bytes_per_s=1.0)) as tiers:
        loader, link = tiers.loader, tiers.loader.links[0]
        loader.prefetch(stage(1, 3))
        await until(lambda: tiers.residency.tiers_of(1, np.array([3])) == Tier.RAM)
        loader.prefetch([Move(ExpertId(1, 3), Tier.RAM, Tier.VRAM, ALWAYS, 0.9)], PrefetchPriority.NEAR)
        await until(lambda: not link.idle())
        for layer in range(2):
            assert tiers.residency.devices[0].loads, "it may still be needed"
            loader.gap.demand(layer)
            loader.gap.begin(layer)
            loader.start_prefetches()
        await until(link.idle)
        await until(lambda: not tiers.residency.ram.pins.any())
        assert tiers.residency.tiers_of(1, np.array([3])) == Tier.RAM
        tiers.check_integrity(idle=True)


async def in_ram(tiers: ExpertTiers, *experts: int) -> None:
    """Has experts of layer 1 read into RAM."""
    tiers.loader.prefetch(stage(1, *experts))
    await until(lambda: (tiers.residency.tiers_of(1, np.array(experts)) == Tier.RAM).all())


def raised(*experts: int, chance: float = 0.9) -> list[Move]:
    return [Move(ExpertId(1, expert), Tier.RAM, Tier.VRAM, ALWAYS, chance) for expert in experts]


def coming(tiers: ExpertTiers) -> set[int]:
    """Returns the experts that are on their way to the device."""
    return {load.expert for load in tiers.residency.devices[0].loads.values()}


async def test_a_plan_s_load_ends_if_the_next_plan_omits_it(store: FileStore) -> None:
    async with moving(small_tiers(store, 8, (4,), link_bytes_per_s=1.0)) as tiers:
        await in_ram(tiers, 3, 4)
        for plan in ((3,), (4, 3)):
            tiers.loader.prefetch(raised(*plan))
            await until(lambda: coming(tiers) == {3})
        tiers.loader.prefetch(raised(4))
        await until(lambda: coming(tiers) == {4})
        claim, _ = demand(tiers, 1, 4)
        tiers.loader.prefetch(raised(3))
        await settled()
        assert coming(tiers) == {4}, "it is demanded"
        tiers.residency.release(0, claim.slots)


async def test_a_prefetch_for_the_next_layer_does_not_wait_for_one_for_later(store: FileStore) -> None:
    async with moving(small_tiers(store, 8, (4,), link_bytes_per_s=1.0)) as tiers:
        loader = tiers.loader
        await in_ram(tiers, 2, 3, 4, 5)
        loader.prefetch(raised(2, 3))
        await until(lambda: coming(tiers) == {2})
        loader.prefetch(raised(4, 5), PrefetchPriority.NEAR)
        await until(lambda: coming(tiers) == {2, 4})
        assert loader.prefetch_requests == 2, "one of each kind at a time"


async def test_a_prefill_s_next_layer_is_copied_as_fast_as_the_link_has_room(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with moving(small_tiers(store, 8, (4,), link_bytes_per_s=1.0)) as tiers:
        loader = tiers.loader
        await in_ram(tiers, 2, 3, 4, 5)
        monkeypatch.setattr(loader.links[0], "has_room", lambda: len(coming(tiers)) < 3)
        loader.gap.demand(0)
        loader.gap.begin(0)
        loader.prefetch(raised(2, 3, 4, 5, chance=1.0), PrefetchPriority.PREFILL_ONLY)
        await until(lambda: coming(tiers) == {2, 3, 4})
        await settled()
        assert loader.prefetch_requests == 1
        loader.prefetch((), PrefetchPriority.PREFILL_ONLY)
        loader.gap.demand(1)
        loader.gap.begin(1)
        loader.start_prefetches()
        await until(lambda: not coming(tiers))
        tiers.check_integrity(idle=True)


async def test_the_disk_reads_ahead_while_a_layer_waits_for_its_link(store: FileStore) -> None:
    async with moving(small_tiers(store, 8, (4,), link_bytes_per_s=1.0)) as tiers:
        await in_ram(tiers, 3)
        tiers.loader.gap.demand(1)
        demand(tiers, 1, 3)
        likely = [move._replace(chance=0.6) for move in stage(2, 5)]
        tiers.loader.prefetch(likely)
        await until(lambda: tiers.residency.tiers_of(2, np.array([5])) == Tier.RAM)
        assert coming(tiers) == {3}


@pytest.mark.parametrize("devices", [(), (4,)])
async def test_a_failed_read_is_told_and_can_be_tried_again(store: FileStore, devices: tuple[int, ...]) -> None:
    store.damaged.add(ExpertId(0, 2))
    async with moving(small_tiers(store, 4, devices)) as tiers:
        claim, arrivals = demand(tiers, 0, 2)
        await settled()
        assert isinstance(arrivals.get_nowait().error, CorruptExpert)
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)
        store.damaged.clear()
        claim, arrivals = demand(tiers, 0, 2)
        await until(lambda: not arrivals.empty())
        assert arrivals.get_nowait().error is None
        tiers.residency.release(0, claim.slots)


async def test_a_failed_copy_is_told_and_keeps_nothing_pinned(store: FileStore) -> None:
    async with moving(small_tiers(store, 4, (4,))) as tiers:
        tiers.loader.prefetch(stage(0, 1, 2))
        await until(lambda: tiers.residency.tiers_of(0, np.array([2])) == Tier.RAM)
        tiers.loader.links[0].close()
        claim, arrivals = demand(tiers, 0, 1, 2, 3)  # one of them has to be read first
        await until(lambda: arrivals.qsize() == 3)
        errors = [arrivals.get_nowait().error for _ in range(3)]
        assert all(isinstance(error, MissingExpert) and "closed" in str(error) for error in errors)
        tiers.residency.release(0, claim.slots)
        tiers.check_integrity(idle=True)


async def test_an_unexpected_error_of_the_store_becomes_a_missing_expert(store: FileStore) -> None:
    async def read(layer: int, expert: int, into: memoryview) -> None:
        raise OSError(5, "Input/output error")

    store.read = read  # type: ignore[method-assign]
    async with moving(small_tiers(store, 4)) as tiers:
        _, arrivals = demand(tiers, 0, 2)
        await settled()
        error = arrivals.get_nowait().error
        assert isinstance(error, MissingExpert)
        assert "Input/output error" in str(error)


async def test_a_failed_prefetch_costs_nobody_anything(store: FileStore) -> None:
    store.damaged.add(ExpertId(0, 2))
    async with moving(small_tiers(store, 4)) as tiers:
        tiers.loader.prefetch(stage(0, 2, 3))
        await settled()
        assert tiers.residency.tiers_of(0, np.array([3])) == Tier.RAM
        tiers.check_integrity(idle=True)


async def test_stopping_fails_queued_and_running_reads(store: FileStore) -> None:
    store.pin(0, *range(8))
    store.pin(1, 0, 1)
    async with moving(small_tiers(store, 12)) as tiers:
        claims = [demand(tiers, 0, *range(8)), demand(tiers, 1, 0, 1)]
        await settled()
    for claim, arrivals in claims:
        assert arrivals.qsize() == len(claim.slots)
        assert isinstance(arrivals.get_nowait().error, MissingExpert)
        tiers.residency.release(0, claim.slots)
    late, arrivals = demand(tiers, 2, 0)
    assert isinstance(arrivals.get_nowait().error, MissingExpert)
    tiers.residency.release(0, late.slots)
    tiers.check_integrity(idle=True)


async def test_reads_that_are_queued_while_the_loader_ends_fail_once(store: FileStore) -> None:
    """The loader ends on another thread, here as soon as a thread that queues reads releases its lock."""
    tiers = small_tiers(store, 4)
    loader = tiers.loader

    class EndsWhenLeft:
        def __init__(self) -> None:
            self.ends: Callable[[], None] = loader._close

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            ends, self.ends = self.ends, lambda: None
            ends()

    loader._lock = EndsWhenLeft()  # type: ignore[assignment]
    claim, arrivals = demand(tiers, 0, 3)
    assert arrivals.qsize() == 1
    tiers.residency.release(0, claim.slots)
    tiers.check_integrity(idle=True)
    tiers.close()


async def test_free_slots_are_filled_in_idle_time(store: FileStore) -> None:
    tiers = small_tiers(store, 10, (4,))
    task = asyncio.create_task(tiers.run())
    await until(lambda: not tiers.residency.ram.free and not tiers.residency.devices[0].free)
    await until(lambda: tiers.loader.links[0].idle())
    assert len(store.reads) == 10
    task.cancel()
    await asyncio.wait([task])
    tiers.close()
    tiers.check_integrity(idle=True)


async def test_free_slots_are_filled_by_more_readers_than_read_ahead_for_a_plan(store: FileStore) -> None:
    for layer in range(3):
        store.pin(layer, *range(8))
    for priority, readers in ((PrefetchPriority.FAR, IDLE_READERS), (PrefetchPriority.FILL, FILL_READERS)):
        store.reads.clear()
        async with moving(small_tiers(store, 24)) as tiers:
            tiers.loader.prefetch(stage(0, *range(8)), priority)
            await settled()
            assert len(store.reads) == readers
