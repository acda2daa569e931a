"""Fits what a decode step takes to the distinct experts that it loads, from sums that an engine counts anyway.

    seconds = step_s + expert_s * experts

by least squares over means of stretches of steps, older ones fading. What grows with the batch beside experts counts as
theirs: that is load, and a request brings it, too. One more point at no experts holds the line where all stretches were
alike: it says that they are half of the time.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.routing.by_experts import DecodeTimes

FADE = 0.98  # of older stretches, with each new one
ASSUMED = 0.1  # weight of the assumed point, in stretches
EXPERTS_SHARE = 0.5  # of a step, where nothing else is known


class StepTimes:
    """Owns the sums."""

    def __init__(self) -> None:
        self._last = np.zeros(3)  # steps, seconds, experts counted so far
        self._sums = np.zeros(5)  # weight, x, y, x * x, x * y of means of experts x and seconds y

    def look(self, steps: float, seconds: float, experts: float) -> None:
        """Takes counts since the start."""
        now = np.array([steps, seconds, experts])
        count, took, loaded = now - self._last
        if count > 0:
            x, y = loaded / count, took / count
            self._sums = FADE * self._sums + np.array([1.0, x, y, x * x, x * y])
            self._last = now

    def times(self) -> DecodeTimes:
        """Returns what was found; 0 of both before any step."""
        weight, x, y, xx, xy = self._sums.tolist()
        if not weight or not x:
            return DecodeTimes(0.0, 0.0)
        loaded, mean_s = x / weight, y / weight
        weight, y = weight + ASSUMED, y + ASSUMED * (1 - EXPERTS_SHARE) * mean_s
        slope = (weight * xy - x * y) / max(weight * xx - x * x, 1e-12)
        expert_s = min(max(slope, 0.0), mean_s / loaded)
        return DecodeTimes(max(0.0, mean_s - expert_s * loaded), expert_s)  # which may round to less than 0
