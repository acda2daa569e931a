"""Residency keeps count of capacity, containment, pins, and the order of eviction."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import ALWAYS
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotClaim, SlotPool, SlotTransfer
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import CachePolicy, ExpertId, Move, Tier

L, E = 3, 6


class Ranks:
    """A policy with ranks that the test sets."""

    def __init__(self) -> None:
        self.ranks: FloatArray = np.zeros((L, E), np.float32)
        self.touched: list[tuple[int, list[int]]] = []

    def touch(self, layer: int, experts: IntArray) -> None:
        self.touched.append((layer, experts.tolist()))

    def rank(self, layer: int) -> FloatArray:
        return self.ranks


class Desk:
    """A residency driven by hand; the test ends its loads."""

    def __init__(self, ram: int, *devices: int, policy: CachePolicy | None = None, containment: bool = True) -> None:
        self.policy = policy or LRU(L, E)
        pools = [SlotPool(Tier.VRAM, L, E, slots, self.policy) for slots in devices]
        self.residency = Residency(SlotPool(Tier.RAM, L, E, ram, self.policy), pools, containment=containment)
        self.arrivals: SimpleQueue[SlotTransfer] = SimpleQueue()
        self.reading: list[SlotTransfer] = []
        self.copying: list[SlotTransfer] = []

    def start(self, loads: object) -> None:
        for load in loads:  # type: ignore[attr-defined]
            (self.copying if load.source >= 0 else self.reading).append(load)

    def acquire(self, layer: int, *experts: int, prefill_only: bool = False, device: int = 0) -> SlotClaim:
        ids = np.array(experts)
        claim = self.residency.acquire(device, layer, ids, self.arrivals, prefill_only=np.full(len(ids), prefill_only))
        self.start(claim.loads)
        return claim

    def finish(self) -> None:
        """Lets all loads arrive."""
        while self.reading or self.copying:
            while self.reading:
                self.start(self.residency.complete_load(self.reading.pop()))
            while self.copying:
                load = self.copying.pop()
                self.residency.complete_load(load)
                self.residency.unpin(load.source)

    def use(self, layer: int, *experts: int, prefill_only: bool = False) -> None:
        """Runs a whole layer-step, with room for its experts."""
        self.residency.begin_layer(layer, np.array(() if prefill_only else experts, np.int64))
        claim = self.acquire(layer, *experts, prefill_only=prefill_only)
        assert (claim.slots >= 0).all()
        self.finish()
        self.residency.mark_computed(layer, np.array(experts))
        self.residency.release(0, claim.slots)

    def on_top(self) -> set[tuple[int, int]]:
        return {(int(layer), int(e)) for layer, e in np.argwhere(self.residency.tops[0].where >= 0)}


def prefetch_request(layer: int, expert: int, score: float = ALWAYS, target: Tier = Tier.RAM) -> Move:
    return Move(ExpertId(layer, expert), Tier.NVME if target is Tier.RAM else Tier.RAM, target, score)


def test_hits_are_pinned_and_never_evicted() -> None:
    desk = Desk(2)
    desk.use(0, 0, 1)
    claim = desk.acquire(0, 0)
    more = desk.acquire(0, 2, 3)
    assert sorted(more.slots >= 0) == [False, True], "one slot is pinned, so there is room for one of two"
    assert (0, 0) in desk.on_top()
    assert claim.ready.all()
    desk.finish()
    desk.residency.release(0, claim.slots)
    desk.residency.release(0, more.slots[more.slots >= 0])
    desk.residency.check_integrity(idle=True)


def test_the_lowest_ranked_goes_first() -> None:
    policy = Ranks()
    desk = Desk(3, policy=policy)
    desk.use(0, 0, 1, 2)
    policy.ranks[0] = [5, 1, 3, 0, 0, 0]
    desk.use(0, 3)
    assert desk.on_top() == {(0, 0), (0, 2), (0, 3)}


def test_policies_see_each_layer_step_once_and_only_demands_of_decode() -> None:
    policy = Ranks()
    desk = Desk(6, 4, policy=policy)
    assert desk.residency.pin_if_all_resident(0, 1, np.array([2, 3]), np.array([False, True])) is None
    desk.residency.begin_layer(2, np.array([], np.int64))
    assert policy.touched == [(1, [2])]


def test_prefill_spares_experts_of_decode() -> None:
    desk = Desk(4)
    desk.use(0, 0, 1, 2)
    for expert in range(E):
        desk.use(1, expert, prefill_only=True)
    assert {(0, 0), (0, 1), (0, 2)} <= desk.on_top()


def test_prefill_s_experts_are_reused_in_the_next_round() -> None:
    desk = Desk(L * 2)
    for layer in range(L):  # three slots a layer would be needed, two exist
        for expert in range(3):
            desk.use(layer, expert, prefill_only=True)
    assert {layer for layer, _ in desk.on_top()} >= {0, 1}, "what the next round needs first is kept"


def test_decode_adopts_prefill_s_experts() -> None:
    desk = Desk(2)
    desk.use(0, 0, prefill_only=True)
    desk.use(0, 0)
    desk.use(0, 1, prefill_only=True)
    desk.use(0, 2, prefill_only=True)
    assert (0, 0) in desk.on_top()


def test_dropping_from_ram_drops_from_the_device() -> None:
    policy = Ranks()
    desk = Desk(2, 2, policy=policy)
    desk.use(0, 0, 1)
    policy.ranks[0, 1] = 1
    desk.use(0, 2)
    assert desk.on_top() == {(0, 1), (0, 2)}
    desk.residency.check_integrity(idle=True)


def test_without_containment_a_copy_in_the_device_outlives_its_source() -> None:
    desk = Desk(1, 3, containment=False)
    desk.use(0, 0)
    desk.use(0, 1)
    assert desk.on_top() == {(0, 0), (0, 1)}
    assert (desk.residency.ram.where >= 0).sum() == 1


def test_a_pin_in_the_device_protects_the_source_in_ram() -> None:
    desk = Desk(2, 2)
    desk.use(0, 0, 1)
    claim = desk.acquire(0, 0, 1)
    assert (desk.acquire(0, 2).slots < 0).all()
    desk.residency.release(0, claim.slots)
    assert (desk.acquire(0, 2).slots >= 0).all()


def test_a_prefetch_never_replaces_an_expert_of_higher_rank() -> None:
    policy = Ranks()
    desk = Desk(2, policy=policy)
    desk.use(0, 0, 1)
    policy.ranks[0] = 3.0
    assert desk.residency.reserve(prefetch_request(0, 2, score=2.0), PrefetchPriority.FAR) is None
    assert desk.residency.reserve(prefetch_request(0, 2, score=4.0), PrefetchPriority.PREFILL_ONLY) is None
    assert desk.residency.reserve(prefetch_request(0, 2, score=4.0), PrefetchPriority.FILL) is None
    load = desk.residency.reserve(prefetch_request(0, 2, score=4.0), PrefetchPriority.FAR)
    assert load is not None
    assert not load.demand


def test_a_prefetch_without_a_score_has_its_expert_s_rank_at_its_start() -> None:
    policy = Ranks()
    desk = Desk(2, policy=policy)
    first = desk.residency.reserve(prefetch_request(0, 0, score=np.nan), PrefetchPriority.FAR)
    assert first is not None, "there is room"
    desk.start([first])
    desk.finish()
    desk.use(0, 1)
    policy.ranks[0], policy.ranks[1, 2] = 3.0, 2.0
    wish = prefetch_request(1, 2, score=np.nan)
    assert desk.residency.reserve(wish, PrefetchPriority.FAR) is None
    policy.ranks[1, 2] = 4.0
    assert desk.residency.reserve(wish, PrefetchPriority.FAR) is not None


def test_prefetches_that_are_demanded_on_their_way_are_counted_and_those_given_up() -> None:
    desk = Desk(4, 2)
    desk.use(0, 0, 1)
    desk.use(1, 0, 1)
    loads = [
        desk.residency.reserve(prefetch_request(0, expert, target=Tier.VRAM), PrefetchPriority.NEAR)
        for expert in (0, 1)
    ]
    promoted, withdrawn = loads
    assert promoted is not None
    assert withdrawn is not None
    for _ in range(2):  # pinned by us and by a peer
        desk.acquire(0, 0)
    assert desk.residency.withdraw_load(withdrawn)
    assert not desk.residency.withdraw_load(promoted)
    usage = desk.residency.usage(Tier.VRAM)
    assert (usage.promoted, usage.withdrawn, usage.prefetched) == (1, 1, 0)


def with_a_prefetched_expert(policy: Ranks) -> Desk:
    """Fills two slots: expert 2 of layer 1, prefetched with a utility of 4, and an expert with a utility of 1."""
    desk = Desk(2, policy=policy)
    desk.use(0, 0, 1)
    load = desk.residency.reserve(prefetch_request(1, 2, score=4.0), PrefetchPriority.NEAR)
    assert load is not None
    desk.start([load])
    desk.finish()
    policy.ranks[0] = 1.0
    return desk


def test_a_prefetched_expert_keeps_its_worth_until_its_layer_has_run() -> None:
    policy = Ranks()
    desk = with_a_prefetched_expert(policy)
    assert desk.residency.reserve(prefetch_request(1, 3, score=2.0), PrefetchPriority.NEAR) is not None
    assert (1, 2) in desk.on_top()
    desk.residency.begin_layer(1, np.array([5]))
    assert desk.residency.reserve(prefetch_request(2, 0, score=0.5), PrefetchPriority.NEAR) is not None, (
        "its time is over"
    )
    assert (1, 2) not in desk.on_top()
    assert desk.residency.ram.usage.wasted == 1


def test_our_prefetched_expert_outlasts_a_peers_use_of_it_and_of_its_layer() -> None:
    policy = Ranks()
    desk = with_a_prefetched_expert(policy)
    policy.touched.clear()
    peers = desk.residency.for_peers()
    slots = peers.pin_if_all_resident(0, 1, np.array([2]), None)
    assert slots is not None
    peers.release(0, slots)
    assert desk.residency.reserve(prefetch_request(2, 3, score=2.0), PrefetchPriority.NEAR) is not None
    assert (1, 2) in desk.on_top()
    assert policy.touched == []


def test_prefetches_of_one_layer_step_spare_experts_pinned_between_them() -> None:
    policy = Ranks()
    desk = Desk(4, 2, policy=policy)
    desk.use(0, 0, 1)
    desk.use(1, 0, 1)
    policy.ranks[0], policy.ranks[1] = 2.0, 3.0
    policy.ranks[0, 0], policy.ranks[1, 0] = 0.0, 1.0
    assert desk.residency.reserve(prefetch_request(2, 0, score=5.0), PrefetchPriority.FAR) is not None
    claim = desk.acquire(1, 0)
    assert claim.ready.all()
    assert desk.residency.reserve(prefetch_request(2, 1, score=5.0), PrefetchPriority.FAR) is not None
    assert (1, 0) in desk.on_top()
    assert desk.residency.ram.where[0].max() < 0


def test_a_prefetch_of_a_present_or_loading_expert_is_refused() -> None:
    desk = Desk(4, 2)
    desk.use(0, 0)
    assert desk.residency.reserve(prefetch_request(0, 0), PrefetchPriority.FAR) is None
    assert desk.residency.reserve(prefetch_request(0, 1), PrefetchPriority.FAR) is not None
    assert desk.residency.reserve(prefetch_request(0, 1), PrefetchPriority.FAR) is None
    assert desk.residency.reserve(prefetch_request(0, 2, target=Tier.VRAM), PrefetchPriority.FAR) is None, (
        "its source is not in RAM"
    )


def test_a_demand_joins_a_prefetch_under_way() -> None:
    desk = Desk(4, 2)
    load = desk.residency.reserve(prefetch_request(0, 1), PrefetchPriority.FAR)
    assert load is not None
    desk.start([load])
    claim = desk.acquire(0, 1)
    assert list(claim.loads) == [], "nothing is read twice"
    desk.finish()
    assert desk.arrivals.get_nowait().expert == 1
    desk.residency.release(0, claim.slots)
    desk.residency.check_integrity(idle=True)


def test_a_failed_load_frees_its_slot_when_nobody_pins_it() -> None:
    desk = Desk(1, 1)
    claim = desk.acquire(0, 1)
    error = OSError("the disk is gone")
    desk.residency.fail_load(desk.reading.pop(), error)
    assert desk.arrivals.get_nowait().error is error
    assert (desk.acquire(0, 2).slots < 0).all(), "the slot is still pinned"
    desk.residency.release(0, claim.slots)
    desk.residency.check_integrity(idle=True)
    assert (desk.acquire(0, 2).slots >= 0).all()


def test_experts_are_dealt_to_devices_by_their_slots() -> None:
    policy = LRU(48, 128)
    pools = [SlotPool(Tier.VRAM, 48, 128, slots, policy) for slots in (100, 300)]
    residency = Residency(SlotPool(Tier.RAM, 48, 128, 500, policy), pools)
    share = (residency.device_of == 1).mean(axis=1)
    assert share.min() > 0.70
    assert share.max() < 0.80


def test_an_expert_is_given_to_another_device_where_nobody_is_in_its_way() -> None:
    desk = Desk(6, 3, 3)
    residency, give = desk.residency, desk.residency.device_assignment.move_expert
    first = int(residency.device_of[0, 1])
    other, its = 1 - first, residency.devices[first]
    claim = desk.acquire(0, 1, device=first)
    assert give(0, 1, other) == 0, "on its way"
    desk.finish()
    assert give(0, 1, other) == 0, "pinned"
    residency.release(first, claim.slots)
    for device_assignment in (residency.device_assignment, residency.for_peers().device_assignment):
        device_assignment.hold_layer(0)
        assert give(0, 1, other) == 0, "a layer-step of the layer runs"
        device_assignment.hold_layer(1)
        device_assignment.release_layer()
    assert its.where[0, 1] >= 0
    assert give(0, 1, other) == 2
    assert (residency.device_of[0, 1], its.where[0, 1], residency.ram.where[0, 1] >= 0) == (other, -1, True)
    assert give(0, 1, first) == 1, "no device has it"
    give(0, 1, other)
    wish = prefetch_request(0, 1, target=Tier.VRAM)
    assert residency.reserve(wish, PrefetchPriority.USED, first) is None, "it is another's now"
    load = residency.reserve(wish, PrefetchPriority.USED, other)
    assert load is not None
    assert load.pool is residency.devices[other]
    desk.start([load])
    desk.finish()
    residency.check_integrity(idle=True)


def test_the_only_copy_in_memory_is_not_given_away() -> None:
    desk = Desk(1, 3, 3, containment=False)
    first = int(desk.residency.device_of[0, 1])
    residency = desk.residency
    claim = desk.acquire(0, 1, device=first)
    desk.finish()
    residency.release(first, claim.slots)
    residency.begin_layer(1, np.array([0]))
    read(desk, PrefetchPriority.HOME, ALWAYS, (2, 2))
    assert residency.ram.where[0, 1] < 0
    assert residency.device_assignment.move_expert(0, 1, 1 - first) == 0
    assert residency.devices[first].where[0, 1] >= 0


@st.composite
def workplaces(draw: st.DrawFn) -> Desk:
    devices = draw(st.lists(st.integers(1, 8), max_size=2))
    return Desk(draw(st.integers(1, 12)), *devices, containment=draw(st.booleans()))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "prefill", "release", "arrive", "fail", "prefetch", "fill", "begin", "give"]),
        st.integers(0, L - 1),
        st.lists(st.integers(0, E - 1), min_size=1, max_size=E, unique=True),
        st.floats(-50, 50),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(workplaces(), OPERATIONS)
def test_any_sequence_of_operations_keeps_count(
    desk: Desk, operations: list[tuple[str, int, list[int], float]]
) -> None:
    residency = desk.residency
    claims: list[tuple[int, IntArray]] = []
    for name, layer, experts, score in operations:
        if name == "begin":
            residency.begin_layer(layer, np.array(experts))
        elif name in ("acquire", "prefill"):
            for device in range(len(residency.tops)):
                mine = [e for e in experts if residency.device_of[layer, e] == device]
                if mine:
                    claim = desk.acquire(layer, *mine, prefill_only=name == "prefill", device=device)
                    claims.append((device, claim.slots[claim.slots >= 0]))
        elif name == "give" and residency.devices:
            residency.device_assignment.move_expert(layer, experts[0], experts[-1] % len(residency.devices))
        elif name == "release" and claims:
            residency.release(*claims.pop(experts[0] % len(claims)))
        elif name in ("prefetch", "fill"):
            target = Tier.VRAM if residency.devices and experts[0] % 2 else Tier.RAM
            priority = (
                PrefetchPriority.FILL
                if name == "fill"
                else [PrefetchPriority.NEAR, PrefetchPriority.FAR, PrefetchPriority.PREFILL_ONLY][experts[-1] % 3]
            )
            load = residency.reserve(prefetch_request(layer, experts[0], score, target), priority)
            desk.start([load] if load else [])
        elif name == "arrive" and desk.reading:
            desk.start(residency.complete_load(desk.reading.pop(0)))
        elif name == "arrive" and desk.copying:
            load = desk.copying.pop(0)
            residency.complete_load(load)
            residency.unpin(load.source)
        elif name == "fail" and desk.copying:
            load = desk.copying.pop(0)
            residency.fail_load(load, OSError())
            residency.unpin(load.source)
        elif name == "fail" and desk.reading:
            residency.fail_load(desk.reading.pop(0), OSError())
        residency.check_integrity()
    desk.finish()
    for device, slots in claims:
        residency.release(device, slots)
    residency.check_integrity(idle=True)


def bits(*experts: tuple[int, int]) -> BoolArray:
    found = np.zeros((L, E), np.bool_)
    for expert in experts:
        found[expert] = True
    return found


def read(desk: Desk, priority: PrefetchPriority, score: float, *experts: tuple[int, int]) -> None:
    """Reads the experts into RAM, if a slot has one worth less."""
    for layer, expert in experts:
        load = desk.residency.reserve(prefetch_request(layer, expert, score), priority)
        desk.start([load] if load is not None else [])
        desk.finish()


def test_a_former_home_is_the_last_to_go_until_it_is_forgotten() -> None:
    """Its new home, another box, may not have it yet."""
    desk = Desk(8)
    residency = desk.residency
    residency.homes.set_homes(bits((0, 0), (0, 1)))
    read(desk, PrefetchPriority.HOME, ALWAYS, (0, 0), (0, 1))
    residency.homes.set_homes(bits((1, 0), (1, 1)))
    read(desk, PrefetchPriority.FAR, 5.0, *((2, expert) for expert in range(E)))
    read(desk, PrefetchPriority.FAR, 6.0, *((0, expert) for expert in range(2, E)))
    read(desk, PrefetchPriority.HOME, ALWAYS, (1, 0), (1, 1))
    assert residency.ram.where[0, :2].min() >= 0
    assert residency.ram.where[1, :2].min() >= 0
    residency.homes.forget_former()
    read(desk, PrefetchPriority.FAR, 7.0, *((2, expert) for expert in range(E)))
    assert residency.ram.where[0, :2].max() < 0
    assert residency.ram.where[1, :2].min() >= 0


def test_a_home_takes_the_place_of_a_former_one_where_nothing_else_can_go() -> None:
    desk = Desk(4)
    desk.residency.homes.set_homes(bits((0, 0), (0, 1)))
    read(desk, PrefetchPriority.HOME, ALWAYS, (0, 0), (0, 1))
    desk.residency.homes.set_homes(bits((1, 0), (1, 1)))
    read(desk, PrefetchPriority.HOME, ALWAYS, (1, 0), (1, 1))
    desk.residency.homes.set_homes(bits((2, 0), (2, 1)))
    read(desk, PrefetchPriority.HOME, ALWAYS, (2, 0), (2, 1))
    assert desk.residency.ram.where[2, :2].min() >= 0


def test_only_homes_that_are_here_count_as_held_for_others() -> None:
    desk = Desk(6)
    residency = desk.residency
    read(desk, PrefetchPriority.FAR, 5.0, (0, 0), (0, 1))
    assert not residency.homes.in_ram().any()
    residency.homes.set_homes(bits((0, 1), (0, 2)))
    assert np.argwhere(residency.homes.in_ram()).tolist() == [[0, 1]]


def test_a_prefetch_is_withdrawn_unless_it_is_demanded_meanwhile() -> None:
    desk, again = Desk(6, 2), Move(ExpertId(0, 0), Tier.RAM, Tier.VRAM, ALWAYS)
    desk.use(0, 0, 1)
    desk.use(1, 0, 1)
    load = desk.residency.reserve(again, PrefetchPriority.NEAR)
    assert load is not None
    assert desk.residency.withdraw_load(load)
    desk.residency.unpin(load.source)
    desk.residency.check_integrity(idle=True)
    load = desk.residency.reserve(again, PrefetchPriority.NEAR)
    assert load is not None
    desk.start([load])
    claim = desk.acquire(0, 0)
    assert not desk.residency.withdraw_load(load)
    desk.finish()
    assert (0, 0) in desk.on_top()
    desk.residency.release(0, claim.slots)
    desk.residency.check_integrity(idle=True)
