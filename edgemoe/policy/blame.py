"""Decides from one request's attempts whether it kills the engines that run it.

Three engines that end in a row at about the same token of a request blame it. An engine that runs no other request
counts twice. Five engines that end also blame it, if none got further than an earlier attempt.
After its first death a request is a suspect and runs alone (`RequestStateMachine`), so that no other request suffers.
"""

from __future__ import annotations

from dataclasses import dataclass

FRUITLESS_ATTEMPTS = 3  # engines that a request may see die without getting further in between
# An attempt gets further by more tokens than this. A dying engine may lose fewer, or each engine may emit fewer before
# the step that ends it.
FURTHER_TOKENS = 8
SUSPECT_DEATHS = 2  # engines that a request may see die, getting further each time, before it is suspected
DEATHS = 5  # engines that a request may see die without getting further than ever before a death


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
