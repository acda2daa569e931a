"""Runs single stages of a decode step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.jit.object_cache import Code
from edgemoe.kernels.cpu.decode_step import CHUNKS, STAGE, STEP
from edgemoe.kernels.cpu.runtime import Kernels


def new_step(tokens: int, **values: int) -> npt.NDArray[Any]:
    """Returns a STEP record with these fields."""
    step: npt.NDArray[Any] = np.zeros(1, STEP)
    for name, value in {"tokens": tokens, **values}.items():
        step[name] = value
    return step


def run_stage(kernels: Kernels, step: npt.NDArray[Any], code: Code, job: npt.NDArray[Any], each: int = 1) -> None:
    """Runs a stage `each` times for each token."""
    stage = np.zeros(1, STAGE)
    stage["kind"], stage["code"], stage["job"], stage["each"] = (
        CHUNKS,
        kernels.stage_address(code),
        job.ctypes.data,
        each,
    )
    step["stages"], step["stage_count"] = stage.ctypes.data, 1
    kernels.step(step.ctypes.data)
