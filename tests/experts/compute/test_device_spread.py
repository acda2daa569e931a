"""Experts that tokens choose together move to different devices during other traffic; results stay the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers
from support.waiting import wait_until

from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.compute import device_spread
from edgemoe.experts.compute.device_spread import LEAST_GAIN, spread
from edgemoe.experts.tiers.assignments import deal_to_devices
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.step import StepMeta


def together(pairs: FloatArray, device_of: IntArray) -> float:
    """Returns the summed weight of a layer's pairs [E, E] with both experts on one device."""
    both = np.triu(pairs + pairs.T, 1)
    return float(both[device_of[:, None] == device_of].sum())


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 4), st.integers(4, 14), st.integers(0, 2**32 - 1))
def test_pairs_on_one_device_become_fewer_until_no_exchange_saves_more(devices: int, experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = rng.random((2, experts, experts)).astype(np.float32) ** 4
    pairs[1, experts - 2 :], pairs[1, :, experts - 2 :] = 1e6, 1e6  # experts of the second layer that do not exist
    now = rng.integers(devices, size=(2, experts))
    now[:, :devices] = np.arange(devices)
    goal = spread(pairs, now, [experts, experts - 2])
    assert (goal[1, experts - 2 :] == now[1, experts - 2 :]).all()
    for layer, count in enumerate((experts, experts - 2)):
        table, found = pairs[layer, :count, :count], goal[layer, :count]
        assert (np.bincount(found, minlength=4) == np.bincount(now[layer, :count], minlength=4)).all()
        first, last = together(table, now[layer, :count]), together(table, found)
        assert last <= first * (1 + 1e-5)
        for a in range(count):
            for b in range(a):
                other = found.copy()
                other[[a, b]] = found[[b, a]]
                assert together(table, other) >= last - LEAST_GAIN * first * 1.001 - 1e-4


def test_the_busiest_device_has_less_to_do_where_tokens_choose_in_groups() -> None:
    """Six groups of four experts. Each token chooses one group: two experts on either device."""
    groups = np.random.default_rng(0).permutation(24).reshape(6, 4)
    pairs = np.zeros((1, 24, 24), np.float32)
    for group in groups:
        pairs[0, group[:, None], group] = 1.0
    goal = spread(pairs, deal_to_devices((1, 24), [1, 1]), [24])
    assert (goal[0][groups].sum(axis=1) == 2).all()


@pytest.mark.parametrize("devices", [(6, 6), (2, 2), (13, 11)])
def test_experts_change_devices_between_steps_and_results_stay(
    devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens choose experts 0 and 1, 2 and 3, ... together."""
    monkeypatch.setattr(device_spread, "LEAST_TOKENS", 8.0)
    rng, weights = np.random.default_rng(2), Weights(SMALL)
    activity = ActivityCounter(SMALL)
    with running(small_tiers(FileStore(weights), 24, devices), fill=True) as tiers:
        tiers.spread_by(activity)
        device_spread_of = tiers.experts.spread
        assert device_spread_of is not None
        for number in range(60):
            meta = StepMeta(("r",), np.array([1]), np.array([True]), np.array([0]), np.array([number]))
            tiers.experts.begin_step(meta)
            for layer in range(SMALL.layers):
                hidden, _, shares = weights.route(1, rng)
                ids = torch.tensor([[0, 1]]) + 2 * int(rng.integers(4))
                out = tiers.experts.forward(layer, hidden, ids, shares)
                torch.testing.assert_close(
                    out.double(), weights.forward(layer, hidden, ids, shares), atol=1e-5, rtol=1e-5
                )
            activity.add(tiers.experts.end_step())
            tiers.check_integrity()
            device_spread_of.plan_moves()
        assert device_spread_of.moved > 0
        device_of = tiers.residency.device_of
        alike = (device_of[:, ::2] == device_of[:, 1::2]).sum(axis=1)
        assert (alike == abs(device_of.sum(axis=1) - 4)).all(), "as few as there can be"
        wait_until(lambda: not any(pool.loads for pool in tiers.residency.devices))
        assert not device_spread_of._moves


def test_nothing_moves_by_few_tokens_or_without_pairs() -> None:
    residency: Any = SimpleNamespace(device_of=deal_to_devices((3, 8), [1, 1]))
    for counter in (ActivityCounter(SMALL), ActivityCounter(SMALL, successions=True)):
        nobody = device_spread.DeviceSpread(residency, residency, SMALL, counter)
        nobody.plan_moves()
        nobody.on_step_ended()
        assert nobody.moved == 0
