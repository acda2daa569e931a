"""Bounds how much other principals' work lengthens the steps of a stream (reasons: docs/design/engine.md).

`StepPrices` learns the duration of a step by its tokens. `StepShares` divides a step's tokens among principals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, log

from edgemoe.engine.fairness import MAX_LONG_STEPS, ServiceAccounts

MEMORY = 0.9  # weight of the past at each new step of a size
GROWTH = 0.5  # of a step's duration with the logarithm of its tokens, until two sizes are known
# By tokens; a step counts for the largest size that is not above it.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
STEPS_OF_OTHERS = 512  # that earn a principal a step beyond the bound


class StepPrices:
    """Estimates a step's duration from the mean durations of recent steps by size, which grows with the size."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # size -> log of tokens, log of seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Adds a step's duration. One that is longer than usual counts at most twice its usual duration."""
        if tokens < 1 or seconds <= 0.0:
            return
        size, new = bisect_left(SIZES, tokens + 1), (log(tokens), log(seconds))
        if (old := self._means.get(size)) is None:
            self._means[size] = new
            return
        late = min(new[1], old[1] + log(2.0))
        self._means[size] = MEMORY * old[0] + (1 - MEMORY) * new[0], MEMORY * old[1] + (1 - MEMORY) * late

    def tokens_within(self, stretch: float, tokens: int) -> int:
        """Returns how many tokens a step may have to take at most `stretch` times as long as one of `tokens`."""
        points = self._points()
        if not points:
            return tokens
        longest = self._seconds_log(points, log(tokens)) + log(stretch)
        above = next((i for i, (_, seconds) in enumerate(points) if seconds > longest), len(points))
        if above == 0:
            at = points[0][0] - (points[0][1] - longest) / self._slope(points, 0)
        elif above == len(points):  # as if each further token cost as much as all so far do in the mean
            at = points[-1][0] + longest - points[-1][1]
        else:
            (low, short), (high, long) = points[above - 1 : above + 1]
            at = low + (high - low) * (longest - short) / (long - short)
        return max(tokens, int(exp(min(at, log(SIZES[-1]))) + 1e-6))

    def _points(self) -> list[tuple[float, float]]:
        """Returns log tokens and log seconds, both growing: no step takes longer than a larger one."""
        points: list[tuple[float, float]] = []
        for _, (tokens, seconds) in sorted(self._means.items(), reverse=True):
            points.append((tokens, min(seconds, points[-1][1]) if points else seconds))
        return points[::-1]

    def _seconds_log(self, points: list[tuple[float, float]], tokens_log: float) -> float:
        for i, (tokens, seconds) in enumerate(points):
            if tokens >= tokens_log:
                if i == 0:
                    return seconds - self._slope(points, 0) * (tokens - tokens_log)
                low, short = points[i - 1]
                return short + (seconds - short) * (tokens_log - low) / (tokens - low)
        return points[-1][1] + tokens_log - points[-1][0]

    def _slope(self, points: list[tuple[float, float]], at: int) -> float:
        if at + 1 >= len(points):
            return GROWTH
        (low, short), (high, long) = points[at : at + 2]
        return min(1.0, max(0.05, (long - short) / (high - low)))


class StepShares:
    """Divides steps' tokens among principals while some of them decode."""

    def __init__(self, stretch: float, prices: StepPrices) -> None:
        """Lets others lengthen a step to `stretch` times its duration without them; 0 sets no bound."""
        self.prices = prices
        self._stretch = stretch
        self.is_bounded = stretch > 0.0
        self.level = 0  # the most tokens of a principal that was cut in the last step; 0 where none had to be
        self._contended = 0  # steps in which somebody decoded

    def tokens_within_stretch(self, tokens: int) -> int:
        """Returns how many tokens a step may have without lengthening one of `tokens` beyond the bound."""
        return self.prices.tokens_within(self._stretch, tokens) if self._stretch else SIZES[-1]

    def divide(
        self, wanted: Mapping[str, int], decoding: Mapping[str, int], accounts: ServiceAccounts
    ) -> dict[str, int]:
        """Returns the most tokens of the next step for each principal that is cut; the others get all they want.

        `wanted` has the tokens that each one's sequences could compute, `decoding` its decoding sequences. Each gets
        as many as the principal with the fewest decoding sequences, and equally more while the step stays in its
        bound. A principal that has long steps left is not cut.
        """
        self.level = 0
        if not self._stretch or not decoding:
            return {}
        self._contended += 1
        if len(decoding) == 1:
            accounts[next(iter(decoding))].steps_alone += 1
        if len(wanted) == 1:
            return {}
        least = min(decoding.values())
        room = max(least * len(wanted), self.prices.tokens_within(self._stretch, least))
        self.level = level = _level(sorted(wanted.values()), room, least)
        return {
            principal: level
            for principal, tokens in wanted.items()
            if tokens > level and not self._takes_long_step(principal, accounts)
        }

    def _takes_long_step(self, principal: str, accounts: ServiceAccounts) -> bool:
        """Takes one of the principal's long steps, if it has one."""
        account = accounts[principal]
        others = self._contended - account.steps_alone
        earned = (others - min(account.others_steps, others)) / STEPS_OF_OTHERS
        account.long_steps = min(MAX_LONG_STEPS, account.long_steps + earned)
        account.others_steps = others
        if account.long_steps < 1.0:
            return False
        account.long_steps -= 1.0
        return True


def _level(wanted: list[int], room: int, least: int) -> int:
    """Returns the most tokens for each so that all together have at most `room`; at least `least`."""
    for i, tokens in enumerate(wanted):
        left = len(wanted) - i
        if tokens * left > room:
            return max(least, room // left)
        room -= tokens
    return max(least, wanted[-1])
