"""Divides an engine fairly: counts the service of principals and users, orders the queue, bounds steps of many tokens.

Service is the virtual token counter [VTC]: a token of output weighs as much as two of prompt. Waiting requests run
shortest job first [Gimbal, Algorithm 2], with linear aging where the source has a threshold. The reasons and the bound
on starvation: docs/design/queue.md; on steps: docs/design/engine.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Literal

import numpy as np

from edgemoe.types.arrays import IntArray
from edgemoe.types.request import Identity

OUTPUT_WEIGHT = 2.0  # of a generated token, in prefilled ones
DECAY = 0.1  # weight of the latest output in the mean
FIRST_GUESS_TOKENS = 256.0  # expected output before anything has finished
# Remembered at once; those without a request are forgotten first, the longest absent of them first.
MAX_PRINCIPALS = 1024
MAX_USERS = 128  # of a principal
MAX_LONG_STEPS = 16.0  # that a principal may have saved, see `StepShares`


@dataclass(slots=True)
class ServiceAccount:
    """Service, requests and answer length of a principal, or of one of its users."""

    requests: int = 0  # waiting or running
    service: float = 0.0
    turn_s: float = 0.0  # when its latest request was admitted
    output_tokens: float | None = None  # of a user
    users: ServiceAccounts | None = field(default=None, repr=False)  # of a principal
    # See `StepShares`. Steps that it may still lengthen and steps in which it alone decoded.
    # Steps of others, up to which it has earned long steps.
    long_steps: float = MAX_LONG_STEPS
    steps_alone: int = 0
    others_steps: int = 0


class ServiceAccounts:
    """Owns the accounts of all principals, or of one principal's users."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._known: OrderedDict[str, ServiceAccount] = OrderedDict()
        self._present: set[str] = set()  # with a request here

    def __getitem__(self, name: str) -> ServiceAccount:
        return self._known[name]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, name: str) -> ServiceAccount | None:
        """Returns the account of this name, if it is remembered."""
        return self._known.get(name)

    def service_ahead(self, names: Iterable[str]) -> list[float]:
        """Returns each one's service above the least served one with a request, in prefilled tokens."""
        least = self._least_service()
        return [self._known[name].service - least for name in names]

    def head_of_line_since(self, name: str, arrived_s: float) -> float:
        """Returns the time from which a request that arrived at `arrived_s` may have headed its line.

        That is its arrival or the line's latest admission, the later of both.
        """
        return max(arrived_s, self._known[name].turn_s)

    def add_request(self, name: str) -> ServiceAccount:
        """Counts an arrived request. An account that was idle gets no credit for its idle time."""
        account = self._known.setdefault(name, ServiceAccount())
        if account.requests == 0:
            account.service = max(account.service, self._least_service())
        account.requests += 1
        self._present.add(name)
        self._known.move_to_end(name)
        self._forget()
        return account

    def remove_request(self, name: str) -> None:
        """Counts a request as gone."""
        account = self._known[name]
        account.requests -= 1
        if not account.requests:
            self._present.remove(name)
            self._forget()

    def check_integrity(self, requests: dict[str, int]) -> None:
        """Raises AssertionError unless exactly these names have requests here, as many as stated."""
        assert {name: account.requests for name, account in self._known.items() if account.requests} == requests
        assert self._present == set(requests)
        assert len(self._known) <= self.most + len(requests)

    def _forget(self) -> None:
        if len(self._known) > self.most and len(self._present) < len(self._known):
            del self._known[next(name for name in self._known if name not in self._present)]

    def _least_service(self) -> float:
        return min((self._known[name].service for name in self._present), default=0.0)


