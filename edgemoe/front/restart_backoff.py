"""How long to wait between the death of an engine and the start of the next, and when that is too often."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from edgemoe.config.settings import ServiceSettings
from edgemoe.errors import EngineUnavailable

FIRST_DELAY_S = 0.1  # before a second start; doubles with each death within the window
LONGEST_DELAY_S = 15.0
WINDOW_S = 300.0  # in which deaths count
DOUBLINGS = 10  # more than lead to the longest


class Pause(NamedTuple):
    """The wait before the next start."""

    delay_s: float
    gives_up: bool  # until then: no request is kept waiting for so long


class RestartBackoff:
    """The deaths within the window that no request has been blamed for."""

    def __init__(self, service: ServiceSettings) -> None:
        self._service = service
        self._deaths: deque[float] = deque()
        self._blamed = 0  # requests, as of the last death

    def after_death(self, now: float, blamed: int) -> Pause:
        """Longer each time, and for the window to move on after too many deaths.

        `blamed` is how many requests have been given up so far as what engines die of.
        """
        service, deaths = self._service, self._deaths
        if blamed != self._blamed:  # what came before is explained, and over
            self._blamed = blamed
            deaths.clear()
        deaths.append(now)
        while deaths and deaths[0] < now - WINDOW_S:
            deaths.popleft()
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(len(deaths) - 1, DOUBLINGS))
        if len(deaths) > service.max_restarts:
            return Pause(max(LONGEST_DELAY_S, deaths[0] + WINDOW_S - now), gives_up=True)
        return Pause(delay_s, gives_up=False)


def keeps_failing(why: str, left_s: float) -> EngineUnavailable:
    """Returns what clients are told while there is no next start for so long."""
    reason = f"the engine keeps failing ({why}) and is started again in {left_s:.0f} s; see the log"
    return EngineUnavailable(reason, code="engine_failed", retry_after_s=left_s)
