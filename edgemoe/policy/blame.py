"""Which request engines die of, as far as one request's own history tells.

Three engines in a row that end at about the same token of a request are its doing. So are five that end however far
apart, unless it once got further than in any attempt that ended with its engine: who fells an engine every so many
tokens does not. Requests that were merely there when it happened are told apart by going on one at a time, see
`RequestLog`.
"""

from __future__ import annotations

from dataclasses import dataclass

FRUITLESS_ATTEMPTS = 3  # engines that a request may see die without getting further in between
# An attempt gets further by more tokens than this. Fewer may be what a dying engine never handed over, or what comes
# out of each engine before the step that ends it.
FURTHER_TOKENS = 8
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
        return f"{FRUITLESS_ATTEMPTS} engines in a row ended at about the same token of this request"

    @property
    def suspect(self) -> bool:
        """Whether it may be to blame."""
        return self.deaths > 0 or self.allowed <= 1

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

    def end_with_engine(self) -> None:
        """The engine has died."""
        self.longest = max(self.longest, self.tokens)
        self.deaths += 1

    def explain(self) -> None:
        """Another request was to blame for the deaths so far."""
        self.deaths = 0
