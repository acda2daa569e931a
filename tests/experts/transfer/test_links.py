"""An emulated link takes the stated time, and every link knows its costs."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import pytest
from support.waiting import wait_until

from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, SlotTransfer
from edgemoe.experts.transfer.link_stats import LinkStats
from edgemoe.experts.transfer.links import PIECE_BYTES, EmulatedLink, TierLink
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.size_classes import SlabLayout

STRIDE = 4096


class Clock:
    """A clock that advances only while a thread sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        """Lets a link sleep for `seconds`, or until it is notified."""
        if seconds is None:
            changed.wait(60)
        else:
            self.now += seconds


class StandingClock(Clock):
    """A clock that the test advances; sleeping threads then wake up."""

    def __init__(self) -> None:
        super().__init__()
        self._naps: SimpleQueue[float] = SimpleQueue()

    def wait(self, changed: threading.Condition, seconds: float | None) -> None:
        self._changed = changed
        if seconds is not None:
            self._naps.put(seconds)
        changed.wait(60)

    def nap_s(self) -> float:
        """Returns the time for which the link wants to sleep."""
        return self._naps.get(timeout=60)

    def go_on(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # sums of floats may be a little late
        with self._changed:
            self._changed.notify()


class Listener:
    """Records the ends of copies; `gate` stops the link after each one."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.failures: list[int] = []
        self.gate = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def on_arrived(self, load: SlotTransfer) -> None:
        self.order.append(load.slot)
        self.ended.release()
        self.gate.acquire(timeout=60)

    def on_released(self, load: SlotTransfer) -> None:
        pass

    def on_failed(self, load: SlotTransfer, error: Exception) -> None:
        self.failures.append(load.slot)

    def withdraw_prefetch(self, load: SlotTransfer) -> bool:
        return not load.demand

    def on_woken(self, link: TierLink) -> None:
        self.ended.release()


def copy(pool: SlotPool, slot: int, *, demand: bool = True) -> SlotTransfer:
    pool.demanded[slot] = demand
    return SlotTransfer(pool, 0, slot, slot, slot)


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(Tier.VRAM, 1, 8, 8, LRU(1, 8))


def test_copies_take_as_long_as_the_rate_says(pool: SlotPool) -> None:
    clock, listener, source, target = (
        Clock(),
        Listener(),
        HostSlab(SlabLayout.even(8, STRIDE)),
        HostSlab(SlabLayout.even(8, STRIDE)),
    )
    source.slots()[:] = np.arange(8)[:, None]
    link = EmulatedLink(source, target, 1e6, clock=clock, wait=clock.wait)
    link.attach(listener)
    for slot in range(4):
        link.copy(copy(pool, slot))
        listener.gate.release()
    for _ in range(4):
        assert listener.ended.acquire(timeout=60)
    link.close()
    assert clock.now == pytest.approx(100 + 4 * STRIDE / 1e6)
    assert (target.slots()[:4] == source.slots()[:4]).all()
    assert not target.slots()[4:].any()
    assert link.stats.bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert link.idle()


def test_an_idle_link_does_not_save_up_bandwidth(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(
        HostSlab(SlabLayout.even(8, STRIDE)), HostSlab(SlabLayout.even(8, STRIDE)), 1e6, clock=clock, wait=clock.wait
    )
    link.attach(listener)
    for slot in range(2):
        clock.now += 5.0
        began = clock.now
        link.copy(copy(pool, slot))
        assert listener.ended.acquire(timeout=60)
        listener.gate.release()
        assert clock.now - began == pytest.approx(STRIDE / 1e6)
    link.close()


def test_demanded_copies_overtake_prefetches(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(
        HostSlab(SlabLayout.even(8, STRIDE)), HostSlab(SlabLayout.even(8, STRIDE)), 1e6, clock=clock, wait=clock.wait
    )
    link.attach(listener)
    link.copy(copy(pool, 0, demand=False))
    assert listener.ended.acquire(timeout=60)
    link.copy(copy(pool, 1, demand=False))
    link.copy(copy(pool, 2))
    for _ in range(2):
        listener.gate.release()
        assert listener.ended.acquire(timeout=60)
    listener.gate.release()
    link.close()
    assert listener.order == [0, 2, 1]


PIECES, PIECE_S = 10, PIECE_BYTES / 1e6


@pytest.fixture
def standing() -> StandingClock:
    return StandingClock()


def link_of_pieces(clock: StandingClock, listener: Listener) -> EmulatedLink:
    """Builds an emulated link of 1 MB/s that moves experts in ten pieces, independent of their real bytes."""
    source = HostSlab(SlabLayout.even(8, STRIDE))
    source.slots()[:] = np.arange(8)[:, None]
    link = EmulatedLink(
        source, HostSlab(SlabLayout.even(8, STRIDE)), 1e6, PIECES * PIECE_BYTES, clock=clock, wait=clock.wait
    )
    link.attach(listener)
    for _ in range(8):
        listener.gate.release()
    return link


def test_a_demand_waits_for_one_piece_of_a_prefetch_and_the_link_s_thread_for_no_other(
    pool: SlotPool, standing: StandingClock
) -> None:
    listener = Listener()
    link = link_of_pieces(standing, listener)
    assert link.piece_s == pytest.approx(PIECE_S)
    link.copy(copy(pool, 0, demand=False))
    assert standing.nap_s() == pytest.approx(PIECES * PIECE_S), "it sleeps until all pieces are there"
    standing.now += 3.5 * PIECE_S
    link.copy(copy(pool, 1))
    assert standing.nap_s() == pytest.approx(10.5 * PIECE_S)
    standing.go_on(10.5 * PIECE_S)
    assert standing.nap_s() == pytest.approx(6 * PIECE_S, rel=1e-3), "four pieces have arrived before"
    assert listener.order == [1]
    standing.go_on(6 * PIECE_S)
    wait_until(link.idle)
    wait_until(lambda: listener.order == [1, 0])
    assert link.stats.seconds == pytest.approx(PIECES * PIECE_S), "what it waited for others is not its own time"
    link.close()


def test_a_prefetch_under_way_that_is_demanded_is_not_overtaken(pool: SlotPool, standing: StandingClock) -> None:
    link = link_of_pieces(standing, Listener())
    link.copy(copy(pool, 0, demand=False))
    standing.nap_s()
    standing.now += 3.5 * PIECE_S
    pool.demanded[0] = True
    link.copy(copy(pool, 1))
    assert standing.nap_s() == pytest.approx(6.5 * PIECE_S)
    link.close()


@pytest.mark.parametrize("demanded", [False, True])
def test_a_prefetch_is_withdrawn_unless_somebody_needs_it_by_now(
    demanded: bool, pool: SlotPool, standing: StandingClock
) -> None:
    class Regretful(Listener):
        def on_woken(self, link: TierLink) -> None:
            link.withdraw(prefetch)
            super().on_woken(link)

        def on_released(self, load: SlotTransfer) -> None:
            released.append(load)

    released: list[SlotTransfer] = []
    prefetch, listener = copy(pool, 0, demand=False), Regretful()
    link = link_of_pieces(standing, listener)
    link.copy(prefetch)
    standing.nap_s()
    pool.demanded[0] = demanded
    standing.now += 3.5 * PIECE_S
    link.wake()
    assert listener.ended.acquire(timeout=60)
    assert link.idle() != demanded
    assert released == ([] if demanded else [prefetch])
    link.copy(copy(pool, 1))
    assert standing.nap_s() == pytest.approx((6.5 if demanded else 10.5) * PIECE_S)
    link.close()
    assert listener.failures == ([0, 1] if demanded else [1])


def test_a_roused_link_calls_back_on_its_own_thread(pool: SlotPool) -> None:
    listener = Listener()
    link = EmulatedLink(HostSlab(SlabLayout.even(8, STRIDE)), HostSlab(SlabLayout.even(8, STRIDE)), 1e6)
    link.attach(listener)
    link.wake()
    assert listener.ended.acquire(timeout=60)
    link.close()


def test_closing_fails_queued_copies(pool: SlotPool) -> None:
    clock, listener = Clock(), Listener()
    link = EmulatedLink(
        HostSlab(SlabLayout.even(8, STRIDE)), HostSlab(SlabLayout.even(8, STRIDE)), 1e6, clock=clock, wait=clock.wait
    )
    link.attach(listener)
    link.copy(copy(pool, 0))
    assert listener.ended.acquire(timeout=60)
    link.copy(copy(pool, 1))
    closer = threading.Thread(target=link.close)
    closer.start()
    wait_until(lambda: link.closed)
    listener.gate.release()
    closer.join(60)
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
