"""The learned cache policy without a thread: ranks by predicted time to next use. A replay drives it.

The controller runs the same foresight beside the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.experts.predict.foresight import Foresight, share_of
from edgemoe.experts.predict.fusion import Blend
from edgemoe.experts.predict.next_use import Ids, NextUsePredictor
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.step import StepMeta, StepRouting

Clock = Callable[[], float]


class LearnedPolicy:
    """Implements `types.LivePolicy`.

    Who knows which sequence chose what brackets a step with `begin` and `end`, and calls `route` before each `touch`.
    Otherwise a step begins where the layers begin anew, and what it needs counts as one sequence's choice.
    """

    foretells = True  # ranks tell what to fetch, not only what to drop

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        seed: int = 0,
        *,
        hysteresis: float = 0.1,
        clock: Clock = lambda: 0.0,
    ) -> None:
        """`clock` is the processor time that `work` has taken; by default it takes none."""
        self.foresight = Foresight(layers, hysteresis=hysteresis, clock=clock)
        self.start(NextUsePredictor(layers, experts, top_k, seed), Blend())
        self._routed: npt.NDArray[np.integer] | None = None
        self._ids: Ids = np.empty((0, 0, 0), np.int16)  # [L, S, k] of the running step
        self._bracketed = False
        self._layer = layers  # the one that ran last; `layers` before the first step

    def start(self, predictor: NextUsePredictor, blend: Blend) -> None:
        """From here on goes by these, which may have learned before."""
        self.predictor = predictor
        self.foresight.start(predictor, blend)

    def begin(self, sequences: Sequence[Hashable]) -> None:
        """A step of these sequences, one token each."""
        self._bracketed = True
        self._open(sequences, self.predictor.top_k)

    def route(self, ids: npt.NDArray[np.integer]) -> None:
        """What each sequence chooses in the layer that is touched next, [S, k]."""
        self._routed = ids

    def prefilled(self, meta: StepMeta, ids: Ids) -> None:
        """What prompts chose in the step that was begun, of its choices [L, T, k]; before it is over."""
        self.foresight.prefilled(meta, ids)

    def end(self, routing: StepRouting | None = None) -> None:
        """The step that was begun is over. Where `routing` says how long it took, work is held to a share of that."""
        learned = self.foresight.end(math.inf if routing is None else share_of(routing))
        if not learned:
            self.foresight.withdraw()
        self.foresight.work()

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
        ranks = self.foresight.rank(layer)
        self.foresight.work()
        return ranks

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.foresight.foresee(layer, experts, chance)

    def _open(self, sequences: Sequence[Hashable], width: int) -> None:
        self._ids = np.full((self.predictor.layers, len(sequences), width), -1, np.int16)
        self.foresight.begin(sequences, self._ids, np.arange(len(sequences)))

    def _turn(self) -> None:
        if self._layer < self.predictor.layers:
            self.end()
        self._open((0,), self.predictor.experts)
