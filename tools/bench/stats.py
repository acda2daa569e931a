"""What several benchmarks work out of their figures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.stats import t


def interval(values: npt.ArrayLike) -> tuple[float, float]:
    """Mean and half of the 95 % interval, by Student's t; two values at least."""
    array = np.asarray(values, np.float64)
    spread = array.std(ddof=1) / array.size**0.5
    return float(array.mean()), float(t.ppf(0.975, array.size - 1) * spread)
