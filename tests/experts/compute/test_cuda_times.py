"""Times of copies and computations, measured by a fake GPU's clock; the host waits for neither."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_gpu import FakeGpu, FakeSlab, FakeStream
from support.tiers_kit import SMALL
from support.waiting import wait_until

from edgemoe.experts.compute import cuda
from edgemoe.experts.compute.cost_model import CostModel
from edgemoe.experts.compute.cuda import CudaCompute
from edgemoe.experts.compute.cuda_link import CudaLink, SlotOrder
from edgemoe.experts.compute.dispatch import DeviceTimings, ExpertCompute
from edgemoe.experts.compute.moe import TieredExperts
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import StepMeta, TokenGroups

STRIDE, SLOTS = 4096, 3
COPY_S, KERNEL_PIECES = 2e-3, 5  # of one expert; of one layer


class Landing:
    """Listens to the ends of copies."""

    def __init__(self) -> None:
        self.released_slots: list[int] = []

    def on_arrived(self, load: SlotTransfer) -> None:
        pass

    def on_released(self, load: SlotTransfer) -> None:
        self.released_slots.append(load.source)

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        raise error

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        raise AssertionError

    def on_woken(self, link: object) -> None:
        raise AssertionError


class Desk:
    """A link and a computation on one fake GPU, whose streams advance on the test's word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu(0)
        self.gpu.install(monkeypatch)
        self.stream = FakeStream(self.gpu)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.stream)
        monkeypatch.setattr(
            cuda, "GpuExpertKernels", lambda *_: SimpleNamespace(add=lambda *_: self.stream.compute(KERNEL_PIECES))
        )
        self.ram, self.order = HostSlab(SlabLayout.even(SLOTS, STRIDE)), SlotOrder(SLOTS)
        self.ram.pinned = True  # there is nothing to register with
        slab: Any = FakeSlab(self.gpu, SLOTS, STRIDE)
        self.link, self.landing = CudaLink(self.ram, slab, self.ram.layout, self.order), Landing()
        self.link.attach(self.landing)
        self.pool = SlotPool(Tier.VRAM, 1, SLOTS, SLOTS, LRU(1, SLOTS))
        self.compute = CudaCompute(slab, self.ram.layout, SMALL, self.order)
        self.compute.begin(0, torch.ones(1, SMALL.hidden))

    def copy(self, slot: int, *, demand: bool = True) -> None:
        self.pool.demanded[slot] = demand
        self.link.copy(SlotTransfer(self.pool, 0, slot, slot, slot))

    def add(self, *slots: int) -> None:
        n = len(slots)
        ids, shares = np.arange(n)[None], np.ones((1, n), np.float32)
        self.compute.add(np.array(slots), TokenGroups.of(ids, shares))

    def copy_streams(self) -> None:
        for stream in self.link._streams:
            self.gpu.go(stream)  # type: ignore[arg-type]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    yield desk
    desk.gpu.drain()
    wait_until(desk.link.idle)
    desk.ram.pinned = False
    desk.link.close()


def test_a_copy_is_charged_for_copying_and_not_for_waiting_for_its_slot(desk: Desk) -> None:
    desk.stream.compute(100)
    desk.order.computed([0], desk.stream)  # type: ignore[arg-type]
    desk.copy(0)
    desk.copy_streams()
    assert not desk.link.idle()
    desk.gpu.go(desk.stream)
    desk.copy_streams()
    wait_until(desk.link.idle)
    assert desk.link.stats.seconds == pytest.approx(COPY_S)
    assert desk.link.stats.bytes_per_s == pytest.approx(STRIDE / COPY_S)


def test_copies_that_overlap_are_charged_the_time_that_the_link_was_busy(desk: Desk) -> None:
    desk.copy(0, demand=False)
    desk.copy(1)
    first, second = desk.link._streams
    for stream in (first, second):  # both begin, then one after the other goes on
        assert stream.work[0]()  # type: ignore[attr-defined]
        stream.work.popleft()  # type: ignore[attr-defined]
    for stream, slot in ((first, 0), (second, 1)):
        desk.gpu.go(stream)  # type: ignore[arg-type]
        wait_until(lambda slot=slot: slot in desk.landing.released_slots)  # type: ignore[misc]
    assert desk.link.stats.bytes_per_s == pytest.approx(STRIDE / COPY_S)


