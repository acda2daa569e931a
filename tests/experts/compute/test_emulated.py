"""An emulated device with a memory speed of its own: its results, and the time that they take."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.compute.dispatch import DeviceTime
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier
from edgemoe.types.step import StepMeta
from tests.support.tiers_kit import SMALL, FileStore, Weights, emulated, running

READ_S = 2e-3  # of one expert
SIZE = SMALL.largest_bytes
HIDDEN, IDS, SHARES = torch.ones(1, SMALL.hidden), torch.tensor([[0, 7]]), torch.full((1, 2), 0.5)
ONE = StepMeta(
    requests=("a",),
    tokens=np.zeros(1, np.int64),
    positions=np.zeros(1, np.int64),
    query_lens=np.ones(1, np.int64),
    decode=np.ones(1, np.bool_),
)


def slow_tiers(weights: Weights, devices: tuple[int, ...]) -> ExpertTiers:
    """Builds tiers with all experts in RAM, on devices of these slots that read an expert in READ_S."""
    policy = LRU(SMALL.layers, SMALL.experts)
    slow = [replace(emulated(slots * SIZE), memory_bytes_per_s=SIZE / READ_S) for slots in devices]
    memory = TierMemory(SMALL.all_bytes, slow)
    return ExpertTiers(SMALL, FileStore(weights), memory, {Tier.VRAM: policy, Tier.RAM: policy}, None)


def test_a_device_s_time_is_given_out_in_turn() -> None:
    now = 10.0
    device = DeviceTime(100.0, lambda: now)
    assert device.reserve(50) == (10.0, 10.5)
    assert device.reserve(100) == (10.5, 11.5), "whoever comes second waits for the first"
    now = 20.0
    assert device.reserve(10) == (20.0, 20.1), "what it did not use is gone"


@pytest.mark.parametrize("devices", [(24,), (12, 12)])
def test_a_layer_takes_the_devices_time_and_its_result_is_the_same(devices: tuple[int, ...]) -> None:
    weights = Weights(SMALL)
    with running(slow_tiers(weights, devices)) as tiers:
        tiers.experts.begin_step(ONE)
        began_s = time.monotonic()
        out = tiers.experts.forward(0, HIDDEN, IDS, SHARES)
        took_s = time.monotonic() - began_s
        torch.testing.assert_close(out.double(), weights.forward(0, HIDDEN, IDS, SHARES), atol=1e-5, rtol=1e-5)
        tiers.experts.end_step()
        assert took_s >= READ_S * 2 / len(devices), "both experts, one device after the other or side by side"
        costs = tiers.experts.cpu_experts.costs
        for _ in range(100):
            costs.observe_device(1.0, READ_S)
        before_s = costs.device_unit_s
        for layer in range(SMALL.layers):
            tiers.experts.begin_step(ONE)
            tiers.experts.forward(layer, HIDDEN, IDS, SHARES)
            tiers.experts.end_step()
        assert costs.device_unit_s == pytest.approx(before_s, rel=1e-3), "what it reports is what it took"


def test_computations_for_peers_share_the_device() -> None:
    with running(slow_tiers(Weights(SMALL), (24,))) as tiers:
        twin = tiers.second(None, deadline_s=10.0)
        began_s = time.monotonic()
        tiers.experts.begin_step(ONE)
        (mine,), (theirs,) = tiers.experts._computes, twin._computes
        for compute in (mine, theirs):
            compute.begin(0, HIDDEN)
        tiers.experts.forward(0, HIDDEN, IDS, SHARES)
        twin.forward(0, HIDDEN, IDS, SHARES)
        assert time.monotonic() - began_s >= 4 * READ_S
        tiers.experts.end_step()


def test_a_step_is_never_computed_past_the_device() -> None:
    with running(slow_tiers(Weights(SMALL), (24,)), fill=True) as tiers:
        deadline_s = time.monotonic() + 30
        while not tiers.residency.has_all and time.monotonic() < deadline_s:
            time.sleep(1e-3)
        assert tiers.residency.has_all
        tiers.experts.begin_step(ONE)
        assert tiers.experts.places is None
        tiers.experts.end_step()