class FairnessAccounts:
    """Owns the accounts of principals and users: service, length of answers, requests here."""

    def __init__(self) -> None:
        self.principals = ServiceAccounts(MAX_PRINCIPALS)
        self._output_tokens = FIRST_GUESS_TOKENS

    def users(self, principal: str) -> ServiceAccounts:
        """Returns the accounts of a principal's users."""
        users = self.principals[principal].users
        assert users is not None
        return users

    def expected_output(self, identity: Identity, max_tokens: int) -> float:
        """Returns the expected length in tokens of a new answer to this user, at most `max_tokens`."""
        principal = self.principals.find(identity.principal)
        user = principal.users.find(identity.user) if principal is not None and principal.users is not None else None
        mean = self._output_tokens if user is None or user.output_tokens is None else user.output_tokens
        return min(mean, float(max_tokens))

    def add_request(self, identity: Identity) -> None:
        """Counts a request that arrived."""
        principal = self.principals.add_request(identity.principal)
        if principal.users is None:
            principal.users = ServiceAccounts(MAX_USERS)
        principal.users.add_request(identity.user)

    def remove_request(self, identity: Identity) -> None:
        """Counts a request as gone."""
        self.users(identity.principal).remove_request(identity.user)
        self.principals.remove_request(identity.principal)

    def note_admission(self, identity: Identity, now_s: float) -> None:
        """Records the time at which a request of the user was admitted."""
        for account in self._accounts(identity):
            account.turn_s = now_s

    def add_service(self, identity: Identity, prompt_tokens: int, output_tokens: int) -> None:
        """Adds tokens that were computed for the user to its service and its principal's."""
        for account in self._accounts(identity):
            account.service += prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def add_answer(self, identity: Identity, output_tokens: int) -> None:
        """Adds the length of an answer that ended by itself to the means of the user and of all."""
        user = self.users(identity.principal)[identity.user]
        mean = self._output_tokens if user.output_tokens is None else user.output_tokens
        user.output_tokens = mean + DECAY * (output_tokens - mean)
        self._output_tokens += DECAY * (output_tokens - self._output_tokens)

    def check_integrity(self, requests: Counter[Identity]) -> None:
        """Raises AssertionError unless exactly these users have requests here, as many as stated."""
        principals: dict[str, dict[str, int]] = {}
        for identity, count in requests.items():
            principals.setdefault(identity.principal, {})[identity.user] = count
        self.principals.check_integrity({principal: sum(users.values()) for principal, users in principals.items()})
        for principal, users in principals.items():
            self.users(principal).check_integrity(users)

    def _accounts(self, identity: Identity) -> tuple[ServiceAccount, ServiceAccount]:
        return self.principals[identity.principal], self.users(identity.principal)[identity.user]


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


QueueRule = Literal["sjf", "fcfs"]
Floats = np.typing.NDArray[np.float64]

LEAD_S = 10.0  # a user's lead in service counts for at most this much aging


def queue_order(prefill_tokens: IntArray, waited_s: Floats, rule: QueueRule, tokens_per_s: float) -> IntArray:
    """Returns the order in which waiting requests [n] should be admitted, a permutation of 0..n-1.

    The length of a job is its prompt tokens outside the prefix cache.

    `prefill_tokens` [n] and `waited_s` [n] lie in order of arrival, which decides between equals. A second of waiting
    makes up for `tokens_per_s` tokens.
    """
    if rule == "fcfs":
        return np.argsort(-waited_s, kind="stable")
    return np.argsort(prefill_tokens - tokens_per_s * waited_s, kind="stable")


def head_keys(head_tokens: IntArray, lead_tokens: Floats, heading_s: Floats, tokens_per_s: float) -> Floats:
    """Returns the sorting keys of the heads of the users' lines [u]; the head with the lowest key is next.

        key = prefill tokens + lead - k * seconds at the head of its user's line                              (1)

    `head_tokens` [u] is the prefill of each line's head. `lead_tokens` [u] is the user's service beyond the least
    served user's. `heading_s` [u] is the time for which a request has been its line's head. k is `tokens_per_s`.
    """
    lead = np.minimum(lead_tokens, LEAD_S * tokens_per_s)
    return np.asarray(head_tokens + lead - tokens_per_s * heading_s, dtype=np.float64)
