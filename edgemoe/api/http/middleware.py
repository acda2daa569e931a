"""Wraps the application: request ids, keys, principals, slow answers to clients without a key, errors, counts.

A browser names the page that a request comes from (Origin) and the host it believes it talks to (Host). A request with
a valid key is trusted: no other site's page has one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgemoe.api.api_keys import ApiKey, KeyRing
from edgemoe.api.http import responding as http
from edgemoe.api.http.page import PAGE
from edgemoe.api.http.responding import ClientGone
from edgemoe.api.metrics import Metrics
from edgemoe.errors import EngineUnavailable, InvalidRequest, QueueFull, RequestError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.request import Principal, address_principal, site_of, uid_principal

log = logging.getLogger(__name__)


def principal_of_client(scope: Scope, keys: KeyRing | None, key: ApiKey | None, node: str) -> Principal:
    """Returns the principal of a request's client, which gave `key` if any. No field or header of it is looked at.

    Of a request that another box forwards, it is the one that this box tells.
    """
    if (told := scope["state"].get("told_principal")) is not None:
        return Principal(told)
    if key is not None and keys is not None:
        return keys.principal(key)
    uid = scope["state"].get("peer_uid")
    if uid is not None:
        return uid_principal(uid, node)
    return address_principal(peer_address(scope), node)


def peer_address(scope: Scope) -> str:
    """Returns the address at the other end of the connection; "" of a Unix socket."""
    client = scope.get("client")
    return client[0] if client else ""


class PlainPaths:
    """Reads the paths that clients make of a base URL: `/v1/models/`, `//v1/models`, `/v1/v1/models`, `/models`.

    Behind any other base of OpenAI's paths, as Azure, Gemini, DeepSeek and LM Studio have them, the endpoint counts.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._known = {route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._known:
            scope = {**scope, "path": self._plain(scope["path"])}
        await self._app(scope, receive, send)

    def _plain(self, path: str) -> str:
        """Returns the known path that was meant; else the path without slashes at its end."""
        whole = path = f"/{SLASHES.sub('/', path).strip('/')}"
        if whole in self._known:
            return whole
        if (short := f"{VERSION}{path}") in self._known:
            return short
        while path.startswith(f"{VERSION}{VERSION}/"):
            path = path.removeprefix(VERSION)
        if path.startswith(f"{VERSION}/") and path not in self._known and path.removeprefix(VERSION) in self._known:
            return path.removeprefix(VERSION)
        at = path.rfind(f"{VERSION}/")
        if at > 0 and path[at:] in self._known:
            return path[at:]
        if path.startswith(f"{VERSION}/") and not path.startswith(ENGINES):
            return path
        _, of_model, name = whole.partition(MODEL)
        if of_model and not whole.startswith(LM_STUDIOS):
            return f"{VERSION}{MODEL}{name}"
        last = whole.rpartition("/")[2]
        found = (own for own in (f"{VERSION}/chat/{last}", f"{VERSION}/{last}") if self._ends_so(whole, own))
        return next(found, whole)

    def _ends_so(self, path: str, own: str) -> bool:
        return own in self._known and path.endswith(own.removeprefix(VERSION))


SLASHES = re.compile(r"/{2,}")
VERSION = "/v1"
MODEL = "/models/"  # a model's name follows
LM_STUDIOS = ("/api/v0/models/", "/api/v1/models/download/")  # paths of its own, with a name or a job behind
ENGINES = "/v1/engines/"  # OpenAI's first form: the model's name follows, as behind Azure's deployments
PER_S, AT_ONCE = 50.0, 200.0  # requests of one address without a key
ALL_PER_S, ALL_AT_ONCE = 200.0, 400.0  # of all addresses together
REFUSED = 5.0  # requests that one with a wrong key counts as
LONGEST_S = 5.0
MOST_ADDRESSES = 4096  # remembered; the one that asked longest ago is forgotten


