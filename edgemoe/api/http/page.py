"""Serves the page at / under a strict policy, and decides which web pages may call the API.

A browser names the page that a request comes from (Origin) and the host it believes it talks to (Host). A request
with a valid key is trusted: no other site's page has one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.api.http import responding as http
from edgemoe.errors import InvalidRequest

FILES = Path(__file__).parents[1] / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = {
    "/": "index.html",
    **{f"/page/{file.name}": file.name for file in FILES.iterdir() if file.suffix in TYPES and file.suffix != ".html"},
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Answers with the page, or a file of it."""
    file = FILES / PAGE[request.url.path]
    return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS)


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
    return http.error_response(error, scope["path"])
