"""Remembers requests that engines have ended with, and refuses them for a time when they come again.

A request is known by its principal, prompt and grammar. All requests of a principal with several such
ones are refused for a shorter time. Everybody else is untouched.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable

from edgemoe.errors import RequestQuarantined
from edgemoe.types.principal import Principal
from edgemoe.types.request import Request

log = logging.getLogger(__name__)

REQUEST_S = 3600.0  # that a request is refused after an engine ended with it
PRINCIPAL_S = 600.0  # that all of a principal's requests are refused
MAX_FATAL = 3  # different requests of a principal within REQUEST_S, from which on it is refused
MAX_REQUESTS = 1024  # remembered, the latest ones
DIGEST_BYTES = 16
RequestKey = tuple[Principal, bytes]


class RequestQuarantine:
    """Owns the table of fatal requests."""

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
