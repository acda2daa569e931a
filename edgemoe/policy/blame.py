"""Which request engines die of, as far as one request's own history tells.

Three engines in a row that end at about the same token of a request are its doing; one without another request counts
twice. So are five that end however far apart, unless it once got further than in any attempt that ended with its
engine: who fells an engine every so many tokens does not. After its first such end a request is a suspect, and goes on
alone (`RequestStateMachine`), so that those that were merely there are told apart, and nobody else sees the second end.
"""

from __future__ import annotations

from dataclasses import dataclass

FRUITLESS_ATTEMPTS = 3  # engines that a request may see die without getting further in between
# An attempt gets further by more tokens than this. Fewer may be what a dying engine never handed over, or what comes
# out of each engine before the step that ends it.
FURTHER_TOKENS = 8
SUSPECT_DEATHS = 2  # engines that a request may see die, getting further each time, before it is suspected
DEATHS = 5  # engines that a request may see die without getting further than ever before a death


@dataclass(slots=True)
class Attempts:
    """How one request's attempts went."""

    tokens: int = 0  # of the present one
    longest: int = 0  # tokens of one that ended with its engine
    fruitless: int = 0  # since it last got further, the present one included
    deaths: int = 0  # since it last got further than `longest`, or they were explained

    @property
    def allowed(self) -> int:
        """Deaths until the request is to blame, that one included; 0 where it is."""
        return max(0, min(FRUITLESS_ATTEMPTS - self.fruitless, DEATHS - self.deaths))

    @property
    def charge(self) -> str:
        """What the request is to blame for."""
        if self.deaths >= DEATHS:
            return f"{DEATHS} engines ended while they ran this request"
        return f"{self.deaths} engines in a row ended at about the same token of this request"

    @property
    def suspect(self) -> bool:
        """Whether it may be to blame, and is to go on alone."""
        return self.deaths >= SUSPECT_DEATHS or (self.deaths > 0 and self.fruitless > 0)

    def begin(self) -> None:
        """Another engine has the request."""
        self.tokens = 0
        self.fruitless += 1

    def take_back(self) -> None:
        """The present attempt ends, and no engine with it."""
        self.fruitless = max(0, self.fruitless - 1)

    def add_token(self) -> None:
        """The present attempt has got a token further."""
        self.tokens += 1
        if self.tokens > FURTHER_TOKENS:
            self.fruitless = 0
        if self.tokens > self.longest + FURTHER_TOKENS:
            self.deaths = 0

    def end_with_engine(self, alone: bool) -> None:
        """The engine has died; `alone` says that it had no other request."""
        if alone and self.tokens <= FURTHER_TOKENS:
            self.fruitless += 1
        self.longest = max(self.longest, self.tokens)
        self.deaths += 1

    def explain(self, running: bool) -> None:
        """Another request was to blame for the deaths so far. `running` says whether an engine has this one."""
        self.deaths, self.fruitless = 0, min(self.fruitless, int(running))
