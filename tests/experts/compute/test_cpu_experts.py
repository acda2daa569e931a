"""The CPU beside a device computes experts in RAM that the link would bring too late, and results stay the same."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until

from edgemoe.errors import CorruptExpert
from edgemoe.experts.build import ExpertTiers
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertId
from edgemoe.types.step import TokenGroups

TOTAL = SMALL.layers * SMALL.experts
SLOW = SMALL.stride_bytes(0) / 0.03  # bytes/s: 30 ms for an expert


@pytest.fixture
def weights() -> Weights:
    return Weights(SMALL)


@pytest.fixture
def slow(weights: Weights) -> Iterator[ExpertTiers]:
    """All experts in RAM, and two on a device whose slow link has been measured."""
    tiers = small_tiers(FileStore(weights), TOTAL, (2,), link_bytes_per_s=SLOW, prefetch=False)
    with running(tiers, fill=True):
        fill(tiers)
        yield tiers


def fill(tiers: ExpertTiers) -> None:
    """Waits until RAM and the devices are full."""
    wait_until(lambda: not any(pool.free for pool in (tiers.residency.ram, *tiers.residency.devices)))
    wait_for_copies(tiers)


def wait_for_copies(tiers: ExpertTiers) -> None:
    """Waits until no copy is on its way."""
    wait_until(lambda: not any(pool.loads for pool in (tiers.residency.ram, *tiers.residency.devices)))
    wait_until(lambda: all(link.idle() for link in tiers.loader.links))


def missing(tiers: ExpertTiers, layer: int) -> IntArray:
    """Returns the experts of the layer that are not on the device."""
    return np.flatnonzero(tiers.residency.devices[0].where[layer] < 0)


def forward(tiers: ExpertTiers, weights: Weights, layer: int, experts: IntArray) -> None:
    """Computes a layer for one decoding token, and compares the result with the reference."""
    hidden, shares = torch.linspace(-1, 1, SMALL.hidden)[None], torch.linspace(0.2, 0.8, len(experts))[None]
    ids = torch.from_numpy(experts)[None]
    out = tiers.experts.forward(layer, hidden, ids, shares)
    torch.testing.assert_close(out.double(), weights.forward(layer, hidden, ids, shares), atol=1e-5, rtol=1e-5)


def group_of(*experts: int) -> TokenGroups:
    return TokenGroups.of(np.array([experts]), np.ones((1, len(experts)), np.float32))


def test_behind_a_slow_link_the_cpu_computes_from_ram_and_nobody_waits(slow: ExpertTiers, weights: Weights) -> None:
    wanted = missing(slow, 1)[:2]
    forward(slow, weights, 1, wanted)
    assert slow.experts.cpu_experts.experts == 2
    assert slow.residency.served == [0, 2, 0]
    assert sum(slow.experts.stall_s) == 0
    wait_until(lambda: (slow.residency.devices[0].where[1, wanted] >= 0).all())  # for the next time
    forward(slow, weights, 1, wanted)
    assert slow.residency.served == [2, 2, 0]


def test_experts_of_prefill_alone_are_not_copied_to_the_device_afterwards(slow: ExpertTiers, weights: Weights) -> None:
    wanted = missing(slow, 0)[:2]
    hidden, shares = torch.ones(1, SMALL.hidden), np.ones((1, 2), np.float32)
    slow.experts.compute(0, hidden, TokenGroups.of(wanted[None], shares), prefill_only=np.ones(2, np.bool_))
    assert slow.experts.cpu_experts.experts == 2
    assert not slow.loader.prefetch_requests
    assert slow.loader.links[0].idle()


def test_a_link_that_nobody_has_measured_goes_first(weights: Weights) -> None:
    with running(small_tiers(FileStore(weights), TOTAL, (2,), link_bytes_per_s=SLOW, prefetch=False)) as tiers:
        forward(tiers, weights, 0, np.array([0, 1]))
        assert tiers.experts.cpu_experts.experts == 0
        forward(tiers, weights, 0, np.array([2, 3]))  # not in RAM: only the device can compute it
        assert tiers.experts.cpu_experts.experts == 0
        forward(tiers, weights, 0, np.array([0, 1]))
        assert tiers.experts.cpu_experts.experts == 2


def test_a_fast_link_leaves_the_cpu_nothing(weights: Weights) -> None:
    with running(small_tiers(FileStore(weights), TOTAL, (2,), prefetch=False), fill=True) as tiers:
        fill(tiers)
        wanted = missing(tiers, 0)[:2]
        forward(tiers, weights, 0, wanted)
        assert tiers.experts.cpu_experts.experts == 0


def test_a_cpu_that_was_slow_is_left_alone_until_it_is_tried_again(slow: ExpertTiers) -> None:
    now_s, costs, wanted = 100.0, slow.experts.cpu_experts.costs, group_of(*missing(slow, 0)[:2])
    costs._clock = lambda: now_s
    for _ in range(20):
        costs.observe_cpu(0, 1.0, 10.0)
    assert costs.for_cpu(0, wanted) is None
    now_s = 1000.0
    assert costs.for_cpu(0, wanted) is not None


def test_the_link_and_the_cpu_share_missing_experts(slow: ExpertTiers) -> None:
    costs, wanted = slow.experts.cpu_experts.costs, missing(slow, 2)[:6]
    costs.cpu.mean_s, costs.cpu._measured_s, costs.thread_unit_s = 0.06, time.monotonic(), 1e-4
    chosen = costs.for_cpu(2, group_of(*wanted))
    assert chosen is not None
    assert chosen.sum() == 2  # of 60 ms each, four copies of 30 ms


def test_experts_evicted_before_their_pin_go_to_the_device(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(small_tiers(FileStore(weights), 4, (2,), prefetch=False)) as tiers:
        cpu_experts = tiers.experts.cpu_experts
        monkeypatch.setattr(cpu_experts.costs, "for_cpu", lambda _, group: np.ones(len(group.experts), np.bool_))
        forward(tiers, weights, 0, np.array([0, 1]))
        assert cpu_experts.experts == 0
        forward(tiers, weights, 1, np.array([0, 1]))
        forward(tiers, weights, 0, np.array([1, 2]))
        assert cpu_experts.experts == 1
        assert sum(tiers.residency.served) == 6


def test_a_read_that_fails_beside_the_cpus_work_leaves_nothing_pinned(weights: Weights) -> None:
    store = FileStore(weights)
    with running(small_tiers(store, 6, (2,), link_bytes_per_s=SLOW, prefetch=False), fill=True) as tiers:
        fill(tiers)
        there = tiers.residency.ram.where >= 0
        layer = int(np.argmax((there & (tiers.residency.devices[0].where < 0)).any(axis=1)))
        ours = int(np.flatnonzero(there[layer] & (tiers.residency.devices[0].where[layer] < 0))[0])
        bad = int(np.flatnonzero(~there[layer])[0])
        store.damaged.add(ExpertId(layer, bad))
        with pytest.raises(CorruptExpert):
            forward(tiers, weights, layer, np.array([ours, bad]))
        wait_until(lambda: tiers.residency.devices[0].where[layer, ours] >= 0)  # copied to the device for the next time
        wait_for_copies(tiers)
        wait_until(lambda: not tiers.residency.ram.pins.any())  # a copy that has arrived releases its source
        tiers.check_integrity(idle=True)
        store.damaged.clear()
        forward(tiers, weights, layer, np.array([ours, bad]))


def test_a_device_that_fails_before_the_cpu_has_begun_leaves_nothing_pinned(
    slow: ExpertTiers, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = missing(slow, 1)[:2]

    def fails(*_: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(slow.experts.cpu_experts.costs, "for_cpu", lambda *_: np.array([True, False]))
        patch.setattr(slow.experts.loader, "start", fails)
        with pytest.raises(RuntimeError, match="lost"):
            forward(slow, weights, 1, wanted)
    assert not slow.residency.ram.pins[slow.residency.ram.where[1, wanted[0]]]
    slow.loader.start(slow.residency.devices[0].loads.values())
    wait_for_copies(slow)


@pytest.mark.parametrize(("ram", "devices"), [(24, (6,)), (3, (2,)), (2, (1,)), (1, (1,)), (7, (3, 3))])
def test_any_share_of_the_cpu_gives_the_same_result(
    ram: int, devices: tuple[int, ...], weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)

    def any_of(_: int, group: TokenGroups) -> BoolArray | None:
        return rng.random(len(group.experts)) < 0.5

    with running(small_tiers(FileStore(weights), ram, devices)) as tiers:
        monkeypatch.setattr(tiers.experts.cpu_experts.costs, "for_cpu", any_of)
        for tokens in (1, 3, 20, 1, 9, 2, 1, 1):
            for layer in range(SMALL.layers):
                hidden, ids, shares = weights.route(tokens, rng)
                want = weights.forward(layer, hidden, ids, shares)
                for _ in range(2):  # the second time some are in RAM, however small it is
                    out = tiers.experts.forward(layer, hidden, ids, shares)
                    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
            tiers.check_integrity()
        assert tiers.experts.cpu_experts.experts > 0
