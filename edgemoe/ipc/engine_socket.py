"""Connects a front and its engine: ZeroMQ over a Unix socket in a 0700 directory.

The front binds a ROUTER; the engine connects a DEALER with its boot id as identity, which tells incarnations apart.
Each end belongs to one event loop, except `IpcClient.post`. An invalid frame is refused and affects no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from edgemoe.durable import private_folder
from edgemoe.errors import PeerOutdated, ServiceError, WireError
from edgemoe.ipc.messages import (
    MAX_FRAME_BYTES,
    Emissions,
    FromEngine,
    MessageRefused,
    Submit,
    ToEngine,
    body_of,
    decode_from_engine,
    decode_to_engine,
    encode,
    versions_of,
)
from edgemoe.types.bounds import Attempt, Name
from edgemoe.types.request import Emission
from edgemoe.wire.protocol import PROTOCOL_VERSIONS, UNREADABLE, Versions, check_known, tag_of

log = logging.getLogger(__name__)

HWM_MESSAGES = 4096  # queued by ZeroMQ in one direction
BACKLOG_MESSAGES = 4096  # waiting in IpcClient before the front is taken to be stuck
WHY_CHARS = 1024  # of the reason sent for an unreadable message
RETRY_S = 0.01  # between tries to hand ZeroMQ a message while its queue is full


class IpcServer:
    """Sends to engines by boot id, and yields the messages of all of them."""

    def __init__(self, directory: Path, speaks: Versions = PROTOCOL_VERSIONS, name: str = "engine.ipc") -> None:
        path = engine_path(private_directory(directory), name)
        self.address = f"ipc://{path}"
        self.undecodable = 0  # frames dropped
        self._speaks = speaks
        self._engine = ("", speaks)  # the engine of the last frame, and its versions
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # an unknown engine is an error, not silence
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ServiceError(f"cannot listen for the engine on {self.address}: {error}") from error

    def send(self, boot_id: str, message: ToEngine) -> None:
        """Queues `message` for that engine.

        Raises WireError if it is not connected or does not keep up, PeerOutdated where it does not know the message.
        """
        engine, theirs = self._engine
        check_known(message, self._speaks.common(theirs) if engine == boot_id else self._speaks.lowest, "the engine")
        try:
            frame = encode(message, self._speaks)
            sent = _sent(self._socket.send_multipart([boot_id.encode(), frame], zmq.DONTWAIT))
        except zmq.ZMQError as error:
            raise WireError(f"engine {boot_id} cannot be reached: {error}") from error
        if not sent:
            raise WireError(f"engine {boot_id} has left {HWM_MESSAGES} messages unread: it is stuck")

    async def messages(self) -> AsyncIterator[tuple[str, FromEngine | None]]:
        """Yields (boot id, message) while the end is open; None for one that is unreadable, and refused."""
        while not self._socket.closed:
            identity, *frames = await self._socket.recv_multipart()
            frame, boot_id, message = b"".join(frames), identity.decode(errors="replace"), None
            try:
                self._engine = (boot_id, versions_of(frame))
                message = decode_from_engine(frame)
            except WireError as error:
                self._refuse(identity, frame, error)
            yield boot_id, message

    def _refuse(self, identity: bytes, frame: bytes, error: Exception) -> None:
        self.undecodable += 1
        refused = refusal(frame, error)
        _log_refusal("engine", refused, self.undecodable)
        with contextlib.suppress(zmq.ZMQError):  # it has gone, or does not read
            _sent(self._socket.send_multipart([identity, encode(refused, self._speaks)], zmq.DONTWAIT))

    def close(self) -> None:
        """Drops unsent messages and frees the socket."""
        self._socket.close(linger=0)
        self._context.term()


class IpcClient:
    """Posts to the front and yields its messages. Made in the engine's event loop; any thread may `post`."""

    def __init__(
        self, address: str, boot_id: str, front: Versions = PROTOCOL_VERSIONS, speaks: Versions = PROTOCOL_VERSIONS
    ) -> None:
        """Connects to the front at `address`. `front` are the versions that the front speaks, `speaks` ours."""
        self.unreadable = 0  # frames refused
        self._speaks, self._common = speaks, speaks.common(front)
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.set(zmq.IDENTITY, boot_id.encode())
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def post(self, message: FromEngine) -> None:
        """Queues `message` in order, from any thread; drops a message that the front does not know.

        Raises WireError when the front no longer reads.
        """
        with contextlib.suppress(PeerOutdated):
            check_known(message, self._common, "the front")
            self._post(message)

    def _post(self, message: FromEngine) -> None:
        if len(self._backlog) >= BACKLOG_MESSAGES:
            raise WireError(f"the front has left {BACKLOG_MESSAGES} messages unread: it is stuck or gone")
        self._backlog.append(encode(message, self._speaks))
        self._loop.call_soon_threadsafe(self._flush)

    async def messages(self) -> AsyncIterator[ToEngine]:
        """Yields the front's messages, and refuses invalid frames."""
        while not self._socket.closed:
            frame = b"".join(await self._socket.recv_multipart())
            try:
                message = decode_to_engine(frame)
            except WireError as error:
                self._refuse(frame, error)
                continue
            yield message

    def _refuse(self, frame: bytes, error: WireError) -> None:
        self.unreadable += 1
        refused = refusal(frame, error)
        _log_refusal("front", refused, self.unreadable)
        ended = end_of_unreadable(frame, refused.why)
        self.post(refused if ended is None else Emissions(items=[ended]))

    async def close(self, timeout_s: float = 1.0) -> None:
        """Sends the posted messages, waiting at most `timeout_s`, and frees the socket."""
        for _ in range(int(timeout_s / RETRY_S)):
            self._flush()
            if not self._backlog:
                break
            await asyncio.sleep(RETRY_S)
        self._socket.close(linger=int(timeout_s * 1e3))
        await asyncio.to_thread(self._context.term)

    def _flush(self) -> None:
        """Hands the backlog to ZeroMQ; where its queue is full, tries again a little later."""
        while self._backlog and not self._socket.closed:
            if not _sent(self._socket.send(self._backlog[0], zmq.DONTWAIT)):
                if self._retry is None or self._retry.when() <= self._loop.time():
                    self._retry = self._loop.call_later(RETRY_S, self._flush)
                return
            self._backlog.popleft()


