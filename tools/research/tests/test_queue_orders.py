"""Gimbal's order of the waiting queue is that of its pseudo-code."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tools.research.routing.queue_orders import order

WAITING = st.lists(st.tuples(st.integers(1, 40_000), st.floats(0, 600)), min_size=1, max_size=40)


def algorithm_2(tokens: list[int], waited: list[float], threshold_s: float) -> list[int]:
    """Sorts by Gimbal's pseudo-code, line by line."""
    priority = {}
    for request in range(len(tokens)):
        aged = waited[request] >= threshold_s
        priority[request] = (0, -waited[request]) if aged else (1, tokens[request])
    return sorted(priority, key=lambda request: (*priority[request], request))


@given(WAITING)
def test_gimbal_is_algorithm_2_of_the_paper(waiting: list[tuple[int, float]]) -> None:
    tokens, waited = map(list, zip(*waiting, strict=True))
    assert order(np.array(tokens), np.array(waited), "gimbal", 1.0, 5.0).tolist() == algorithm_2(tokens, waited, 5.0)
