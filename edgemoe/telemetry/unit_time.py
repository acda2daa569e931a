"""How long a unit of something takes: the mean of what was measured, where what was measured long ago fades.

Whoever looks slow is given nothing to do, so that nothing would measure it again. Hence a pace that is slower than what
is assumed of the unknown comes nearer to that the longer nobody has measured it, until it is tried again. A trial that
is slow puts the pace back; one that is not leaves it where it is.
"""

from __future__ import annotations

RECENT = 0.2  # weight of the newest measurement
FADE_S = 10.0  # in which half of the distance fades


class UnitTime:
    """Written by one thread at a time; others may read it."""

    def __init__(self, first_s: float) -> None:
        """`first_s` per unit is assumed until measured."""
        self.mean_s = self._first_s = first_s  # as of the last measurement
        self._measured_s = 0.0  # when that was

    def at(self, now_s: float) -> float:
        """Seconds per unit that are to be expected."""
        slower_s = max(0.0, self.mean_s - self._first_s)
        faded: float = 1 - 0.5 ** (max(0.0, now_s - self._measured_s) / FADE_S)
        return self.mean_s - faded * slower_s

    def measure(self, unit_s: float, now_s: float) -> None:
        """A unit took so long."""
        expected_s = self.at(now_s)
        self.mean_s, self._measured_s = expected_s + RECENT * (unit_s - expected_s), now_s
