"""Compiles what the controller's thread runs, before the first step is learned from."""

from __future__ import annotations

import numpy as np

from edgemoe.experts.predict.fusion import compile_blend
from edgemoe.experts.predict.next_use import NextUsePredictor


def compile_learning(experts: int, top_k: int) -> None:
    """Has numba compile all that a step runs, on a small predictor that is thrown away."""
    small = NextUsePredictor(2, experts, top_k)
    chosen = np.arange(top_k)
    for _ in range(3):
        small.begin(("",))
        for layer in range(2):
            small.see(layer, chosen[None, :], chosen)
        small.end()
    small.glance(("",), np.tile(chosen, (2, 1, 1)))
    small.learner.compile()
    compile_blend()
