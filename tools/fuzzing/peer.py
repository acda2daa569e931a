"""A listed peer that sends arbitrary messages on one channel of one box."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from edgemoe.cluster.rpc import envelope
from edgemoe.cluster.rpc.envelope import Failure
from edgemoe.cluster.rpc.keys import Secret
from tools.fuzzing.messages import ChannelMessages

SEND_S = 300  # for the box to read the messages on their way
ANSWER_TIMEOUT_S = 20  # before another connection is tried
WINDOW = 100  # messages that are under way at most
LARGEST_TIMES = 4  # times that the largest message is sent first: reading it leaves varying memory behind
FIRST_MARK = 1 << 61  # a question whose answer shows that all messages before it were read


class HostilePeer:
    """Sends `messages` as fast as the box reads them, and counts the answers by kind.

    It reads all answers, for a box cuts peers that send much more than they read.
    """

    def __init__(self, node: str, key: Secret, server: bytes, address: str, messages: ChannelMessages) -> None:
        """Connects to `address`, HOST:PORT of the box's channel; `server` is the box's public key."""
        self.answers: Counter[str] = Counter()
        self.sent = 0
        self.lost = 0  # connections without any more answers
        self.boot = secrets.token_hex(4)
        self.messages = messages
        self._node, self._key, self._server, self._address = node, key, server, address
        self._mark = FIRST_MARK
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        return dial(self._context, self._node, self.boot, self._key, self._server, self._address)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def send(self) -> None:
        """Sends one message, and reads the answers so far. Raises zmq.Again if the box stops reading."""
        self._socket.send_multipart(self.messages.draw())
        self.sent += 1
        if self.sent % WINDOW == 0:
            self.wait_until_read()

    def send_largest(self, count: int) -> None:
        """Sends the largest of the next `count` messages several times. Raises zmq.Again like `send`."""
        largest = self.messages.largest(count)
        for _ in range(LARGEST_TIMES):
            self._socket.send_multipart(largest)
            self.wait_until_read()

    def wait_until_read(self) -> None:
        """Waits until all messages were read, or lost with their connection. Raises zmq.Again otherwise."""
        ends = time.monotonic() + SEND_S
        while time.monotonic() < ends:
            self._mark += 1
            self._socket.send_multipart(envelope.seal(Failure("failed", "read?"), id=self._mark))
            while self._socket.poll(ANSWER_TIMEOUT_S * 1000):
                frames = self._socket.recv_multipart()
                if id_of(frames) == self._mark:
                    return
                self.answers[kind_of(frames)] += 1
            self.lost += 1
            self._socket.close(0)
            self._socket = self._connect()
        raise zmq.Again


def dial(
    context: zmq.Context[Any], node: str, boot: str, key: Secret, server: bytes, address: str
) -> zmq.Socket[bytes]:
    """Connects by a name of its own, which no other connection has."""
    made = context.socket(zmq.DEALER)
    made.set(zmq.LINGER, 0)
    made.set(zmq.IDENTITY, f"{node}:{boot}:{secrets.token_hex(8)}".encode())
    made.set(zmq.CURVE_SERVERKEY, server)
    made.set(zmq.CURVE_PUBLICKEY, key.public)
    made.set(zmq.CURVE_SECRETKEY, key.secret)
    made.connect(f"tcp://{address}")
    return made


def kind_of(frames: Sequence[bytes]) -> str:
    """Returns an answer's kind: a failure's, or the tag of another message."""
    try:
        body = msgspec.msgpack.decode(envelope.unseal(frames).body)
    except Exception:  # counted all the same
        return "unreadable"
    return str(body.get("kind", body.get("type")))


def id_of(frames: Sequence[bytes]) -> int:
    """Returns the id of a question, or of the one that is answered; 0 if it cannot be read."""
    try:
        return envelope.unseal(frames).id
    except Exception:  # not a mark
        return 0
