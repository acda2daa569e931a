"""The full cache policy: ranks by predicted time to next use. Synchronous; the controller runs it beside the engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.experts.predict.next_use import Ids, NextUsePredictor
from edgemoe.types.arrays import FloatArray, IntArray


class LearnedPolicy:
    """Implements `types.CachePolicy`.

    Who knows which sequence chose what brackets a step with `begin` and `end`, and calls `route` before each `touch`.
    Otherwise a step begins where the layers begin anew, and what it needs counts as one sequence's choice.
    """

    foretells = True  # ranks tell what to fetch, not only what to drop

    def __init__(self, layers: int, experts: int, top_k: int, seed: int = 0) -> None:
        self.predictor = NextUsePredictor(layers, experts, top_k, seed)
        self._routed: npt.NDArray[np.integer] | None = None
        self._ids: Ids = np.empty((0, 0, 0), np.int16)  # [L, S, k] of the running step
        self._bracketed = False
        self._layer = layers  # the one that ran last; `layers` before the first step

    def begin(self, sequences: Sequence[Hashable]) -> None:
        """A step of these sequences, one token each."""
        self._bracketed = True
        self._open(sequences, self.predictor.top_k)

    def route(self, ids: npt.NDArray[np.integer]) -> None:
        """What each sequence chooses in the layer that is touched next, [S, k]."""
        self._routed = ids

    def end(self) -> None:
        """The step that was begun is over."""
        self.predictor.end()
        self.predictor.work()

    def touch(self, layer: int, experts: IntArray) -> None:
        if not self._bracketed:
            if layer <= self._layer:
                self._turn()
            self._layer = layer
        if self._routed is not None:
            self._ids[layer] = self._routed
        else:
            self._ids[layer, 0] = np.resize(experts, self._ids.shape[2])
        self._routed = None

    def rank(self, layer: int) -> FloatArray:
        """Log odds of decay^time to the next need, [L, E]."""
        self.predictor.follow()
        self.predictor.work()
        return self.predictor.ranks

    def _open(self, sequences: Sequence[Hashable], width: int) -> None:
        self._ids = np.full((self.predictor.layers, len(sequences), width), -1, np.int16)
        self.predictor.begin(sequences, self._ids, np.arange(len(sequences)))

    def _turn(self) -> None:
        if self._layer < self.predictor.layers:
            self.end()
        self._open((0,), self.predictor.experts)
