"""Experts go to a GPU whole: demands before prefetches, and enough prefetches at once that the link is never idle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.fake_gpu import FakeGpu, FakeSlab
from support.waiting import wait_until

from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda_link import AHEAD, CudaLink, SlotOrder
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.size_classes import SlabLayout

STRIDE, SLOTS = 4096, 9
WORK = 4  # steps of a copy in its stream: its start, two halves, its end


class Desk:
    """A link to a fake GPU, whose streams advance on the test's word. It listens to the ends of copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int) -> None:
        self.gpu = FakeGpu(0)
        self.gpu.install(monkeypatch)
        monkeypatch.setattr(cuda_link, "AHEAD_BYTES", ahead_bytes)
        self.ram = HostSlab(SlabLayout.even(SLOTS, STRIDE))
        self.ram.slots()[:] = np.arange(1, SLOTS + 1)[:, None]
        self.ram.pinned = True  # there is nothing to register with
        self.slab = FakeSlab(self.gpu, SLOTS, STRIDE)
        slab: Any = self.slab
        self.link = CudaLink(self.ram, slab, self.ram.layout, SlotOrder(SLOTS))
        self.prefetches: Any
        self.demands: Any
        self.prefetches, self.demands = self.link._streams
        self.pool = SlotPool(Tier.VRAM, 1, SLOTS, SLOTS, LRU(1, SLOTS))
        self.arrivals: list[int] = []
        self.releases: list[int] = []
        self.failures: list[int] = []
        self.rousings = 0
        self.link.attach(self)

    def copy(self, slot: int, *, demand: bool, near: bool = False) -> SlotTransfer:
        self.pool.demanded[slot] = demand
        load = SlotTransfer(self.pool, 0, slot, slot, slot, near=near)
        self.link.copy(load)
        return load

    def queued(self, stream: Any) -> int:
        """Returns the copies that are in flight on a stream."""
        return len(stream.work) // WORK

    def go(self, stream: Any) -> None:
        self.gpu.go(stream)

    def end_one(self, stream: Any) -> None:
        """Advances a stream by one copy, and waits until the link has reported its end."""
        released = len(self.releases)
        for _ in range(WORK):
            assert stream.work[0]()
            stream.work.popleft()
        wait_until(lambda: len(self.releases) > released)

    def on_arrived(self, load: SlotTransfer) -> None:
        self.arrivals.append(load.slot)

    def on_released(self, load: SlotTransfer) -> None:
        self.releases.append(load.slot)

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        self.failures.append(load.slot)

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        return not load.demand

    def on_woken(self, link: object) -> None:
        self.rousings += 1


@pytest.fixture(params=[0, 4 * STRIDE], ids=["large", "small"])
def desk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(monkeypatch, request.param)
    yield desk
    wait_until(desk.link.idle, meanwhile=desk.gpu.drain)
    desk.ram.pinned = False
    desk.link.close()


