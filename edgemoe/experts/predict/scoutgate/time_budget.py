"""Holds the processor time of ScoutGate's thread below a share of the steps' time."""

from __future__ import annotations

from collections.abc import Callable

from edgemoe.types.step import StepRouting

SHARE = 0.03  # of a step's time that forecasting may cost, on average,
STALL_SHARE = 0.2  # but of its stall, in which a core has nothing else to do
SAVED_STEPS = 8  # of that may be saved up


class TimeBudget:
    """Counts what is spent against what the steps allow. For the thread whose time `clock` tells."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent_s = self._credit_s = 0.0  # up to the latest step's end, and what may be spent from there on

    @property
    def overdrawn(self) -> bool:
        """Returns whether more was spent, up to the latest step's end, than its share."""
        return self._credit_s < 0

    def begin(self) -> None:
        """Starts anew; what was spent before does not count."""
        self._spent_s, self._credit_s = self._clock(), 0.0

    def end_step(self, routing: StepRouting) -> None:
        """Adds a step's share, and takes off what was spent since the step before ended."""
        spent_s, self._spent_s = self._spent_s, self._clock()
        share_s = SHARE * (routing.step_s - routing.stall_s) + STALL_SHARE * routing.stall_s
        self._credit_s = min(self._credit_s + share_s - (self._spent_s - spent_s), SAVED_STEPS * share_s)
