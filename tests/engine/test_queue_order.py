"""The order of the waiting queue."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.engine.fairness import LEAD_S, head_keys, queue_order

K = 1500.0
WAITING = st.lists(st.tuples(st.integers(1, 40_000), st.floats(0, 600)), min_size=1, max_size=40)


def ordered(tokens: list[int], waited: list[float], rule: str) -> list[int]:
    return queue_order(np.array(tokens), np.array(waited), rule, K).tolist()  # type: ignore[arg-type]


@given(WAITING)
def test_every_rule_yields_each_waiting_request_once(waiting: list[tuple[int, float]]) -> None:
    tokens, waited = map(list, zip(*waiting, strict=True))
    for rule in ("sjf", "fcfs"):
        assert sorted(ordered(tokens, waited, rule)) == list(range(len(tokens)))


def test_linear_aging_lets_a_second_of_waiting_make_up_for_k_tokens() -> None:
    assert ordered([2000, 400], [1.0, 0.0], "sjf") == [1, 0]
    assert ordered([2000, 600], [1.0, 0.0], "sjf") == [0, 1]


def test_linear_aging_keeps_its_order_while_all_wait() -> None:
    tokens, waited = [3000, 10, 900, 901], np.array([3.0, 0.0, 0.5, 0.1])
    now = ordered(tokens, list(waited), "sjf")
    assert ordered(tokens, list(waited + 1000), "sjf") == now


def test_first_come_first_served_ignores_sizes() -> None:
    assert ordered([9000, 1, 1], [3.0, 2.0, 5.0], "fcfs") == [2, 0, 1]


def test_equals_go_in_order_of_arrival() -> None:
    for rule in ("sjf", "fcfs"):
        assert ordered([7] * 5, [1.0] * 5, rule) == [0, 1, 2, 3, 4]


def test_between_users_the_least_served_goes_first() -> None:
    heads, heading = np.array([100, 100]), np.zeros(2)
    assert head_keys(heads, np.array([500.0, 0.0]), heading, K).argmin() == 1
    assert head_keys(heads, np.array([0.0, 500.0]), heading, K).argmin() == 0


@given(st.integers(1, 40_000), st.floats(0, 1e12), st.integers(1, 40_000))
def test_after_the_stated_bound_no_newcomer_overtakes_the_head_of_a_line(
    tokens: int, lead: float, newcomer: int
) -> None:
    bound_s = tokens / K + LEAD_S
    heads, leads, heading = np.array([newcomer, tokens]), np.array([0.0, lead]), np.array([0.0, bound_s + 1e-6])
    assert head_keys(heads, leads, heading, K).argmin() == 1
