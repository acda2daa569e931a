"""The two ends of the link between a front and its engine: ZeroMQ over a Unix socket in a 0700 directory.

The front binds a ROUTER, the engine connects a DEALER whose identity is its boot id, so that the front knows
which incarnation speaks. Each end belongs to one event loop; only `EngineEnd.post` may be called from elsewhere.
A frame that cannot be decoded is counted and dropped by the front, and fatal to the engine.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import zmq
import zmq.asyncio

from edgemoe.cluster.wire.messages import (
    MAX_FRAME_BYTES,
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from edgemoe.errors import ServiceError, WireError

HWM_MESSAGES = 4096  # queued by ZeroMQ in one direction
BACKLOG_MESSAGES = 4096  # waiting in EngineEnd before the front is taken to be stuck
RETRY_S = 0.01  # between tries to hand ZeroMQ a message while its queue is full


class FrontEnd:
    """The front's end: `send` to an engine by boot id, `messages` from all of them."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{private_directory(directory) / 'engine.ipc'}"
        self.undecodable = 0  # frames dropped
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # an unknown engine is an error, not silence
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ServiceError(f"cannot listen for the engine on {self.address}: {error}") from error

    def send(self, boot_id: str, message: ToEngine) -> None:
        """Queues `message` for that engine. Raises WireError if it is not connected or does not keep up."""
        try:
            sent = _sent(self._socket.send_multipart([boot_id.encode(), encode(message)], zmq.DONTWAIT))
        except zmq.ZMQError as error:
            raise WireError(f"engine {boot_id} cannot be reached: {error}") from error
        if not sent:
            raise WireError(f"engine {boot_id} has left {HWM_MESSAGES} messages unread: it is stuck")

    async def messages(self) -> AsyncIterator[tuple[str, FromEngine]]:
        """(boot id, message), for as long as the end is open."""
        while not self._socket.closed:
            identity, *frames = await self._socket.recv_multipart()
            try:
                yield identity.decode(), decode_from_engine(b"".join(frames))
            except (WireError, UnicodeDecodeError):
                self.undecodable += 1

    def close(self) -> None:
        """Drops what is unsent and frees the socket."""
        self._socket.close(linger=0)
        self._context.term()


class EngineEnd:
    """The engine's end, made in its event loop; `post` may be called from the compute thread."""

    def __init__(self, address: str, boot_id: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.set(zmq.IDENTITY, boot_id.encode())
        self._socket.connect(address)
        self._loop = asyncio.get_running_loop()
        self._backlog: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def post(self, message: FromEngine) -> None:
        """Queues `message`, in order, from any thread. Raises WireError when the front no longer reads."""
        if len(self._backlog) >= BACKLOG_MESSAGES:
            raise WireError(f"the front has left {BACKLOG_MESSAGES} messages unread: it is stuck or gone")
        self._backlog.append(encode(message))
        self._loop.call_soon_threadsafe(self._flush)

    async def messages(self) -> AsyncIterator[ToEngine]:
        """What the front sends. Raises WireError on a frame that cannot be read."""
        while not self._socket.closed:
            yield decode_to_engine(await self._socket.recv())

    async def close(self, timeout_s: float = 1.0) -> None:
        """Sends what was posted, for `timeout_s` at most, and frees the socket."""
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


def _sent(attempt: Awaitable[object]) -> bool:
    """Whether a DONTWAIT send, which is over when it returns, went through. Raises zmq.ZMQError otherwise."""
    assert isinstance(attempt, asyncio.Future)
    assert attempt.done()
    try:
        attempt.result()
    except zmq.Again:
        return False
    return True


def private_directory(path: Path) -> Path:
    """Makes `path` a directory that only this user can enter. Raises ServiceError if it cannot be made so."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise ServiceError(f"{path}: must be a directory owned by the user who runs the daemon")
        path.chmod(0o700)
    except OSError as error:
        raise ServiceError(f"{path}: cannot be made a private directory: {error.strerror}") from error
    return path


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, HWM_MESSAGES)
    socket.set(zmq.RCVHWM, HWM_MESSAGES)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
