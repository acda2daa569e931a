"""Marginal union: a request goes where it costs all that decode least, by the experts it adds to what they load.

A decode step takes as long as the distinct experts that it has to load. If request r chooses expert e of a layer with
probability p_r(e) in a step, the running ones of worker w load it with probability 1 - prod(1 - p). What r adds is

    T(w + r) - T(w) = sum over (l, e) of seconds_w(l, e) * prod over running of (1 - p(l, e)) * p_r(l, e)         (1)

and it costs T(w + r) for itself, and (1) for each of the n_w that run there:

    T(w + r) + n_w (T(w + r) - T(w))                                                                            (2)

[ELDR] keeps experts apart by clusters alone; (2) sees who really runs where, and load with it. `seconds` differ by
where a worker has an expert: in VRAM, in RAM, at a peer, on disk.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.signatures import Counts
from edgemoe.types.arrays import FloatArray, IntArray

Values = npt.NDArray[np.float64]
PRIOR_TOKENS = 32.0  # what is known beforehand counts for, beside the tokens of the prompt
MOST_CERTAIN = 0.999  # so that what is added can be taken away again


def chances(counts: Counts, tokens: float, prior: FloatArray) -> FloatArray:
    """Returns how likely a decoded token chooses each expert [L, E].

    By the prefill counts [L, E] of so many tokens, and by how likely others' decoded tokens are to, `prior` [L, E].
    """
    expected = (counts + PRIOR_TOKENS * prior) / (tokens + PRIOR_TOKENS)
    return np.clip(expected, 0.0, MOST_CERTAIN).astype(np.float32)


def absence(chance: FloatArray) -> FloatArray:
    """Returns the log of the chance that a request chooses none of the experts; of several it is the sum."""
    return np.asarray(np.log1p(-chance), np.float32)


def union_costs(
    seconds: FloatArray, absent: FloatArray, running: IntArray, step_s: Values, chance: FloatArray
) -> tuple[Values, Values]:
    """Returns T [W] and (2) [W, R], in seconds a step, of requests with these chances [R, L, E].

    `seconds` [W, L, E] is what loading an expert takes at each worker, `absent` [W, L, E] the sum of what runs there,
    `running` [W] how many that are, and `step_s` [W] what a step takes beside experts.
    """
    left = (seconds * np.exp(absent)).reshape(len(seconds), -1)
    now = step_s + (seconds.reshape(len(seconds), -1).sum(axis=1) - left.sum(axis=1))
    added = (left @ chance.reshape(len(chance), -1).T).astype(np.float64)
    return now, now[:, None] + (running[:, None] + 1) * added
