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

from typing import NamedTuple

import numpy as np

from edgemoe.policy.routing.signatures import Counts
from edgemoe.types.arrays import FloatArray

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


class EngineStep(NamedTuple):
    """States what a step of an engine loads, and leaves."""

    left_s: FloatArray  # [L * E] what loading an expert takes, by the chance that nobody there does
    now_s: float  # T
    running: int

    def cost_s(self, chance: FloatArray) -> float:
        """Returns (2) of a request with these chances [L, E]."""
        # not by BLAS, whose threads wait for each other for up to half a second on a box with no core to spare
        added_s = float(np.einsum("k,k->", self.left_s, chance.reshape(-1)))
        return self.now_s + (self.running + 1) * added_s


def step_of(seconds: FloatArray, absent: FloatArray, running: int, step_s: float) -> EngineStep:
    """Returns a step of an engine that takes `step_s` beside experts, and `seconds` [L, E] for each that it loads.

    `absent` [L, E] is the sum of what runs there.
    """
    left = seconds * np.exp(absent)
    return EngineStep(left.reshape(-1), step_s + float(seconds.sum()) - float(left.sum()), running)