def test_a_computation_knows_how_long_it_waited_for_a_copy(desk: Desk) -> None:
    desk.copy(0)
    desk.add(0, 1)
    assert desk.compute.pop_timings() == DeviceTimings(), "nothing has ended yet, and nobody waits for it"
    desk.gpu.go(desk.stream)
    desk.copy_streams()
    desk.gpu.go(desk.stream)
    assert desk.compute.pop_timings() == DeviceTimings(2.0, pytest.approx(COPY_S), pytest.approx(KERNEL_PIECES * 1e-3))
    assert desk.compute.pop_timings() == DeviceTimings(), "each is told once"


def test_a_computation_whose_copy_came_in_time_waited_for_nothing(desk: Desk) -> None:
    desk.copy(0)
    desk.copy_streams()
    desk.add(0)
    desk.gpu.go(desk.stream)
    assert desk.compute.pop_timings() == DeviceTimings(1.0, 0.0, pytest.approx(KERNEL_PIECES * 1e-3))


def test_hits_are_not_timed(desk: Desk) -> None:
    desk.add(0, 1, 2)
    assert len(desk.stream.work) == KERNEL_PIECES + 1, "the kernel, and the mark that copies wait for"


def test_a_thread_s_own_times_are_its_own(desk: Desk) -> None:
    twin = desk.compute.clone_for_thread(None)  # type: ignore[arg-type]
    desk.copy(0)
    desk.add(0)
    desk.gpu.go(desk.stream)
    desk.copy_streams()
    desk.gpu.go(desk.stream)
    assert twin.pop_timings() == DeviceTimings()
    assert desk.compute.pop_timings().units == 1.0


def test_a_thread_that_finds_no_copy_to_wait_for_comes_behind_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0)
    gpu.install(monkeypatch)
    order = SlotOrder(1)
    copies, stream = FakeStream(gpu), FakeStream(gpu)
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(copies)
    order.copied(0, event)
    usual = stream.wait_event

    def interrupted(event: Any) -> None:  # the other thread gets here just before this one waits
        stream.wait_event = usual  # type: ignore[method-assign]
        order.before_compute([0], stream)  # type: ignore[arg-type]
        stream.work.append(lambda: seen.append(event.happened) or True)  # type: ignore[func-returns-value]
        usual(event)

    seen: list[int] = []
    stream.wait_event = interrupted  # type: ignore[method-assign]
    order.before_compute([0], stream)  # type: ignore[arg-type]
    gpu.go(stream)
    assert seen == [], "it computes before the copy is there"
    gpu.go(copies)
    gpu.go(stream)
    assert seen == [1]


def test_a_device_s_wait_is_the_step_s_stall_and_its_time_the_cost_of_a_unit() -> None:
    told = [DeviceTimings(4.0, 0.25, 0.5)]
    compute: Any = SimpleNamespace(
        pop_timings=lambda: told.pop() if told else DeviceTimings(), synchronize=lambda: None
    )
    policy = LRU(SMALL.layers, SMALL.experts)
    pools = [SlotPool(tier, SMALL.layers, SMALL.experts, 4, policy) for tier in (Tier.RAM, Tier.VRAM)]
    residency = Residency(pools[0], pools[1:])
    loader: Any = SimpleNamespace(gap=None, links=[], clock=time.monotonic)
    costs = CostModel(residency, loader, SMALL.strides_bytes)
    computes: list[ExpertCompute] = [compute]
    experts = TieredExperts(SMALL, residency, loader, computes, SimpleNamespace(costs=costs))  # type: ignore[arg-type]
    one = np.ones(1, np.int64)
    experts.begin_step(StepMeta(("r",), one, np.ones(1, np.bool_), one, one))
    assert experts.end_step().stall_s == 0.25
    assert experts.stall_s == [0.0, 0.25, 0.0]
    thread_s = costs.thread_unit_s
    for _ in range(100):
        costs.observe_device(4.0, 0.5)
        costs.observe(4.0, 1e-6)
    assert thread_s < costs.unit_s == pytest.approx(0.125, rel=0.01)