def ahead(desk: Desk) -> int:
    """Returns the most prefetches that the link has in flight."""
    return max(AHEAD, cuda_link.AHEAD_BYTES // STRIDE)


def test_prefetches_in_flight_are_bounded_in_number_and_bytes(desk: Desk) -> None:
    for slot in range(SLOTS):
        assert desk.link.has_room() == (slot < ahead(desk))
        desk.copy(slot, demand=False)
    for ended in range(SLOTS):
        assert desk.queued(desk.prefetches) == min(ahead(desk), SLOTS - ended)
        assert desk.arrivals == list(range(min(ended + ahead(desk), SLOTS)))
        assert desk.releases == list(range(ended)), "what is in flight reads from its source"
        desk.end_one(desk.prefetches)
    assert (desk.slab.memory == np.arange(1, SLOTS + 1)[:, None]).all()
    assert desk.link.idle()
    assert desk.link.stats.seconds == pytest.approx(2e-3)
    assert desk.link.piece_s == pytest.approx(2e-3)


def test_a_demand_is_issued_at_once_and_prefetches_go_on_when_it_has_ended(desk: Desk) -> None:
    for slot in range(SLOTS - 1):
        desk.copy(slot, demand=False)
    desk.copy(SLOTS - 1, demand=True)
    assert desk.arrivals[-1] == SLOTS - 1
    assert desk.queued(desk.demands) == 1
    assert not desk.link.has_room()
    for _ in range(ahead(desk)):
        desk.end_one(desk.prefetches)
    assert not desk.prefetches.work, "nothing is copied ahead while a demand is in flight"
    desk.end_one(desk.demands)
    assert desk.queued(desk.prefetches) == min(ahead(desk), SLOTS - 1 - ahead(desk))


def test_a_prefetch_for_the_next_layers_overtakes_those_for_later_that_wait(desk: Desk) -> None:
    for slot in range(SLOTS - 1):
        desk.copy(slot, demand=False)
    desk.copy(SLOTS - 1, demand=False, near=True)
    assert desk.queued(desk.prefetches) == ahead(desk), "no more than before"
    desk.end_one(desk.prefetches)
    assert desk.arrivals == [*range(ahead(desk)), SLOTS - 1]


def test_a_prefetch_that_waits_and_is_demanded_is_issued_at_the_next_decision(desk: Desk) -> None:
    for slot in range(SLOTS - 1):
        desk.copy(slot, demand=False)
    desk.pool.demanded[SLOTS - 2] = True
    desk.copy(SLOTS - 1, demand=True)
    assert desk.arrivals[-2:] == [SLOTS - 2, SLOTS - 1]
    assert desk.queued(desk.demands) == 2


def test_a_prefetch_that_waits_is_withdrawn_and_one_in_flight_goes_on(desk: Desk) -> None:
    loads = [desk.copy(slot, demand=False) for slot in range(SLOTS)]
    desk.link.withdraw(loads[-1])
    assert desk.releases == [SLOTS - 1]
    desk.link.withdraw(loads[0])
    assert desk.releases == [SLOTS - 1], "it reads from its source"
    wait_until(desk.link.idle, meanwhile=desk.gpu.drain)
    assert sorted(desk.arrivals) == list(range(SLOTS - 1))
    assert not desk.slab.memory[-1].any()


def test_a_link_is_roused_after_the_next_end_and_not_after_all(desk: Desk) -> None:
    desk.copy(0, demand=False)
    desk.copy(1, demand=False)
    desk.link.wake()
    desk.end_one(desk.prefetches)
    wait_until(lambda: desk.rousings == 1)
    assert desk.queued(desk.prefetches) == 1


def test_closing_fails_copies_that_were_not_issued(desk: Desk) -> None:
    for slot in range(SLOTS - 1):
        desk.copy(slot, demand=False)
    waiting = list(range(ahead(desk), SLOTS - 1))
    closer = threading.Thread(target=desk.link.close)
    closer.start()
    wait_until(lambda: desk.failures == waiting)
    desk.go(desk.prefetches)
    closer.join(60)
    assert desk.releases == list(range(ahead(desk)))
    desk.copy(SLOTS - 1, demand=True)
    assert desk.failures == [*waiting, SLOTS - 1]


def test_a_copy_that_the_driver_refuses_fails_and_keeps_nobody_waiting(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the driver refuses")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_link, "copy_async", refuse)
        desk.copy(0, demand=True)
    assert desk.failures == [0]
    desk.copy(1, demand=True)
    desk.go(desk.demands)
    wait_until(lambda: desk.releases == [1])
    assert desk.link.stats.bytes_per_s == pytest.approx(STRIDE / 2e-3)


def test_the_meter_equals_the_clock(desk: Desk) -> None:
    began_ms = desk.gpu.now_ms
    for slot in range(SLOTS):
        desk.copy(slot, demand=slot % 3 == 2)
    wait_until(desk.link.idle, meanwhile=lambda: desk.gpu.run(1))
    by_clock = SLOTS * STRIDE / (desk.gpu.now_ms - began_ms) * 1e3
    assert desk.link.stats.bytes_per_s == pytest.approx(by_clock, rel=0.05)
