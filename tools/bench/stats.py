"""Statistics that several benchmarks share."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
from scipy.stats import t


def interval(values: npt.ArrayLike) -> tuple[float, float]:
    """Returns the mean and half of the 95 % interval, by Student's t, of at least two values."""
    array = np.asarray(values, np.float64)
    spread = array.std(ddof=1) / array.size**0.5
    return float(array.mean()), float(t.ppf(0.975, array.size - 1) * spread)


def core_s(pid: int) -> float:
    """Returns the processor time of a process so far, in seconds of a core."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock of another process, see clock_getcpuclockid(3)
