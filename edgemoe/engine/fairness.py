"""Counts the service that principals and their users got and how long answers are, for fairness and the output reserve.

Service is the virtual token counter [VTC]: a token of output weighs as much as two of prompt. It is counted for each
principal and for each of its users. Expected output is a decayed mean per user, else over all users of the model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgemoe.types.principal import Identity

OUTPUT_WEIGHT = 2.0  # of a generated token, in prefilled ones
DECAY = 0.1  # weight of the latest output in the mean
FIRST_GUESS_TOKENS = 256.0  # expected output before anything has finished
# Remembered at once; those without a request are forgotten first, the longest absent of them first.
MAX_PRINCIPALS = 1024
MAX_USERS = 128  # of a principal
MAX_LONG_STEPS = 16.0  # that a principal may have saved, see `step_shares`


@dataclass(slots=True)
class ServiceAccount:
    """Service, requests and answer length of a principal, or of one of its users."""

    requests: int = 0  # waiting or running
    service: float = 0.0
    turn_s: float = 0.0  # when its latest request was admitted
    output_tokens: float | None = None  # of a user
    users: ServiceAccounts | None = field(default=None, repr=False)  # of a principal
    # See `step_shares`. Steps that it may still lengthen and steps in which it alone decoded.
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
