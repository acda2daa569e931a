"""Each named policy evicts as its name says, and misses as a cache of a few lines does."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import pytest
from support.replay_kit import events_of, random_trace

from edgemoe.policy.cache_ranks import LRU
from edgemoe.replay.box import BoxSpec
from edgemoe.replay.named_policies import (
    LFRU,
    LFU,
    NAMED,
    PROFILE_TOKENS,
    PROTECTED,
    RING,
    CalibratedRing,
    LayerLFU,
    LeastStale,
)
from edgemoe.replay.replay_policies import MAKERS
from edgemoe.replay.run import replay
from edgemoe.replay.scoreboard import count_misses
from edgemoe.replay.trace import Trace
from edgemoe.types.arrays import BoolArray

MACHINE = BoxSpec(1e-3, 1 << 20, 8e9, 3e9, 1.0, False)
SLOTS = 9
Key = tuple[int, int]


def touch(policy: LRU, *steps: tuple[int, list[int]]) -> None:
    for layer, experts in steps:
        policy.touch(layer, np.array(experts))


def test_lfu_ranks_by_count_and_then_by_last_use() -> None:
    policy = LFU(1, 4)
    touch(policy, (0, [0, 1]), (0, [0]), (0, [2]))
    rank = policy.rank(0)[0]
    assert rank[0] > rank[2] > rank[1] > rank[3]


def test_lfru_ranks_by_frequency_over_age() -> None:
    policy = LFRU(1, 3)
    touch(policy, *[(0, [0])] * 4, (0, [1]), (0, [2]))
    assert policy.rank(0)[0].tolist() == pytest.approx([4 / 3, 1 / 2, 1.0])


def naive_fifo(events: list[tuple[int, list[int]]], *, second_chance: bool) -> int:
    queue: deque[Key] = deque()
    used: set[Key] = set()
    misses = 0
    for layer, experts in events:
        needed = [(layer, e) for e in experts]
        new = [key for key in needed if key not in queue]
        used |= {key for key in needed if key in queue}
        misses += len(new)
        for came in new:
            skipped: list[Key] = []
            while len(queue) + len(skipped) >= SLOTS and queue:
                key = queue.popleft()
                if key in needed:
                    skipped.append(key)
                elif second_chance and key in used:
                    used.discard(key)
                    queue.append(key)
                else:
                    break
            queue.extendleft(reversed(skipped))
            queue.append(came)
    return misses


def naive_slru(events: list[tuple[int, list[int]]]) -> int:
    probation: OrderedDict[Key, None] = OrderedDict()
    protected: OrderedDict[Key, None] = OrderedDict()
    misses = 0
    for layer, experts in events:
        needed = [(layer, e) for e in experts]
        for key in needed:
            if key in probation:
                del probation[key]
                protected[key] = None
            elif key in protected:
                protected.move_to_end(key)
        while len(protected) > int(PROTECTED * SLOTS):
            probation[protected.popitem(last=False)[0]] = None
        for key in needed:
            if key not in probation and key not in protected:
                misses += 1
                if len(probation) + len(protected) >= SLOTS:
                    victim = next(x for x in [*probation, *protected] if x not in needed)
                    probation.pop(victim, None)
                    protected.pop(victim, None)
                probation[key] = None
    return misses


@pytest.mark.parametrize("seed", range(4))
def test_queues_miss_as_naive_ones_do(seed: int) -> None:
    trace = random_trace(seed, experts=24)  # events of three experts: at most one eviction order among them
    events = events_of(trace, 1)
    share = SLOTS / (trace.layers * trace.experts)
    missed = {name: int(count_misses(trace, MAKERS[name], [share]).sum()) for name in ("fifo", "second-chance", "slru")}
    assert missed["fifo"] == naive_fifo(events, second_chance=False)
    assert missed["slru"] == naive_slru(events)
    wanted = naive_fifo(events, second_chance=True)
    assert missed["second-chance"] == pytest.approx(wanted, rel=0.01)  # the hand moves once a layer-step, not between


def test_least_stale_evicts_passed_layers_unused_experts_first_and_keeps_coming_layers() -> None:
    policy = LeastStale(3, 2)
    touch(policy, (0, [0]), (1, [0]), (2, [0]), (0, [1]), (1, [1]))
    rank = policy.rank(1)
    order = np.argsort(rank.ravel())[np.isin(np.argsort(rank.ravel()), [0, 1, 2, 3, 4])]
    assert order.tolist() == [0, 2, 1, 3, 4]


class WatchedLayerLFU(LayerLFU):
    most = 0  # experts of a layer in the cache, once it is full

    def observe_residents(self, resident: BoolArray, capacity: int) -> None:
        super().observe_residents(resident, capacity)
        if resident.sum() == capacity:
            self.most = max(self.most, int(resident.sum(1).max()))


def test_layers_share_the_cache_evenly() -> None:
    trace = random_trace(2, tokens=80, experts=24)
    policy = WatchedLayerLFU(trace.layers, trace.experts)
    count_misses(Trace(trace.requests[:1], 24), lambda trace, batch: policy, [12 / 72])
    policy.most = 0
    count_misses(Trace(trace.requests[1:], 24), lambda trace, batch: policy, [12 / 72])
    assert 12 // 3 <= policy.most <= 12 // 3 + trace.top_k


def test_the_calibrated_ring_pins_its_profile() -> None:
    policy = CalibratedRing(1, 20)
    resident = np.zeros((1, 20), np.bool_)
    for token in range(PROFILE_TOKENS):
        policy.observe_residents(resident, 10)
        policy.touch(0, np.array([token % 9, 9 + token % 2]))
    rank = policy.rank(0)[0]
    pinned = np.flatnonzero(rank >= np.sort(rank)[-(10 - int(RING * 10))])
    assert {9, 10} <= set(pinned.tolist())
    assert len(pinned) == 9


@pytest.mark.parametrize("name", [*NAMED])
def test_boxes_and_the_bound_miss_alike_and_nobody_less_than_belady(name: str) -> None:
    trace = random_trace(5)
    slots = [9, 18]
    by_box = [each.misses for each in replay(trace, name, slots, 1, 0.0, MACHINE)]
    by_bound = count_misses(trace, MAKERS[name], [each / 36 for each in slots]).sum(0)
    least = [each.misses for each in replay(trace, "belady", slots, 1, 0.0, MACHINE)]
    assert by_box == pytest.approx(by_bound.tolist(), rel=0.02)  # slots and experts decide differently between equals
    assert all(mine >= optimum for mine, optimum in zip(by_box, least, strict=True))
