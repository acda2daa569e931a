"""Counts the service that each user got and how long their answers are, for fairness and the output reserve.

Service: the virtual token counter [VTC], where a token of output weighs as much as two of prompt. Expected output: a
decayed mean per user, else over all users of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

OUTPUT_WEIGHT = 2.0  # of a generated token, in prefilled ones
DECAY = 0.1  # weight of the latest output in the mean
FIRST_GUESS_TOKENS = 256.0  # expected output before anything has finished
MAX_USERS = 4096  # remembered; users without a request are forgotten first, the longest absent of them first


@dataclass(slots=True)
class _User:
    requests: int = 0  # waiting or running
    service: float = 0.0
    output_tokens: float | None = None
    turn_s: float = 0.0  # when its latest request was admitted


class Fairness:
    """Owns what is remembered of users: service, length of answers, requests here."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, _User] = OrderedDict()
        self._present: set[str] = set()  # with a request here
        self._output_tokens = FIRST_GUESS_TOKENS

    def expected_output(self, name: str, max_tokens: int) -> float:
        """Returns the expected length in tokens of a new answer to this user, at most `max_tokens`."""
        user = self._users.get(name)
        mean = self._output_tokens if user is None or user.output_tokens is None else user.output_tokens
        return min(mean, float(max_tokens))

    def leads(self, names: Iterable[str]) -> list[float]:
        """Returns the service of each user beyond that of the least served user with a request, in prefilled tokens."""
        least = self._least_service()
        return [self._users[name].service - least for name in names]

    def heading_since(self, name: str, arrived_s: float) -> float:
        """Returns since when a request that arrived at `arrived_s` can have been the first of its user's line.

        That is its arrival, or the user's latest admission where it is later.
        """
        return max(arrived_s, self._users[name].turn_s)

    def join(self, name: str) -> None:
        """Counts a request that arrived. A user who comes back gets no credit for the time away."""
        user = self._users.setdefault(name, _User())
        if user.requests == 0:
            user.service = max(user.service, self._least_service())
        user.requests += 1
        self._present.add(name)
        self._users.move_to_end(name)
        self._forget()

    def leave(self, name: str) -> None:
        """Counts a request of the user as gone."""
        user = self._users[name]
        user.requests -= 1
        if not user.requests:
            self._present.remove(name)

    def take_turn(self, name: str, now_s: float) -> None:
        """Notes when a request of the user was admitted."""
        self._users[name].turn_s = now_s

    def serve(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds tokens that were computed for the user to their service."""
        self._users[name].service += prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def finish(self, name: str, output_tokens: int) -> None:
        """Adds the length of an answer that ended by itself to the means of the user and of all."""
        user = self._users[name]
        mean = self._output_tokens if user.output_tokens is None else user.output_tokens
        user.output_tokens = mean + DECAY * (output_tokens - mean)
        self._output_tokens += DECAY * (output_tokens - self._output_tokens)

    def _least_service(self) -> float:
        return min((self._users[name].service for name in self._present), default=0.0)

    def _forget(self) -> None:
        if len(self._users) > MAX_USERS and len(self._present) < len(self._users):
            del self._users[next(name for name in self._users if name not in self._present)]

    def check_integrity(self, requests: dict[str, int]) -> None:
        """Asserts that the users have exactly these requests here."""
        assert {name: user.requests for name, user in self._users.items() if user.requests} == requests
        assert self._present == set(requests)
        assert len(self._users) <= MAX_USERS + len(requests)
