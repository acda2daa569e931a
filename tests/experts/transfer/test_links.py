"""An emulated link takes the time that it should, and every link knows what it costs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.waiting import wait_until

from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, Transfer
from edgemoe.experts.transfer.links import EmulatedLink, LinkStats, TierLink
from edgemoe.policy.baselines import LRU
from edgemoe.types.experts import Tier

STRIDE = 4096


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Listener:
    """Notes how copies end; `gate` holds the link up after each one."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.failures: list[int] = []
        self.gate = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def arrived(self, load: Transfer) -> None:
        self.order.append(load.slot)
        self.ended.release()
        self.gate.acquire(timeout=10)

    def released(self, load: Transfer) -> None:
        pass

    def failed(self, load: Transfer, error: Exception) -> None:
        self.failures.append(load.slot)

    def roused(self, link: TierLink) -> None:
        self.ended.release()


def copy(pool: SlotPool, slot: int, *, demand: bool = True) -> Transfer:
    pool.demanded[slot] = demand
    return Transfer(pool, 0, slot, slot, slot)


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(Tier.VRAM, 1, 8, 8, LRU(1, 8))


def test_copies_take_as_long_as_the_rate_says(pool: SlotPool) -> None:
    clock, listener, source, target = Clock(), Listener(), HostSlab(8, STRIDE), HostSlab(8, STRIDE)
    source.slab[:] = np.arange(8)[:, None]
    link = EmulatedLink(source, target, 1e6, clock=clock, sleep=clock.sleep)
    link.attach(listener)
    for slot in range(4):
        link.copy(copy(pool, slot))
        listener.gate.release()
    for _ in range(4):
        assert listener.ended.acquire(timeout=10)
    link.close()
    assert clock.now == pytest.approx(100 + 4 * STRIDE / 1e6)
    assert (target.slab[:4] == source.slab[:4]).all()
    assert not target.slab[4:].any()
    assert link.stats.bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert link.idle()


def test_an_idle_link_does_not_save_up_bandwidth(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(HostSlab(8, STRIDE), HostSlab(8, STRIDE), 1e6, clock=clock, sleep=clock.sleep)
    link.attach(listener)
    for slot in range(2):
        clock.now += 5.0
        began = clock.now
        link.copy(copy(pool, slot))
        assert listener.ended.acquire(timeout=10)
        listener.gate.release()
        assert clock.now - began == pytest.approx(STRIDE / 1e6)
    link.close()


def test_demanded_copies_overtake_prefetches(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(HostSlab(8, STRIDE), HostSlab(8, STRIDE), 1e6, clock=clock, sleep=clock.sleep)
    link.attach(listener)
    link.copy(copy(pool, 0, demand=False))
    assert listener.ended.acquire(timeout=10)
    link.copy(copy(pool, 1, demand=False))
    link.copy(copy(pool, 2))
    for _ in range(2):
        listener.gate.release()
        assert listener.ended.acquire(timeout=10)
    listener.gate.release()
    link.close()
    assert listener.order == [0, 2, 1]


def test_a_roused_link_calls_back_on_its_own_thread(pool: SlotPool) -> None:
    listener = Listener()
    link = EmulatedLink(HostSlab(8, STRIDE), HostSlab(8, STRIDE), 1e6)
    link.attach(listener)
    link.rouse()
    assert listener.ended.acquire(timeout=10)
    link.close()


def test_closing_fails_what_is_queued(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(HostSlab(8, STRIDE), HostSlab(8, STRIDE), 1e6, clock=clock, sleep=clock.sleep)
    link.attach(listener)
    link.copy(copy(pool, 0))
    assert listener.ended.acquire(timeout=10)
    link.copy(copy(pool, 1))
    closer = threading.Thread(target=link.close)
    closer.start()
    wait_until(lambda: link.closed)
    listener.gate.release()
    closer.join(10)
    link.copy(copy(pool, 2))
    assert listener.failures == [1, 2]


def test_a_link_knows_its_rate_and_the_fixed_cost_of_a_transfer() -> None:
    clock = Clock()
    stats = LinkStats(clock)
    for i in range(200):
        size = 1000 * (1 + i % 3)
        stats.begin()
        clock.sleep(0.002 + size / 1e6)
        stats.end(size)
    fixed_s, per_byte_s = stats.cost()
    assert fixed_s == pytest.approx(0.002)
    assert per_byte_s == pytest.approx(1e-6)
    assert stats.bytes_per_s == pytest.approx(2000 / 0.004, rel=0.05)


def test_overlapping_transfers_share_the_busy_time() -> None:
    clock = Clock()
    stats = LinkStats(clock)
    for _ in range(50):
        for _ in range(4):
            stats.begin()
        clock.sleep(0.004)
        for _ in range(4):
            stats.end(1000)
    assert stats.bytes_per_s == pytest.approx(1e6, rel=0.05)
    assert stats.cost() == (0.0, pytest.approx(1e-6, rel=0.05))


def test_idle_share_follows_the_last_second() -> None:
    clock = Clock()
    stats = LinkStats(clock)
    for _ in range(1000):  # busy a quarter of the time
        stats.begin()
        clock.sleep(0.0025)
        stats.end(1000)
        clock.sleep(0.0075)
    assert stats.idle_share == pytest.approx(0.75, abs=0.02)
    clock.sleep(10)
    assert stats.idle_share == pytest.approx(1.0, abs=0.01)
    stats.begin()
    assert stats.idle_share == 0
