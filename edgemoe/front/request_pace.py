"""Decides whether a request leaves an engine that stands still, or that is far slower than others would be.

The pace of a request is its time per token over windows of WINDOW_S. docs/design/requests.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.policy.routing.least_loaded import TargetLoad

WINDOW_S = 2.0
SLOW_WINDOWS = 2  # in a row
SLOWER = 10.0  # times another engine's time per token
LEAST_S = 0.1  # per token; faster requests stay
WORTH_S = 5.0  # that the rest of the answer must take
MOST_EVASIONS = 2  # of one request; it may be the cause itself


@dataclass(slots=True)
class RequestPace:
    """The pace of one request's present attempt, and the number of engines that it has left."""

    evasions: int = 0
    token_s: float = 0.0  # time per token in the last whole window; 0 before one
    slow_windows: int = 0  # up to now
    _began_s: float = 0.0  # of the present window
    _tokens: int = -1  # in that; -1 before the first token of the attempt

    def restart(self) -> None:
        """Begins with another attempt."""
        self._tokens, self.slow_windows, self.token_s = -1, 0, 0.0

    def add_token(self, now_s: float) -> None:
        """Adds a token of the present attempt to the window."""
        self._tokens += 1
        if not self._tokens:
            self._began_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether the present window is over."""
        return self._tokens >= 0 and now_s - self._began_s >= WINDOW_S

    def is_slow(self, now_s: float, loads: Sequence[TargetLoad], left_tokens: float) -> bool:
        """Whether one of these engines with a free slot would compute the rest far sooner. Ends a due window."""
        if not self.is_due(now_s):
            return False
        self.token_s = (now_s - self._began_s) / max(1, self._tokens)
        self._began_s, self._tokens = now_s, 0
        others_s = [load.step_s for load in loads if load.requests < load.slots and load.step_s]
        is_slower = self.token_s > max(LEAST_S, SLOWER * min(others_s, default=float("inf")))
        self.slow_windows = self.slow_windows + 1 if is_slower else 0
        return self.slow_windows >= SLOW_WINDOWS and left_tokens * self.token_s > WORTH_S
