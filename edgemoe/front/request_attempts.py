"""Keeps the attempts of each request: whether it kills the engines that run it, then is refused, or is too slow.

Three engines that end in a row at about the same token of a request blame it. An engine that runs no other request
counts twice. Five engines that end also blame it, if none got further than an earlier attempt. After its first death a
request is a suspect and runs alone. The pace is the time per token over windows of WINDOW_S (docs/design/requests.md).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgemoe.errors import RequestQuarantined
from edgemoe.policy.routing.least_loaded import TargetLoad
from edgemoe.types.request import Principal, Request

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


log = logging.getLogger(__name__)

REQUEST_S = 3600.0  # that a request is refused after an engine ended with it
PRINCIPAL_S = 600.0  # that all of a principal's requests are refused
MAX_FATAL = 3  # different requests of a principal within REQUEST_S, from which on it is refused
MAX_REQUESTS = 1024  # remembered, the latest ones
DIGEST_BYTES = 16
RequestKey = tuple[Principal, bytes]


class RequestQuarantine:
    """Remembers requests that engines have ended with, and refuses them for a time when they come again.

    A request is known by its principal, prompt and grammar. All requests of a principal with several such ones are
    refused for a shorter time. Everybody else is untouched.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._fatal: OrderedDict[RequestKey, float] = OrderedDict()  # when each was last given up, the oldest first
        self._by_principal = Counter[Principal]()
        self._refused_until_s: dict[Principal, float] = {}

    def add(self, request: Request) -> None:
        """Remembers a request that was given up because engines ended with it."""
        self._forget_old()
        key, now_s = _key_of(request), self._now()
        if self._fatal.pop(key, None) is None:
            self._by_principal[key[0]] += 1
        self._fatal[key] = now_s
        if self._by_principal[key[0]] >= MAX_FATAL:
            self._refused_until_s[key[0]] = now_s + PRINCIPAL_S
        log.warning("engines ended with a request; it is refused for a time", extra=self.describe())
        if len(self._fatal) > MAX_REQUESTS:
            self._forget(next(iter(self._fatal)))

    def check(self, request: Request) -> None:
        """Raises RequestQuarantined for a request, or a principal, that is refused now."""
        principal = request.identity.principal
        if not self._by_principal[principal]:
            return
        self._forget_old()
        now_s = self._now()
        if (left_s := self._refused_until_s.get(principal, 0.0) - now_s) > 0.0:
            why = f"engines ended with {self._by_principal[principal]} requests of this key or user"
            raise RequestQuarantined(f"{why}; it is served again in {left_s:.0f} s", retry_after_s=left_s)
        if (added_s := self._fatal.get(_key_of(request))) is not None:
            left_s = added_s + REQUEST_S - now_s
            why = "engines ended with this prompt before"
            raise RequestQuarantined(f"{why}; it is tried again in {left_s:.0f} s", retry_after_s=left_s)

    def describe(self) -> dict[str, int]:
        """Returns how many requests and principals are refused now."""
        self._forget_old()
        return {"requests": len(self._fatal), "principals": len(self._refused_until_s)}

    def check_integrity(self) -> None:
        """Raises AssertionError where the table contradicts itself."""
        assert self._by_principal == Counter(principal for principal, _ in self._fatal)
        assert self._refused_until_s.keys() <= self._by_principal.keys()
        assert len(self._fatal) <= MAX_REQUESTS

    def _forget_old(self) -> None:
        now_s = self._now()
        while self._fatal and next(iter(self._fatal.values())) + REQUEST_S <= now_s:
            self._forget(next(iter(self._fatal)))
        self._refused_until_s = {who: until_s for who, until_s in self._refused_until_s.items() if until_s > now_s}

    def _forget(self, key: RequestKey) -> None:
        del self._fatal[key]
        self._by_principal[key[0]] -= 1
        if not self._by_principal[key[0]]:
            del self._by_principal[key[0]]
            self._refused_until_s.pop(key[0], None)


def _key_of(request: Request) -> RequestKey:
    digest = hashlib.blake2b(array("q", request.prompt).tobytes(), digest_size=DIGEST_BYTES, person=b"edgemoe fatal")
    digest.update((request.sampling.grammar or "").encode(errors="surrogatepass"))
    return request.identity.principal, digest.digest()
