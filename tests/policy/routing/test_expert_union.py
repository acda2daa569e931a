"""The experts that a request adds to a worker's loads."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.routing.marginal_union import chances, step_of
from edgemoe.policy.routing.signatures import absence

EXPERTS = 3
chance_lists = st.lists(st.floats(0, 0.99), min_size=EXPERTS, max_size=EXPERTS)


def step_s(seconds: np.ndarray, requests: list[list[float]]) -> float:
    """Computes the expected time of a step by enumerating all choices of the requests."""
    total = 0.0
    flat = [chance for request in requests for chance in request]
    for outcome in product((False, True), repeat=len(flat)):
        weight = float(np.prod([p if chosen else 1 - p for p, chosen in zip(flat, outcome, strict=True)]))
        union = np.array(outcome, np.bool_).reshape(-1, EXPERTS).any(axis=0)
        total += weight * float(seconds[union].sum())
    return total


@given(st.lists(chance_lists, max_size=2), chance_lists, st.lists(st.floats(0.1, 2), min_size=3, max_size=3))
def test_costs_equal_an_enumeration_of_all_outcomes(
    running: list[list[float]], new: list[float], seconds: list[float]
) -> None:
    price = np.array(seconds, np.float32)
    absent = np.sum([absence(np.array(each, np.float32)) for each in running], axis=0) * np.ones((1, 1, EXPERTS))
    step = step_of(price[None], absent[0].astype(np.float32), len(running), 0.5)
    before, after = 0.5 + step_s(price, running), 0.5 + step_s(price, [*running, new])
    assert step.now_s == pytest.approx(before, abs=1e-4)
    assert step.cost_s(np.array([new], np.float32)) == pytest.approx(after + len(running) * (after - before), abs=1e-3)


def test_a_prompt_outweighs_the_prior_the_longer_it_is() -> None:
    prior = np.full((1, 2), 0.5, np.float32)
    assert chances(np.zeros((1, 2)), 0, prior) == pytest.approx(prior)
    short, long = (chances(np.array([[0, tokens]]), tokens, prior) for tokens in (32, 3200))
    assert short[0] == pytest.approx([0.25, 0.75])
    assert long[0, 0] < 0.01
    assert long[0, 1] < 1  # added experts can be removed again