class _Named(msgspec.Struct):
    id: Name


class _Submitted(msgspec.Struct):
    """The fields of an unreadable Submit that its error emission needs."""

    request: _Named
    attempt: Attempt = 1
    emitted: list[Any] = []
    type: str = ""


def refusal(frame: bytes, error: Exception) -> MessageRefused:
    """Returns the answer to a frame that cannot be read."""
    try:
        tag = tag_of(body_of(frame))
    except WireError:
        tag = ""
    return MessageRefused(what=tag[:64], why=str(error)[:WHY_CHARS])


def end_of_unreadable(frame: bytes, why: str) -> Emission | None:
    """Returns the emission that ends an unreadable Submit's request; None where the request is not recognised."""
    try:
        submit = msgspec.msgpack.decode(body_of(frame), type=_Submitted)
    except (WireError, *UNREADABLE):
        return None
    if submit.type != "Submit":
        return None
    return end_of(submit, f"the engine cannot read this request: {why}", "invalid_request")


def end_of(submit: Submit | _Submitted, error: str, code: str) -> Emission:
    """Returns the emission that ends a request which the engine does not begin with."""
    return Emission(
        request=submit.request.id,
        attempt=submit.attempt,
        index=len(submit.emitted),
        finish="error",
        error=error,
        error_code=code,
    )


def _log_refusal(whose: str, refused: MessageRefused, count: int) -> None:
    if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not fill the log
        log.warning(f"a message of the {whose} cannot be read", extra={"what": refused.what, "why": refused.why})


def _sent(attempt: Awaitable[object]) -> bool:
    """Returns whether a DONTWAIT send succeeded; False where the queue is full. Raises zmq.ZMQError otherwise."""
    assert isinstance(attempt, asyncio.Future)
    assert attempt.done()
    try:
        attempt.result()
    except zmq.Again:
        return False
    return True


def engine_path(directory: Path, name: str = "engine.ipc") -> Path:
    """Returns the path of an engine's socket. Raises ServiceError if it is too long for one."""
    path = directory / name
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        why = f"too long for a socket ({zmq.IPC_PATH_MAX_LEN} bytes)"
        raise ServiceError(f"{path}: {why}; set service.runtime_dir to a shorter path")
    return path


def private_directory(path: Path) -> Path:
    """Makes `path` a directory that only this user can enter. Raises ServiceError where that fails."""
    try:
        if not private_folder(path):
            raise ServiceError(f"{path}: must be a directory owned by the user who runs the daemon")
    except OSError as error:
        raise ServiceError(
            f"{path}: cannot be made a private directory: {error.strerror}; name one that this user may write with "
            "service.runtime_dir"
        ) from error
    return path


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HWM_MESSAGES)
    socket.set(zmq.RCVHWM, HWM_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
