"""Talks to a daemon by HTTP over its Unix socket; turns errors into EdgemoeErrors. Runs `edgemoe reload`."""

from __future__ import annotations

import argparse
import json
import pwd
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from edgemoe.config.loading import load
from edgemoe.config.paths import beside
from edgemoe.errors import EdgemoeError, ServiceError
from edgemoe.front.start_note import noted_start
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import loading_text

SERVICE_SOCKET = Path("/run/edgemoe/edgemoe.sock")
_CONNECT_TIMEOUT_S, _SILENCE_TIMEOUT_S = 5.0, 900.0
_UNANSWERED_S = 180.0  # that a daemon may take from its start to its first answer
_GAP_S = 60.0  # from the end of the note of its start to that answer
_POLL_S, _LINE_EVERY_S = 0.2, 10.0


def socket_of(args: argparse.Namespace) -> Path:
    """Returns the socket to use: --socket, else the settings', else the service's where only that one exists."""
    if args.socket:
        return Path(args.socket)
    mine = Path(load(Path(args.config) if args.config else None, args.set).settings.api.socket)
    return SERVICE_SOCKET if not _is_named(mine) and _is_named(SERVICE_SOCKET) else mine


class Client:
    """Sends requests to a daemon. Raises EdgemoeErrors with advice."""

    def __init__(self, path: Path) -> None:
        self._socket = path
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path), verify=False),  # no TLS there, and authorities take 26 ms
            base_url="http://edgemoe",
            timeout=httpx.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def text(self, path: str, *, accept_unavailable: bool = False) -> str:
        """Returns the body of a GET.

        With `accept_unavailable` a 503 is no error: /health answers so while the model is loading.
        """
        self._check_access()
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise self._broken_off(error) from error
        if response.is_error and not (accept_unavailable and response.status_code == 503):
            raise refusal(response)
        return response.text

    def get(self, path: str) -> Json:
        """Returns the answer to a GET."""
        found: Json = json.loads(self.text(path))
        return found

    def is_ready(self) -> bool:
        """Returns whether the daemon answers and takes requests."""
        try:
            self._check_access()
            return self._http.get("/health").is_success
        except (ServiceError, httpx.HTTPError):
            return False

    def wait_while_loading(self, show: Callable[[str], object], alive: Callable[[], object] | None = None) -> None:
        """Returns once the daemon takes requests, and at once where an engine has served; shows how loading comes on.

        `alive` says whether the daemon that this process started still runs. Another one is waited for where it has a
        note of its start. Raises ServiceError where no engine can start, or nothing answers for so long.
        """
        answered_s, within_s = time.monotonic(), 0.0 if alive is None else _UNANSWERED_S
        while True:
            try:
                health = json.loads(self.text("/health", accept_unavailable=True))
            except ServiceError:
                if alive is not None and not alive():
                    raise
                if starting := self.starting():
                    answered_s, within_s = time.monotonic(), within_s or _GAP_S
                elif time.monotonic() - answered_s >= within_s:
                    raise
                show(starting or "it does not answer yet")
            else:
                answered_s = time.monotonic()
                if failure := health.get("cannot_start"):
                    raise ServiceError(failure["reason"])
                if health.get("status") != "loading" or health.get("model"):
                    return
                show(starting_text(health))
            time.sleep(_POLL_S)

    def post(self, path: str) -> Json:
        """Returns the answer to an empty POST."""
        self._check_access()
        try:
            response = self._http.post(path)
        except httpx.HTTPError as error:
            raise self._broken_off(error) from error
        if response.is_error:
            raise refusal(response)
        answer: Json = response.json()
        return answer

    def stream(self, path: str, body: Json) -> Iterator[Json]:
        """Yields the events of a streaming POST. Closing the iterator cancels the request."""
        self._check_access()
        try:
            with self._http.stream("POST", path, json=body | {"stream": True}) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _event(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise self._broken_off(error) from error

    def is_listening(self) -> bool:
        """Returns whether a daemon listens. Raises ServiceError, with advice, where this user may not use it."""
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(_CONNECT_TIMEOUT_S)
            try:
                knocking.connect(str(self._socket))
            except PermissionError as error:
                raise ServiceError(f"you may not use {self._socket}; {_way_in(self._socket)}") from error
            except OSError:
                return False
        return True

    def _check_access(self) -> None:
        """Raises ServiceError, with advice, if no daemon answers or access is denied."""
        if not self.is_listening():
            if starting := self.starting():
                raise ServiceError(f"the daemon at {self._socket} still starts: {starting}")
            raise ServiceError(
                f"no daemon answers at {self._socket}; start one with `edgemoe serve` or "
                "`systemctl start edgemoe`, or name its socket with --socket"
            )

    def starting(self) -> str:
        """Returns the note of a daemon that will listen here; "" if none starts."""
        return noted_start(beside(self._socket))

    def _broken_off(self, error: httpx.HTTPError) -> ServiceError:
        return ServiceError(f"the daemon at {self._socket} broke off: {error or type(error).__name__}")


def starting_text(health: Json) -> str:
    """Returns how far an engine that is starting has come, and how the one before it ended."""
    loading, engine = health.get("loading"), health.get("engine") or {}
    again = " again" if engine.get("last_end") else ""
    text = loading_text(loading) if loading else f"the engine is started{again}"
    return f"{text}; the engine before it ended: {engine['last_end']}" if engine.get("last_end") else text


class WaitingLine:
    """Shows on stderr how loading proceeds: one changing line on a terminal, else a line a phase or ten seconds."""

    def __init__(self) -> None:
        self._terminal, self._shown, self._shown_s = sys.stderr.isatty(), "", 0.0

    def show(self, text: str) -> None:
        """Shows the present text."""
        now, phase = time.monotonic(), text.partition(" ")[0].rstrip(",")
        if self._terminal:
            width = max(20, shutil.get_terminal_size().columns - 1)
            print(f"\r\033[K{f'the model is loading: {text}'[:width]}", end="", file=sys.stderr, flush=True)
        elif phase != self._shown or now - self._shown_s > _LINE_EVERY_S:
            self._shown_s = now
            print(f"the model is loading: {text}", file=sys.stderr, flush=True)
        self._shown = phase

    def clear(self) -> None:
        """Clears the line from a terminal."""
        if self._terminal and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def wait_for_engine(client: Client) -> None:
    """Waits while the daemon's first engine loads, and shows how that comes on. Raises ServiceError."""
    line = WaitingLine()
    try:
        client.wait_while_loading(line.show)
    finally:
        line.clear()


def _is_named(path: Path) -> bool:
    """Returns whether something is there, or may be: in a directory that one may not look into."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _event(text: str) -> Json:
    event: Json = json.loads(text)
    if "error" in event:
        raise EdgemoeError(event["error"].get("message", "the daemon reported an error"))
    return event


def refusal(response: httpx.Response) -> EdgemoeError:
    """Returns the error of a response with an error status."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip() or "no reason given"
    return EdgemoeError(f"{message} (HTTP {response.status_code})")


def _way_in(path: Path) -> str:
    """Returns advice about a socket that the user may not use.

    Does not suggest to join root's group or another user's private group.
    """
    try:
        found, owner, group = path.stat(), path.owner(), path.group()
        private = path != SERVICE_SOCKET and found.st_gid == pwd.getpwuid(found.st_uid).pw_gid
    except (OSError, KeyError):
        return "its directory is private; start a daemon of your own with `edgemoe serve`"
    if private or found.st_gid == 0:
        return (
            f"it belongs to {owner}'s daemon, which is for {owner} alone (api.socket_group says who else may use it); "
            "start one of your own with `edgemoe serve`"
        )
    return f"join its group: sudo usermod --append --groups {group} $USER, then log in again"


def reload(args: argparse.Namespace) -> int:
    """Runs `edgemoe reload`: the daemon loads its ScoutGate export again. Prints which export is in use.

    Raises EdgemoeError where the old export stays, or no daemon answers.
    """
    with Client(socket_of(args)) as client:
        print(client.post("/reload")["message"])
    return 0
