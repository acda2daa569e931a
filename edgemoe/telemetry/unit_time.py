"""Estimates how long a unit of something takes: a decayed mean of measurements.

Work avoids a slow path, which would then never be measured again. An estimate slower than the first assumption
therefore drifts back to that assumption while nothing is measured, until it is tried again. A slow trial restores the
slow estimate; a fast one keeps the faster estimate.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.arrays import FloatArray, IntArray

RECENT = 0.2  # weight of the newest measurement
FADE_S = 10.0  # in which an old, slow estimate loses half its distance from the first assumption


class UnitTime:
    """Estimates seconds per unit. One thread at a time may write; others may read."""

    def __init__(self, first_s: float) -> None:
        """Assumes `first_s` seconds per unit until something is measured."""
        self.mean_s = self._first_s = first_s  # as of the last measurement
        self._measured_s = 0.0  # time of the last measurement

    def at(self, now_s: float) -> float:
        """Returns the seconds per unit to expect at `now_s`."""
        slower_s = max(0.0, self.mean_s - self._first_s)
        faded: float = 1 - 0.5 ** (max(0.0, now_s - self._measured_s) / FADE_S)
        return self.mean_s - faded * slower_s

    def measure(self, unit_s: float, now_s: float) -> None:
        """Adds a measurement: a unit took `unit_s`."""
        expected_s = self.at(now_s)
        self.mean_s, self._measured_s = expected_s + RECENT * (unit_s - expected_s), now_s


TOKENS_PER_READ = 8  # tokens that an expert computes in the time of reading its weights


def work_units(offsets: IntArray) -> FloatArray:
    """Returns the cost of computing each expert [n], in reads of one expert's weights; `offsets` [n + 1]."""
    units: FloatArray = np.maximum(1.0, np.diff(offsets) / TOKENS_PER_READ).astype(np.float32)
    return units
