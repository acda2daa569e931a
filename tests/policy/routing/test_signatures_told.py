"""Signatures in messages: arrays arrive unchanged, impossible ones are refused, and times match steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.routing.marginal_union import StepTimes
from edgemoe.policy.routing.signatures import (
    LEAST,
    MOST_S,
    ModelSizes,
    absent_bytes,
    counts_of,
    resident_of,
    shares_of,
    union_of,
)

SIZES = ModelSizes(3, 8)


@given(seed=st.integers(0, 99), tokens=st.integers(1, 5000))
def test_a_signature_arrives_as_it_was(seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros((3, 8), np.int64)
    for layer in counts:  # of each token two of the first few, so that some experts are chosen by all
        np.add.at(layer, rng.permuted(np.tile(np.arange(rng.integers(2, 9)), (tokens, 1)), axis=1)[:, :2], 1)
    told = counts_of(*shares_of(counts, 2), SIZES)
    assert told is not None
    assert np.abs(told - counts).max() <= 0.5


def test_a_chance_arrives_within_a_255th_and_never_as_impossible() -> None:
    union = np.log(np.linspace(1e-6, 1, 24, dtype=np.float32)).reshape(3, 8)
    told = union_of(absent_bytes(union), SIZES)
    assert told is not None
    assert np.abs(np.exp(told) - np.exp(union)).max() <= LEAST + 1e-6
    assert np.isfinite(told).all()


def test_experts_cost_by_their_place_up_to_a_bound() -> None:
    far = np.arange(24, dtype=np.uint8).reshape(3, 8)
    told = resident_of(far.tobytes(), (0.001, 0.5, 1e9), SIZES)
    assert told is not None
    assert told[0].tolist() == pytest.approx([0, 0.001, 0.5, *[MOST_S] * 5])


@pytest.mark.parametrize("wrong", [b"", b"x", bytes(23), bytes(25), bytes(47), bytes(49)])
def test_tables_of_another_model_are_none(wrong: bytes) -> None:
    assert counts_of(5, wrong, SIZES) is None
    assert union_of(wrong, SIZES) is None
    assert resident_of(wrong, (1.0,), SIZES) is None
    assert union_of(bytes(24), ModelSizes()) is None
    assert counts_of(5, b"", ModelSizes()) is None


def test_step_times_fit_the_steps_and_are_never_negative() -> None:
    fit = StepTimes()
    assert fit.times() == (0.0, 0.0)
    steps = seconds = experts = 0.0
    rng = np.random.default_rng(3)
    for _ in range(200):
        loaded = float(rng.integers(20, 80))
        steps, seconds, experts = steps + 4, seconds + 4 * (0.01 + 1e-4 * loaded), experts + 4 * loaded
        fit.update_totals(steps, seconds, experts)
    fit.update_totals(steps, seconds, experts)  # no step has run since
    step_s, expert_s = fit.times()
    assert (step_s, expert_s) == pytest.approx((0.01, 1e-4), rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_step_times_stay_within_measured_times(stretches: list[tuple[float, float]]) -> None:
    fit, totals = StepTimes(), np.zeros(3)
    for seconds, experts in stretches:
        totals += (1.0, seconds, experts)
        fit.update_totals(*totals.tolist())
    step_s, expert_s = fit.times()
    longest = max(seconds for seconds, _ in stretches)
    assert expert_s >= 0
    assert 0 <= step_s <= longest * (1 + 1e-6)


def test_time_that_grows_faster_than_experts_do_leaves_none_for_the_rest_of_a_step() -> None:
    for n in range(1, 300):
        fit = StepTimes()
        fit.update_totals(1, 1e-3, 1)
        fit.update_totals(2, 1e-3 + n / 7, 1 + 3 + n % 11)
        step_s, expert_s = fit.times()
        assert step_s == pytest.approx(0.0, abs=1e-12)
        assert step_s >= 0
        assert expert_s > 0


def test_if_all_steps_were_alike_half_of_their_time_counts_as_the_experts() -> None:
    fit = StepTimes()
    for n in range(1, 50):
        fit.update_totals(n, n * 0.02, n * 100)
    assert fit.times() == pytest.approx((0.01, 1e-4), rel=1e-6)
