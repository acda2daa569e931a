"""Keeps the record of one request's attempts: whether it kills the engines that run it, and whether one is too slow.

Three engines that end in a row at about the same token of a request blame it. An engine that runs no other request
counts twice. Five engines that end also blame it, if none got further than an earlier attempt. After its first death a
request is a suspect and runs alone. The pace is the time per token over windows of WINDOW_S (docs/design/requests.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.policy.routing.least_loaded import TargetLoad

FRUITLESS_ATTEMPTS = 3  # engines that a request may see die without getting further in between
# An attempt gets further by more tokens than this. A dying engine may lose fewer, or each engine may emit fewer before
# the step that ends it.
FURTHER_TOKENS = 8
SUSPECT_DEATHS = 2  # engines that a request may see die, getting further each time, before it is suspected
DEATHS = 5  # engines that a request may see die without getting further than ever before a death

WINDOW_S = 2.0
SLOW_WINDOWS = 2  # in a row
SLOWER = 10.0  # times another engine's time per token
LEAST_S = 0.1  # per token; faster requests stay
WORTH_S = 5.0  # that the rest of the answer must take
MOST_EVASIONS = 2  # of one request; it may be the cause itself


@dataclass(slots=True)
class AttemptHistory:
    """Tokens and deaths of one request's attempts."""

    tokens: int = 0  # of the present one
    longest: int = 0  # tokens of one that ended with its engine
    fruitless: int = 0  # since it last got further, the present one included
    deaths: int = 0  # since it last got further than `longest`, or they were explained

    @property
    def allowed(self) -> int:
        """Counts the deaths until the request bears the blame, that one included; 0 once it does."""
        return max(0, min(FRUITLESS_ATTEMPTS - self.fruitless, DEATHS - self.deaths))

    @property
    def charge(self) -> str:
        """Describes the deaths that the request bears the blame for."""
        if self.deaths >= DEATHS:
            return f"{DEATHS} engines ended while they ran this request"
        return f"{self.deaths} engines in a row ended at about the same token of this request"

    @property
    def suspect(self) -> bool:
        """Whether the request may bear the blame, and must run alone."""
        return self.deaths >= SUSPECT_DEATHS or (self.deaths > 0 and self.fruitless > 0)

    def begin(self) -> None:
        """Begins an attempt on another engine."""
        self.tokens = 0
        self.fruitless += 1

    def take_back(self) -> None:
        """Ends the present attempt without a death."""
        self.fruitless = max(0, self.fruitless - 1)

    def add_token(self) -> None:
        """Adds a token to the present attempt."""
        self.tokens += 1
        if self.tokens > FURTHER_TOKENS:
            self.fruitless = 0
        if self.tokens > self.longest + FURTHER_TOKENS:
            self.deaths = 0

    def end_with_engine(self, alone: bool) -> None:
        """Ends the attempt with the death of its engine; `alone` if that ran no other request."""
        if alone and self.tokens <= FURTHER_TOKENS:
            self.fruitless += 1
        self.longest = max(self.longest, self.tokens)
        self.deaths += 1

    def explain(self, running: bool) -> None:
        """Clears the deaths, which another request caused. `running` says whether an engine has this one."""
        self.deaths, self.fruitless = 0, min(self.fruitless, int(running))


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
