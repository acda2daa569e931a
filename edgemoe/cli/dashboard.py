"""Runs `edgemoe dashboard`: proxies a daemon's page on a loopback port, with a token that ends with the command.

The token stands in the address's fragment, which browsers do not send; the page uses it as its key. Requests with the
token are passed to the daemon's Unix socket, as the user who runs the command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import webbrowser
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.api.http.page import PAGE
from edgemoe.cli.client import Client, socket_of
from edgemoe.errors import ServiceError

LOOPBACK = "127.0.0.1"
DROPPED = {
    b"host",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"origin",
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
}
SILENCE_S = 900.0  # of the daemon, at most
BROWSERS = ("DISPLAY", "WAYLAND_DISPLAY")  # one is set where a browser can open a window


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Returns 0."""
    path = socket_of(args)
    with Client(path) as client:
        health = json.loads(client.text("/health", accept_unavailable=True))
    listener = listen(args.port)
    port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
    address = f"http://{LOOPBACK}:{port}/#{token}"
    name = (health.get("model") or {}).get("id", "the daemon")
    print(f"The dashboard of {name}, until Ctrl-C:\n\n  {address}\n", flush=True)
    if not args.no_open and any(map(os.environ.get, BROWSERS)):
        webbrowser.open(address)
    else:
        print(f"From another machine: ssh -L {port}:{LOOPBACK}:{port} HOST, then the same address.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(DashboardProxy(path, token, port), listener))
    return 0


async def serve(passage: DashboardProxy, listener: socket.socket, server: uvicorn.Server | None = None) -> None:
    """Serves until a signal ends it, or `server.should_exit` is set."""
    try:
        await (server or proxy_server(passage)).serve(sockets=[listener])
    finally:
        await passage.close()


def proxy_server(passage: ASGIApp) -> uvicorn.Server:
    """Returns the server of an application between clients and daemons, which has not begun."""
    config = uvicorn.Config(
        passage,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def listen(port: int) -> socket.socket:
    """Returns a listening socket on the loopback interface; 0 is any free port. Raises ServiceError."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=64)
    except (OSError, OverflowError) as error:
        raise ServiceError(f"cannot listen on {LOOPBACK}:{port}: {error}; give another --port, or none") from error


class DashboardProxy:
    """The application between browser and daemon."""

    def __init__(self, path: Path, token: str, port: int) -> None:
        self._path, self._token = path, f"Bearer {token}"
        self._hosts = (f"{LOOPBACK}:{port}", f"localhost:{port}")
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path), verify=False),
            base_url="http://edgemoe",
            timeout=SILENCE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        request = Request(scope, receive)
        answer = self._refusal(request) or await self._pass_on(request)
        await answer(scope, receive, send)

    async def close(self) -> None:
        """Closes the connections to the daemon."""
        await self._http.aclose()

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return refused(421, "misdirected", f"this is {self._hosts[0]}, and no other name")
        if origin is not None and origin != f"http://{host}":
            return refused(403, "cross_site", "this request comes from a page of another site")
        if request.url.path in PAGE:
            return None
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._token.encode()):
            return refused(401, "invalid_api_key", "open the whole address that `edgemoe dashboard` has printed")
        return None

    async def _pass_on(self, request: Request) -> Response:
        target = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._http.build_request(
            request.method, target, headers=list(kept(request.headers.raw)), content=request.stream()
        )
        try:
            answer = await self._http.send(asked, stream=True)
        except httpx.HTTPError as error:
            return refused(502, "no_daemon", f"no daemon answers at {self._path}: {error or type(error).__name__}")
        passed = StreamingResponse(_body(answer), answer.status_code)
        passed.raw_headers = list(kept(answer.headers.raw))
        return passed


def kept(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the headers that are handed on."""
    return ((name, value) for name, value in headers if name.lower() not in DROPPED)


def refused(status: int, code: str, message: str) -> Response:
    """Returns a refusal in the form of the API's errors."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for some in answer.aiter_raw():
            yield some
    except httpx.HTTPError:  # the daemon has gone: the browser sees the end
        return
    finally:
        await answer.aclose()
