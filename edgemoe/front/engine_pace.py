"""Measures the time of this box's decode steps, lately and usually, by its engine's figures."""

from __future__ import annotations

from collections.abc import Mapping

from edgemoe.telemetry import metrics as names

UNUSUAL = 5.0  # times the usual time
WEIGHT, UNUSUAL_WEIGHT = 0.05, 0.005  # of a measurement in the mean
STALE_S = 30.0  # after which the last measurement no longer counts


class EnginePace:
    """The mean time of decode steps of one engine after the other. `read_counters` is called several times a second."""

    def __init__(self) -> None:
        self._steps = self._seconds = 0.0
        self._usual_s = self._lately_s = 0.0
        self._seen_s = float("-inf")  # time of the last measurement

    def read_counters(self, stats: Mapping[str, float], now_s: float) -> None:
        """Takes the engine's counters."""
        steps = stats.get(names.named(names.STEPS, phase="decode"), 0.0)
        seconds = stats.get(names.named(names.STEP_SECONDS, phase="decode"), 0.0)
        if steps > self._steps and seconds > self._seconds:
            self._lately_s, self._seen_s = (seconds - self._seconds) / (steps - self._steps), now_s
            weight = WEIGHT if self._lately_s < UNUSUAL * self._usual_s else UNUSUAL_WEIGHT
            self._usual_s += (weight if self._usual_s else 1.0) * (self._lately_s - self._usual_s)
        self._steps, self._seconds = steps, seconds

    def step_s(self, now_s: float) -> float:
        """Returns the time that a step takes now; 0 before the first one."""
        return self._lately_s if now_s - self._seen_s < STALE_S else self._usual_s

    def is_usual(self, now_s: float) -> bool:
        """Whether steps take about as long as usual, as far as is known."""
        return self.step_s(now_s) <= UNUSUAL * self._usual_s