class _Bucket:
    """Counts down from `most` requests, which come back at `per_s`."""

    __slots__ = ("_left", "_most", "_per_s", "_seen_s")

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s, self._most, self._left, self._seen_s = per_s, most, most, float("inf")

    def spend(self, cost: float, now_s: float) -> float:
        """Spends `cost` requests. Returns the seconds until the bucket has them."""
        self._left = min(self._most, self._left + self._per_s * max(0.0, now_s - self._seen_s)) - cost
        self._left, self._seen_s = max(self._left, -LONGEST_S * self._per_s), now_s
        return max(0.0, -self._left / self._per_s)


class Slowdown:
    """Counts requests by address. One for an application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = _Bucket(ALL_PER_S, ALL_AT_ONCE)
        self._left: OrderedDict[str, _Bucket] = OrderedDict()

    def delay_s(self, address: str, cost: float = 1.0) -> float:
        """Counts one request of an address. Returns how long its answer has to wait."""
        own = self._left.pop(address, None) or _Bucket(PER_S, AT_ONCE)
        self._left[address] = own
        if len(self._left) > MOST_ADDRESSES:
            self._left.popitem(last=False)
        now = self._clock()
        return max(own.spend(cost, now), self._all.spend(cost, now))


KEY_HEADERS = ("x-api-key", "api-key")  # of Anthropic's clients, and of Azure's
LAST_SEND_S = 1.0  # that the last words to a client may take
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN = ("/health", *PAGE)  # answered without a key: the state only, for monitors, and the page, which asks for a key


class RequestMiddleware:
    """Wraps the application: request ids, keys, unexpected errors, counts."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None, metrics: Metrics, node: str) -> None:
        """Takes `node`, the name of this box in its cluster; "" outside a cluster."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._slowdown, self._note = Slowdown(), RateLimitedLog(log)
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        status = 499  # the client hung up before the answer began

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers_out = MutableHeaders(scope=message)
                headers_out["x-request-id"] = headers_out["request-id"] = name  # OpenAI's and Anthropic's
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if not scope["state"].get("known"):
                await self._slow_down(scope, refused=refusal is not None)
            if refusal is not None:
                await refusal(scope, receive, numbered)
            else:
                with self._counted(scope):
                    await self._app(scope, receive, numbered)
        except QueueFull as error:
            await http.error_response(error, scope)(scope, receive, numbered)
        except ClientGone:
            log.debug("a client hung up", extra={"request": name})
        except asyncio.CancelledError:  # by the end of the daemon, which no part of an answer may end without a word
            log.warning("a request was cut off by the daemon's end", extra={"request": name})
            if status == 499:
                cut_off = EngineUnavailable("the daemon ended before this was answered", code="draining")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SEND_S):
                        await http.error_response(cut_off, scope)(scope, receive, numbered)
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error, extra={"request": name})
            if status != 499:
                raise  # part of the answer is sent: only closing the connection can show the failure
            failure = RequestError("an internal error; the log has more")
            await http.error_response(failure, scope)(scope, receive, numbered)
        finally:
            route = scope.get("route")
            self._metrics.answered(getattr(route, "path", "other"), status)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if "content-length" in headers and "transfer-encoding" in headers:  # two readers might see two requests
            twice = InvalidRequest("give Content-Length or Transfer-Encoding, not both", code="http_400")
            response = http.error_response(twice, scope)
            response.headers["connection"] = "close"
            return response
        if (coding := headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
            unread = InvalidRequest(f"a body in {coding[:40]!r} is not read; send it as it is", code="http_415")
            unread.status = 415
            response = http.error_response(unread, scope)
            response.headers["accept-encoding"], response.headers["connection"] = "identity", "close"
            return response
        known, key = self._client(scope, headers)
        scope["state"] |= {"known": known, "key": key}
        scope["state"]["principal"] = principal_of_client(scope, self._keys, key, self._node)
        if known or scope["path"] in OPEN:
            return None
        error = InvalidRequest("this listener needs `Authorization: Bearer KEY`", code="invalid_api_key")
        error.status, error.kind = 401, http.KINDS[401]
        response = http.error_response(error, scope)
        response.headers["www-authenticate"] = "Bearer"
        return response

    def _client(self, scope: Scope, headers: Headers) -> tuple[bool, ApiKey | None]:
        """Returns whether the client uses the Unix socket or has given a valid key, and that key."""
        if scope.setdefault("state", {}).get("peer_uid") is not None or self._keys is None:
            return True, None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip()] if scheme.lower() == "bearer" else []
        given += [headers[name] for name in KEY_HEADERS if name in headers]
        found = next((one for key in dict.fromkeys(given) if (one := self._keys.find(key)) is not None), None)
        return found is not None, found

    async def _slow_down(self, scope: Scope, *, refused: bool) -> None:
        """Delays a client without a key that sends many requests; logs and counts refused keys."""
        address = site_of(peer_address(scope))
        if refused:
            self._metrics.refused_keys.inc()
            self._note(logging.WARNING, "a request without a valid key is refused", address, path=scope["path"][:100])
        await asyncio.sleep(self._slowdown.delay_s(address, REFUSED if refused else 1.0))

    def _counted(self, scope: Scope) -> AbstractContextManager[None]:
        """Counts the running POST requests of a key. Raises QueueFull beyond the key's limit."""
        key = scope["state"]["key"]
        return (
            nullcontext() if key is None or self._keys is None or scope["method"] != "POST" else self._keys.running(key)
        )


