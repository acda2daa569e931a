"""Graph launches beside copies on a fake GPU: each launch reads its own experts, from the slab or from RAM."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.fake_gpu import FakeGpu, FakeSlab, FakeStream
from support.waiting import wait_until

from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda import RamExperts, ReachableExperts
from edgemoe.experts.compute.cuda_link import CudaLink, SlotOrder
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import ExpertGeometry, ExpertId, Move, Tier
from edgemoe.types.size_classes import SlabLayout

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
ONE_SIZE = ExpertGeometry(3, 6, 2, 8, 8, "float32")
TWO_SIZES = ExpertGeometry(3, 6, 2, 8, 8, "float32", layer_bytes=(4096, 8192, 4096))
PIECES = 4  # of a launch, each of which reads every expert


class MeetingLock:
    """A lock that tells when a thread waits for it."""

    def __init__(self) -> None:
        self._lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Desk:
    """All experts in RAM, some on a fake GPU, in slots full of their numbers; listens to the ends of copies."""

    def __init__(self, geometry: ExpertGeometry, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.rng, self.geometry = FakeGpu(seed), np.random.default_rng(seed), geometry
        self.gpu.install(monkeypatch)
        self.stream, self.wrong = FakeStream(self.gpu), list[tuple[int, int]]()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.stream)
        monkeypatch.setattr(cuda_link, "AHEAD_BYTES", 4096 * (seed % 5))
        everything = SlabLayout.within(geometry.all_bytes, geometry)
        layout = SlabLayout.within(2 * geometry.all_bytes // 3, geometry)
        assert everything is not None
        assert layout is not None
        self.ram, slab = HostSlab(everything), FakeSlab(self.gpu, 1, layout.size_bytes)
        self.ram.pinned = True  # there is nothing to register with
        policy = LRU(geometry.layers, geometry.experts)
        in_ram, on_gpu = (
            SlotPool(tier, 3, 6, each, policy) for tier, each in ((Tier.RAM, everything), (Tier.VRAM, layout))
        )
        self.residency, self.order = Residency(in_ram, [on_gpu]), SlotOrder(layout.count)
        self.order.lock = self.lock = MeetingLock()  # type: ignore[assignment]
        self.link = CudaLink(self.ram, slab, layout, self.order)  # type: ignore[arg-type]
        self.link.attach(self)
        self._slab = torch.from_numpy(slab.memory.ravel())
        self.slots = ReachableExperts(
            self._slab, layout, geometry, on_gpu.where, self.order, RamExperts(self.ram, in_ram.where)
        )
        for key in range(18):
            load = self.reserve(key, Tier.RAM)
            assert load is not None
            self.ram.slot(load.slot)[:] = 1 + key
            self.residency.complete_load(load)

    def reserve(self, key: int, tier: Tier = Tier.VRAM) -> SlotTransfer | None:
        move = Move(ExpertId(*divmod(key, 6)), Tier(tier + 1), tier, ALWAYS)
        return self.residency.reserve(move, PrefetchPriority.USED)

    def copy(self) -> None:
        """Copies a random expert into the slot of another, if it is not on its way already."""
        if (load := self.reserve(int(self.rng.integers(18)))) is not None:
            self.link.copy(load)

    def read(self) -> None:
        """Queues the reads of a launch, at the addresses that hold now: of whole experts, half by half."""
        places = self.slots._places.clone().numpy()
        for _ in range(PIECES):
            self.stream.work.append(functools.partial(self._compare, places))

    def _compare(self, places: np.ndarray) -> bool:  # type: ignore[type-arg]
        ram_at = self.ram.address - self._slab.data_ptr()
        for (layer, expert), place in np.ndenumerate(places):
            size_bytes, memory = self.geometry.stride_bytes(layer), self._slab.numpy()
            if not 0 <= place < len(memory):
                memory, place = self.ram.bytes, place - ram_at
            if (memory[place : place + size_bytes] != 1 + layer * 6 + expert).any():
                self.wrong.append((layer, expert))
        return self.gpu.spend()

    def finish_copies(self) -> None:
        wait_until(self.link.idle, meanwhile=self.gpu.let_others_go_on)
        self.gpu.drain()

    def close(self) -> None:
        self.finish_copies()
        self.ram.pinned = False
        self.link.close()

    def on_arrived(self, load: SlotTransfer) -> None:
        self.residency.complete_load(load)

    def on_released(self, load: SlotTransfer) -> None:
        self.residency.unpin(load.source)

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        raise error

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        raise AssertionError

    def on_woken(self, link: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("geometry", [ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
@pytest.mark.parametrize("seed", range(10))
def test_in_any_order_of_streams_a_launch_reads_its_own_experts(
    seed: int, geometry: ExpertGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, from_both, launches = Desk(geometry, seed, monkeypatch), 0, 0
    while launches < 60 or (from_both <= 30 and launches < 6000):  # the link's thread may be late on a busy machine
        if launches >= 60:
            desk.gpu.let_others_go_on()
        launches += 1
        for _ in range(desk.rng.integers(3)):
            desk.copy()
        desk.gpu.run(int(desk.rng.integers(12)))
        assert desk.slots.launch(desk.read, 1)
        from_both += 0 < desk.slots.outside.sum() < 18
        for _ in range(desk.rng.integers(3)):
            desk.copy()
        desk.gpu.run(int(desk.rng.integers(2 * PIECES)))
    desk.close()
    assert desk.wrong == []
    assert from_both > 30
    desk.residency.check_integrity(idle=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_that_another_thread_begins_during_a_launch_comes_after_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(ONE_SIZE, seed, monkeypatch)
    for key in range(12):
        load = desk.reserve(key)
        assert load is not None
        desk.link.copy(load)
    desk.finish_copies()
    threads = []

    def overtaken() -> None:
        desk.lock.awaited.clear()
        threads.append(threading.Thread(target=begin))
        threads[-1].start()
        assert desk.lock.awaited.wait(60)
        desk.read()

    def begin() -> None:
        desk.copy()
        desk.lock.awaited.set()  # at the latest: nobody has kept it waiting

    for _ in range(8):
        assert desk.slots.launch(overtaken, 1)
        threads.pop().join()
        for stream in desk.link._streams:
            desk.gpu.go(stream)  # type: ignore[arg-type]
        desk.finish_copies()  # or the link's thread could issue one in the next launch, and keep `begin` from its lock
    desk.close()
    assert desk.wrong == []


def test_a_copy_into_a_slot_that_no_launch_reads_does_not_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(ONE_SIZE, 0, monkeypatch)
    load = desk.reserve(5)
    assert load is not None
    assert desk.slots.launch(desk.read, 1)
    desk.link.copy(load)
    for stream in desk.link._streams:
        desk.gpu.go(stream)  # type: ignore[arg-type]
    wait_until(desk.link.idle)
    assert len(desk.stream.work) == PIECES + 1, "the launch and its mark are still to come"
    desk.close()


def test_an_expert_that_is_on_disk_only_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, launched = Desk(ONE_SIZE, 0, monkeypatch), []
    assert desk.slots.renew()
    desk.residency.ram.where[2, 5] = -1
    assert not desk.slots.launch(lambda: launched.append(1), 1)
    assert not desk.slots.renew()
    assert not launched
    desk.residency.ram.where[2, 5] = 17
    desk.close()


def test_experts_that_kernels_cannot_read_in_ram_must_all_be_in_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(ONE_SIZE, 0, monkeypatch)
    layout = SlabLayout.within(ONE_SIZE.all_bytes, ONE_SIZE)
    assert layout is not None
    where = np.arange(18).reshape(3, 6)
    slots = ReachableExperts(
        torch.zeros(layout.size_bytes, dtype=torch.uint8), layout, ONE_SIZE, where, desk.order, None
    )
    assert slots.renew()
    assert not slots.outside.any()
    where[1, 2] = -1
    assert not slots.renew()
    desk.close()


@pytest.mark.parametrize(("hidden", "launched"), [(64, {1, 2, 16}), (4096, {1, 2}), (16384, {1})])
def test_steps_that_would_read_experts_of_ram_often_are_not_launched(
    hidden: int, launched: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(ONE_SIZE, 0, monkeypatch)
    desk.slots._geometry = replace(ONE_SIZE, hidden=hidden, width=2048)
    assert {rows for rows in (1, 2, 16) if desk.slots.launch(lambda: None, rows)} == launched
    desk.close()


@pytest.mark.parametrize("geometry", [ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
def test_experts_that_move_in_ram_are_noticed_and_then_read_where_they_are(
    geometry: ExpertGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(geometry, 0, monkeypatch)
    try:
        where = desk.residency.ram.where
        for layer in range(3):
            assert desk.slots.launch(desk.read, 1)
            desk.gpu.drain()
            assert desk.slots.is_intact()
            first, second = np.flatnonzero(desk.slots.outside[layer])[:2]
            one, other = where[layer, first], where[layer, second]
            kept = desk.ram.slot(one).copy()
            desk.ram.slot(one)[:] = desk.ram.slot(other)
            desk.ram.slot(other)[:] = kept
            where[layer, [first, second]] = other, one
            assert not desk.slots.is_intact()
        assert desk.slots.launch(desk.read, 1)
        desk.gpu.drain()
        assert desk.slots.is_intact()
        assert not desk.wrong
    finally:
        desk.close()
