"""Authenticates connections by ZeroMQ's protocol [ZAP] and an allow-list of CURVE public keys.

The key becomes the connection's User-Id, which ZeroMQ attaches to every frame that arrives on it. The key's owner is
looked up for each frame. So no peer can use another's name, and a key that was revoked or replaced is refused at once,
on open connections too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import zmq
import zmq.asyncio
from zmq.utils import z85

from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"


class AllowList:
    """Maps public keys to node names. May change while connections are open."""

    def __init__(self, keys: Mapping[str, tuple[str, ...]]) -> None:
        """Allows `keys`: node names with their Z85 public keys, each of which is valid."""
        self.replace(keys)

    def replace(self, keys: Mapping[str, tuple[str, ...]]) -> None:
        """Allows these keys from now on, and no others."""
        self._names = {key.encode(): name for name, its in keys.items() for key in its}

    def allow(self, node: str, *keys: str) -> None:
        """Allows these keys for that node from now on, and no others of it."""
        self.revoke(node)
        self._names |= {key.encode(): node for key in keys}

    def revoke(self, node: str) -> None:
        self._names = {key: name for key, name in self._names.items() if name != node}

    def name_of(self, key: bytes) -> str | None:
        """Returns the node that this Z85 key belongs to; None where it is not allowed."""
        return self._names.get(key)


class Authenticator:
    """Answers ZeroMQ's authentication requests of one context, while `run` runs.

    Must be made before any server socket is bound.
    """

    def __init__(self, context: zmq.asyncio.Context, allowed: AllowList) -> None:
        self._allowed = allowed
        self._say = RateLimitedLog(log)
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.refused = 0

    async def run(self) -> None:
        while True:
            question = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._answer(question))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Returns the reply: version, request id, status, text, user id, metadata."""
        request_id = question[1] if len(question) > 1 else b""
        if len(question) == 7 and question[0] == b"1.0" and question[5] == b"CURVE" and len(question[6]) == 32:
            key = z85.encode(question[6])
            if self._allowed.name_of(key) is not None:
                return [b"1.0", request_id, b"200", b"OK", key, b""]
            self._say(logging.WARNING, "a connection with an unlisted key was refused", key=key.decode())
        self.refused += 1
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]
