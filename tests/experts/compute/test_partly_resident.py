"""Steps that read missing experts from RAM in place count as other steps do, and bring in experts worth a slot."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until

from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.tiers.slots import PrefetchPriority
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier
from edgemoe.types.step import StepMeta, StepRouting

SIZE = SMALL.stride_bytes(0)
SLOTS, STEP_S = 12, 1.0
ONE = StepMeta(("r",), np.ones(1, np.int64), np.ones(1, np.bool_), np.ones(1, np.int64), np.zeros(1, np.int64))


class Box:
    """Tiers with all experts in RAM and half of them on a device. Steps last STEP_S by their clock."""

    def __init__(self, tiers: ExpertTiers) -> None:
        self.tiers, self.residency, self.experts = tiers, tiers.residency, tiers.experts
        wait_until(lambda: self.residency.resident_mask().all() and not self.residency.devices[0].free)
        self.finish_copies()
        self._now_s = 0.0
        tiers.loader.clock = lambda: self._now_s

    def finish_copies(self) -> None:
        wait_until(self.tiers.loader.links[0].idle)

    @property
    def here(self) -> BoolArray:
        return self.residency.resident_mask(Tier.VRAM)

    def run(self, ids: IntArray) -> StepRouting:
        """Runs a step whose one token chose `ids` [L, k]."""
        slots: Any = SimpleNamespace(outside=~self.here)
        self.experts.slots = slots
        self.experts.begin_step(ONE)
        self._now_s += STEP_S
        chosen = torch.from_numpy(ids[:, None])
        self.experts.computed(chosen, torch.ones(chosen.shape), ids.size)
        self.finish_copies()
        return self.experts.end_step()

    def link_rate(self, bytes_per_s: float) -> None:
        """Makes this the rate that was measured on the link."""
        stats = self.tiers.loader.links[0].stats
        stats._sums = [0.0] * 5
        stats.observe(int(bytes_per_s), 1.0)

    def chosen(self, hits: int) -> IntArray:
        """Returns experts of each layer, [L, k], the first `hits` of them on the device."""
        return np.array(
            [[*np.flatnonzero(row)[:hits], *np.flatnonzero(~row)[: SMALL.top_k - hits]] for row in self.here], np.int64
        )


@pytest.fixture
def tiers() -> Iterator[ExpertTiers]:
    with running(small_tiers(FileStore(Weights(SMALL)), 24, (SLOTS,)), fill=True) as tiers:
        yield tiers


def test_hits_misses_and_uses_are_counted(tiers: ExpertTiers) -> None:
    box = Box(tiers)
    before, ids = np.array(box.residency.served), box.chosen(hits=1)
    routing = box.run(ids)
    assert (np.array(box.residency.served) - before).tolist() == [3, 3, 0]
    assert (routing.ids[:, 0] == ids).all()
    last = box.residency.policy.last  # type: ignore[attr-defined]
    assert [last[layer, row].tolist() for layer, row in enumerate(ids)] == [[n, n] for n in (1, 2, 3)]


def test_experts_that_several_tokens_chose_count_once(tiers: ExpertTiers) -> None:
    box = Box(tiers)
    before, ids = np.array(box.residency.served), torch.from_numpy(box.chosen(hits=1))
    slots: Any = SimpleNamespace(outside=~box.here)
    box.experts.slots = slots
    box.experts.computed(ids[:, None].repeat(1, 4, 1), torch.ones(3, 4, 2), 6)
    assert (np.array(box.residency.served) - before).tolist() == [3, 3, 0]


@pytest.mark.parametrize("used", [True, False])
def test_a_prefetched_expert_that_such_a_step_used_is_not_wasted(tiers: ExpertTiers, used: bool) -> None:
    box = Box(tiers)
    expert = ExpertId(0, int(np.flatnonzero(~box.here[0])[0]))
    load = box.residency.reserve(Move(expert, Tier.RAM, Tier.VRAM, np.inf), PrefetchPriority.FAR)
    assert load is not None
    tiers.loader.start([load])
    box.finish_copies()
    ids = box.chosen(hits=2)
    if used:
        ids[0, 0] = expert.expert
    box.run(ids)
    for other in range(24):  # evicts it
        move = Move(ExpertId(*divmod(other, 8)), Tier.RAM, Tier.VRAM, np.inf)
        if (more := box.residency.reserve(move, PrefetchPriority.USED)) is not None:
            tiers.loader.start([more])
    box.finish_copies()
    assert box.residency.usage(Tier.VRAM).wasted == (not used)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_missed_experts_of_highest_rank_come_as_far_as_the_link_has_time(tiers: ExpertTiers, spare: int) -> None:
    box = Box(tiers)
    box.link_rate((3 + spare + 0.5) * SIZE / STEP_S)  # three are read in place
    ids = box.chosen(hits=1)
    box.run(ids)
    assert [bool(box.here[layer, ids[layer, 1]]) for layer in range(3)] == [layer >= 3 - spare for layer in range(3)]
    box.tiers.check_integrity(idle=True)


def test_experts_that_rank_below_all_on_the_device_stay_where_they_are(tiers: ExpertTiers) -> None:
    box = Box(tiers)
    box.link_rate(100 * SIZE / STEP_S)
    box.residency.policy.rank = lambda _: np.where(box.here, 1, 0).astype(np.float32)  # type: ignore[method-assign]
    before = box.here
    for half in (slice(0, 2), slice(2, 4)):  # experts that only filled free slots would go in any case
        box.run(np.array([np.flatnonzero(row)[half] for row in before]))
    box.run(box.chosen(hits=0))
    assert (box.here == before).all()


@pytest.mark.parametrize(("margin", "comes"), [(0.5, True), (1.0, False)])
def test_an_expert_comes_if_it_outranks_another_by_the_policy_s_margin(
    tiers: ExpertTiers, margin: float, comes: bool
) -> None:
    box = Box(tiers)
    box.link_rate(100 * SIZE / STEP_S)
    for half in (slice(0, 2), slice(2, 4)):
        box.run(np.array([np.flatnonzero(row)[half] for row in box.here]))
    before, policy = box.here, box.residency.policy
    policy.margin = margin  # type: ignore[misc]
    policy.rank = lambda _: np.where(before, 1, 2).astype(np.float32)  # type: ignore[method-assign]
    box.run(box.chosen(hits=1))
    assert ((box.here != before).any()) == comes


@pytest.mark.parametrize("rate", [1.5, 100.0])
def test_the_time_of_reads_in_place_is_the_step_s_stall(tiers: ExpertTiers, rate: float) -> None:
    box = Box(tiers)
    box.link_rate(rate * SIZE / STEP_S)
    before_s = box.experts.stall_s[Tier.RAM]
    routing = box.run(box.chosen(hits=1))
    assert routing.stall_s == pytest.approx(min(STEP_S, 3 / rate * STEP_S))
    assert box.experts.stall_s[Tier.RAM] - before_s == routing.stall_s


def test_without_prefetching_nothing_comes() -> None:
    with running(small_tiers(FileStore(Weights(SMALL)), 24, (SLOTS,), prefetch=False), fill=True) as tiers:
        box = Box(tiers)
        box.link_rate(100 * SIZE / STEP_S)
        before = box.here
        box.run(box.chosen(hits=1))
        assert (box.here == before).all()
