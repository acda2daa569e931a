"""What the gates chose in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class StepMeta:
    """What the engine knows of a step before it runs: S sequences with T tokens in all."""

    requests: tuple[str, ...]  # [S] request ids
    query_lens: IntArray  # [S] tokens that each contributed
    decode: npt.NDArray[np.bool_]  # [S] true where the sequence was decoding
    tokens: IntArray  # [T] input token ids
    positions: IntArray  # [T]
    conversations: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[S] `conversation_of` each one's whole prompt, what the prefix cache supplied included; empty where unknown."""


@dataclass(frozen=True, slots=True)
class StepRouting:
    """What the gates chose in one step: all that cache policy, predictors and recorder observe."""

    meta: StepMeta
    ids: npt.NDArray[np.int16]  # [L, T, k]
    weights: FloatArray  # [L, T, k]
    hints: dict[int, FloatArray]  # distance in layers, 0 is its own gate -> [L, T, E]; empty where not collected
    step_s: float  # wall time of the step
    stall_s: float  # part of step_s that was spent waiting for experts
    hidden: FloatArray | None = None  # [L, T, H] what each layer's experts were given; None where not collected