LOCAL_DOMAINS = ("local", "lan", "home", "internal", "home.arpa")  # of a box's own network, which nobody can register


class Origins:
    """Holds this machine's names, the names in `api.hosts`, and the origins in `api.cors_origins`."""

    def __init__(self, listed: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        self._listed = frozenset(listed)
        names = {*filter(None, (urlsplit(origin).hostname for origin in listed)), *(host.lower() for host in hosts)}
        machine = socket.gethostname().lower()
        own = machine.partition(".")[0]
        names |= {"localhost", machine, own, *(f"{own}.{domain}" for domain in LOCAL_DOMAINS)}
        self._names = frozenset(filter(None, names))

    def are_ours(self, host: str) -> bool:
        """Returns whether a Host header names this machine: by an address, as localhost, or by its own name."""
        name = _hostname(f"//{host}")
        if name is None:
            return False
        name = name.removesuffix(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def may_call(self, origin: str, host: str) -> bool:
        """Returns whether a page may call that is of this origin: one of the host itself, or one that is listed."""
        if origin in self._listed or "*" in self._listed:
            return True
        scheme, _, place = origin.lower().partition("://")
        return scheme in ("http", "https") and bool(place) and place == host.lower()


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class OriginCheck:
    """Refuses other sites' pages, and the daemon's own page under a name that is not this machine's.

    Runs inside RequestMiddleware, which checks the key.
    """

    def __init__(self, app: ASGIApp, origins: Origins, guarded: Collection[str] | None) -> None:
        """Takes `guarded`, the paths that need a Host header of this machine by TCP; None: all do."""
        self._app, self._origins, self._guarded = app, origins, guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        state, headers = scope.get("state", {}), Headers(scope=scope)
        by_tcp = state.get("peer_uid") is None
        if by_tcp and state.get("key") is not None:
            return None
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and not self._origins.may_call(origin, host):
            why = "this request comes from a page of another site; api.cors_origins lists those that may call"
            return _refused(scope, 403, why, "cross_site")
        is_guarded = self._guarded is None or scope["path"] in self._guarded
        if by_tcp and is_guarded and not self._origins.are_ours(host):
            why = "this machine is not known by that name; use its address, or list the name in api.hosts"
            return _refused(scope, 421, why, "misdirected")
        return None


def _refused(scope: Scope, status: int, why: str, code: str) -> Response:
    error = InvalidRequest(why, code=code)
    error.status = status
    return http.error_response(error, scope)
