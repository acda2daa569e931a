"""Orders the waiting queue: shortest job first, with aging, and fairly between users.

Source: [Gimbal, Algorithm 2]. The length of a job is its prompt tokens outside the prefix cache. Aging is linear; the
source has a threshold. Users take turns by the virtual token counter [VTC].
docs/design/queue.md has the reasons and the starvation bound.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from edgemoe.types.arrays import IntArray

Rule = Literal["sjf", "fcfs"]
Floats = np.typing.NDArray[np.float64]

LEAD_S = 10.0  # a user's lead in service counts for at most this much aging


def order(prefill_tokens: IntArray, waited_s: Floats, rule: Rule, tokens_per_s: float) -> IntArray:
    """Returns the order in which waiting requests [n] should be admitted, a permutation of 0..n-1.

    `prefill_tokens` [n] and `waited_s` [n] lie in order of arrival, which decides between equals. A second of waiting
    makes up for `tokens_per_s` tokens.
    """
    if rule == "fcfs":
        return np.argsort(-waited_s, kind="stable")
    return np.argsort(prefill_tokens - tokens_per_s * waited_s, kind="stable")


def keys(head_tokens: IntArray, lead_tokens: Floats, heading_s: Floats, tokens_per_s: float) -> Floats:
    """Returns the sorting keys of the heads of the users' lines [u]; the head with the lowest key is next.

        key = prefill tokens + lead - k * seconds at the head of its user's line                              (1)

    `head_tokens` [u] is the prefill of each line's head. `lead_tokens` [u] is the user's service beyond the least
    served user's. `heading_s` [u] is the time for which a request has been its line's head. k is `tokens_per_s`.
    """
    lead = np.minimum(lead_tokens, LEAD_S * tokens_per_s)
    return np.asarray(head_tokens + lead - tokens_per_s * heading_s, dtype=np.float64)
