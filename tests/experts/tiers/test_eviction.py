"""Experts that a tier may evict, and experts that it must keep."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np
import pytest
from support.waiting import wait_until
from test_residency import Desk, E, L, Ranks, prefetch_request

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import Tier


def homes(*experts: tuple[int, int]) -> BoolArray:
    marked = np.zeros((L, E), np.bool_)
    marked[tuple(zip(*experts, strict=True))] = True
    return marked


@pytest.mark.parametrize("devices", [(), (2,)], ids=["ram", "device"])
def test_a_home_stays_despite_demands_and_prefetches(devices: tuple[int, ...]) -> None:
    policy = Ranks()
    desk = Desk(4, *devices, policy=policy)
    desk.use(0, 0, 1)
    policy.ranks[1:] = 1.0  # homes rank lowest
    desk.residency.homes.set_homes(homes((0, 0), (0, 1)))
    for layer in (1, 2):
        for expert in range(E):
            desk.use(layer, expert)
    for expert in range(E):
        load = desk.residency.reserve(prefetch_request(2, expert, score=1e9), PrefetchPriority.FAR)
        desk.start([load] if load else [])
        desk.finish()
    assert (desk.residency.ram.where[0, :2] >= 0).all()
    assert desk.residency.homes.missing() == []
    desk.residency.check_integrity(idle=True)


def test_a_home_that_was_listed_to_go_stays_when_homes_change_between_two_prefetches() -> None:
    policy = Ranks()
    desk = Desk(4, policy=policy)
    desk.use(0, 0, 1, 2, 3)
    policy.ranks[0] = [0, 1, 2, 3, 0, 0]
    assert desk.residency.reserve(prefetch_request(1, 0, score=9.0), PrefetchPriority.FAR) is not None
    desk.residency.homes.set_homes(homes((0, 1)))
    assert desk.residency.reserve(prefetch_request(1, 1, score=9.0), PrefetchPriority.FAR) is not None
    assert desk.residency.tiers_of(0, np.array([1])) == Tier.RAM
    assert desk.residency.tiers_of(0, np.array([2])) == Tier.NVME


def test_homes_leave_room_for_passing_experts() -> None:
    desk = Desk(6)
    assert desk.residency.homes.capacities == (4,)
    desk.residency.homes.set_homes(homes(*((0, expert) for expert in range(4))))
    with pytest.raises(CapacityError, match="gives this box 5 home experts, RAM has room for 4"):
        desk.residency.homes.set_homes(homes(*((0, expert) for expert in range(5))))


def test_experts_of_the_running_layer_step_stay_until_they_are_computed() -> None:
    policy = Ranks()
    desk = Desk(3, 1, policy=policy, containment=False)
    desk.use(0, 1)
    desk.use(0, 0)
    desk.use(2, 5)
    assert (desk.residency.ram.where >= 0).sum() == 3
    policy.ranks[2] = 10.0
    desk.residency.begin_layer(0, np.array([0, 1]))
    claim = desk.acquire(0, 0, 1)
    assert sorted(claim.slots >= 0) == [False, True], "the device has one slot: the other waits for its turn in RAM"
    assert desk.residency.reserve(prefetch_request(1, 0, score=5.0), PrefetchPriority.NEAR) is None
    assert (desk.residency.ram.where[0, :2] >= 0).all()
    desk.finish()
    desk.residency.mark_computed(0, np.array([0, 1]))
    desk.residency.release(0, claim.slots[claim.slots >= 0])
    desk.residency.begin_layer(1, np.array([0]))
    assert desk.residency.reserve(prefetch_request(1, 0, score=5.0), PrefetchPriority.NEAR) is not None, "now it may go"


def test_waiters_for_room_wake_up_when_slots_are_freed() -> None:
    desk = Desk(2)
    desk.use(0, 0, 1)
    held = desk.acquire(0, 0, 1)
    without = desk.residency.acquire(0, 1, np.array([3]), SimpleQueue())
    assert (without.slots < 0).all()
    woken: list[bool] = []

    def wait() -> None:
        woken.append(desk.residency.wait_for_change(without.version, 20.0))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_until(lambda: desk.residency._waiters.count == 1)
    desk.residency.release(0, held.slots)
    waiting.join(60)
    assert woken == [True]
    assert (desk.acquire(1, 3).slots >= 0).all()


def test_a_prefetch_never_replaces_an_expert_of_equal_value() -> None:
    policy = Ranks()
    desk = Desk(2, policy=policy)
    desk.use(0, 0, 1)
    policy.ranks[0] = 2.0
    assert desk.residency.reserve(prefetch_request(1, 0, score=2.0), PrefetchPriority.FAR) is None
    assert desk.residency.reserve(prefetch_request(1, 0, score=2.1), PrefetchPriority.FAR) is not None


def test_a_demand_that_finds_no_slot_on_the_device_pins_nothing_in_ram() -> None:
    desk = Desk(4, 1)
    desk.use(0, 0)
    desk.use(0, 1)
    held = desk.acquire(0, 1)
    assert (desk.acquire(0, 0).slots < 0).all()
    desk.residency.release(0, held.slots)
    desk.residency.check_integrity(idle=True)


def test_a_read_that_was_prefetched_and_is_demanded_meanwhile_counts_as_demanded() -> None:
    desk = Desk(4, 2)
    load = desk.residency.reserve(prefetch_request(0, 1), PrefetchPriority.FAR)
    assert load is not None
    desk.start([load])
    claim = desk.acquire(0, 1)
    assert load.demand
    desk.finish()
    assert desk.residency.ram.usage.moved == 1
    assert desk.residency.ram.usage.prefetched == 0
    desk.residency.release(0, claim.slots)
    desk.residency.check_integrity(idle=True)


def test_experts_ranked_nan_go_first() -> None:
    policy = Ranks()
    desk = Desk(4, policy=policy)
    desk.use(0, 0, 1, 2, 3)
    policy.ranks[0] = [-5, np.nan, -6, np.nan, 0, 0]
    desk.use(1, 0, 1)
    assert desk.on_top() == {(0, 0), (0, 2), (1, 0), (1, 1)}
