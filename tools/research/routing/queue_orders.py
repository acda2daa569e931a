"""Orders of an engine's waiting queue for comparison: the served ones, and Gimbal's with its age threshold."""

from __future__ import annotations

from typing import Literal

import numpy as np

from edgemoe.engine.fairness import Floats, queue_order
from edgemoe.types.arrays import IntArray

QueueOrder = Literal["sjf", "fcfs", "gimbal"]


def order(
    prefill_tokens: IntArray, waited_s: Floats, rule: QueueOrder, tokens_per_s: float, threshold_s: float
) -> IntArray:
    """Returns the order in which waiting requests [n] are admitted. See `queue_order`."""
    if rule != "gimbal":
        return queue_order(prefill_tokens, waited_s, rule, tokens_per_s)
    aged = waited_s >= threshold_s  # [Gimbal, Algorithm 2, lines 2-4]; the oldest first among them
    length = np.where(aged, -waited_s, prefill_tokens)  # lines 5-7
    return np.lexsort((length, ~aged))  # line 9; the sort is stable
