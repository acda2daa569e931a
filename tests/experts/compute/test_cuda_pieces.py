"""Experts go to a GPU in pieces: a demand overtakes a prefetch, and nothing counts as arrived before its last piece."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.fake_gpu import FakeGpu, FakeSlab
from support.waiting import wait_until

from edgemoe.experts.compute import cuda_link
from edgemoe.experts.compute.cuda_link import AHEAD, CudaLink, Order
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import SlotPool, Transfer
from edgemoe.policy.baselines import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.size_classes import SlabLayout

STRIDE, SLOTS, PIECES = 4096, 3, 6
WORK = 4  # that a piece is in its stream: its start, two halves, its end


class Desk:
    """A link to a fake GPU whose streams go on when told, and whoever is told how copies end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu(0)
        self.gpu.install(monkeypatch)
        monkeypatch.setattr(cuda_link, "pieces_of", lambda _: PIECES)
        self.ram = HostSlab(SlabLayout.even(SLOTS, STRIDE))
        self.ram.slots()[:] = np.arange(1, SLOTS + 1)[:, None]
        self.ram.pinned = True  # there is nothing to register with
        self.slab = FakeSlab(self.gpu, SLOTS, STRIDE)
        slab: Any = self.slab
        self.link = CudaLink(self.ram, slab, self.ram.layout, Order(SLOTS))
        self.prefetches: Any
        self.demands: Any
        self.prefetches, self.demands = self.link._streams
        self.pool = SlotPool(Tier.VRAM, 1, SLOTS, SLOTS, LRU(1, SLOTS))
        self.arrivals: list[int] = []
        self.releases: list[int] = []
        self.failures: list[int] = []
        self.rousings = 0
        self.link.attach(self)

    def copy(self, slot: int, *, demand: bool, near: bool = False) -> Transfer:
        self.pool.demanded[slot] = demand
        load = Transfer(self.pool, 0, slot, slot, slot, near=near)
        self.link.copy(load)
        return load

    def queued(self, stream: Any) -> int:
        """Returns the pieces that are in flight on a stream."""
        return len(stream.work) // WORK

    def go(self, stream: Any) -> None:
        self.gpu.go(stream)

    def go_until(self, condition: Any) -> None:
        """Lets the prefetches' stream go on, piece by piece."""
        wait_until(condition, meanwhile=lambda: self.go(self.prefetches))

    def arrived(self, load: Transfer) -> None:
        self.arrivals.append(load.slot)

    def released(self, load: Transfer) -> None:
        self.releases.append(load.slot)

    def failed(self, load: Transfer, error: Exception) -> None:
        self.failures.append(load.slot)

    def withdraws(self, load: Transfer) -> bool:
        return not load.demand

    def roused(self, link: object) -> None:
        self.rousings += 1


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    yield desk
    wait_until(desk.link.idle, meanwhile=desk.gpu.drain)
    desk.ram.pinned = False
    desk.link.close()


def test_two_pieces_of_a_prefetch_are_in_flight_until_the_last_is_issued(desk: Desk) -> None:
    desk.copy(0, demand=False)
    for _ in range(PIECES // AHEAD - 1):
        assert desk.queued(desk.prefetches) == AHEAD
        assert desk.arrivals == []
        desk.go(desk.prefetches)
        wait_until(lambda: desk.queued(desk.prefetches) == AHEAD)
    wait_until(lambda: desk.arrivals == [0])
    assert desk.releases == [], "the last pieces are in flight"
    desk.go_until(lambda: desk.releases == [0])
    assert (desk.slab.memory[0] == 1).all()
    assert desk.link.stats.seconds == pytest.approx(PIECES * 2e-3)
    assert desk.link.piece_s == pytest.approx(2e-3)


def test_a_demand_is_issued_at_once_and_prefetches_go_on_when_it_has_ended(desk: Desk) -> None:
    desk.copy(0, demand=False)
    desk.link.rouse()  # answered when the pieces before it have ended
    desk.copy(1, demand=True)
    assert desk.arrivals == [1]
    assert desk.queued(desk.demands) == 1, "whole"
    desk.go(desk.prefetches)
    wait_until(lambda: desk.rousings)
    desk.copy(2, demand=True)
    assert not desk.prefetches.work, "nothing of the prefetch while demands are in flight"
    desk.go(desk.demands)
    wait_until(lambda: desk.releases == [1, 2])
    wait_until(lambda: desk.queued(desk.prefetches) == AHEAD)
    assert desk.arrivals == [1, 2]
    desk.go_until(lambda: desk.releases == [1, 2, 0])
    assert (desk.slab.memory[0] == 1).all(), "what had arrived stayed"


def test_a_prefetch_for_the_next_layers_overtakes_one_for_later_behind_two_pieces(desk: Desk) -> None:
    desk.copy(0, demand=False)
    desk.copy(1, demand=False, near=True)
    assert desk.queued(desk.prefetches) == AHEAD, "no more than before"
    desk.go_until(lambda: desk.arrivals == [1])
    assert desk.queued(desk.prefetches) <= AHEAD
    desk.go_until(lambda: desk.releases == [1, 0])
    assert (desk.slab.memory[0] == 1).all(), "what had arrived stayed"
    assert (desk.slab.memory[1] == 2).all()


def test_a_prefetch_in_flight_that_is_demanded_is_issued_to_its_end(desk: Desk) -> None:
    desk.copy(0, demand=False)
    desk.pool.demanded[0] = True
    desk.copy(1, demand=True)
    assert desk.arrivals == [0, 1]
    assert desk.queued(desk.prefetches) == AHEAD + 1, "two pieces and the rest"
    desk.go(desk.prefetches)
    assert (desk.slab.memory[0] == 1).all()
    desk.go(desk.demands)
    wait_until(desk.link.idle)


def test_a_withdrawn_prefetch_ends_with_the_pieces_in_flight(desk: Desk) -> None:
    desk.link.withdraw(desk.copy(0, demand=False))
    assert desk.releases == [], "they still read from their source"
    desk.go(desk.prefetches)
    wait_until(lambda: desk.releases == [0])
    assert desk.arrivals == []
    assert not desk.slab.memory[0, STRIDE // PIECES * AHEAD + AHEAD :].any()


def test_the_next_copy_into_its_slot_waits_for_pieces_of_a_withdrawn_prefetch(desk: Desk) -> None:
    desk.link.withdraw(desk.copy(0, demand=False))
    desk.pool.demanded[0] = True
    desk.link.copy(Transfer(desk.pool, 0, 1, 0, 1))
    desk.go(desk.demands)
    assert not desk.slab.memory[0].any()
    desk.go(desk.prefetches)
    desk.go(desk.demands)
    assert (desk.slab.memory[0] == 2).all()


def test_closing_fails_what_has_not_arrived(desk: Desk) -> None:
    desk.copy(1, demand=True)
    desk.copy(0, demand=False)
    desk.ram.pinned = False
    closer = threading.Thread(target=desk.link.close)
    closer.start()
    wait_until(lambda: desk.failures == [0])
    desk.go(desk.demands)
    closer.join(10)
    assert desk.releases == [1]
    desk.copy(2, demand=True)
    assert desk.failures == [0, 2]
