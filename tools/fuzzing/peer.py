"""A listed peer that says what it likes on one channel of one box."""

from __future__ import annotations

import random
import secrets
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash
import zmq

from edgemoe.cluster.data.messages import BULK, CALLS
from edgemoe.cluster.rpc import envelope
from edgemoe.cluster.rpc.control_messages import CONTROL, Forward, Tokens
from edgemoe.cluster.rpc.engine_messages import (
    FRAMING,
    MAGIC,
    TO_ENGINE,
    Emissions,
    decode_from_engine,
    decode_to_engine,
)
from edgemoe.cluster.rpc.keys import Secret
from edgemoe.cluster.rpc.messages.hand_over import LastChunk, PrefixPulled
from edgemoe.cluster.rpc.protocol import SPOKEN, Language
from edgemoe.cluster.rpc.transport import Failure
from edgemoe.errors import WireError
from tools.fuzzing.values import Values

LANGUAGES: dict[str, Language[Any]] = {"control": CONTROL, "calls": CALLS, "bulk": BULK}
HELLO = ("model", "layers", "experts", "row_bytes", "expert_bytes", "ram", "disk")
SEND_S = 300  # that the box has to read what is under way
ANSWER_TIMEOUT_S = 20  # before another connection is tried
WINDOW = 100  # messages that are under way at most
LARGEST_TIMES = 4  # that the largest message is sent ahead of the others: what reading it leaves behind differs
FIRST_MARK = 1 << 61  # a question whose answer says that what was sent before it was read


class HostilePeer:
    """Sends messages drawn by `rng`, as fast as the box reads them. What comes back is counted in `answers`, by kind.

    A box cuts who sends much more than it reads.
    """

    def __init__(
        self, node: str, key: Secret, server: bytes, address: str, channel: str, rng: random.Random, hints: Any = None
    ) -> None:
        """`server` is the box's public key, `address` HOST:PORT of its channel."""
        self.answers: Counter[str] = Counter()
        self.sent = 0
        self.lost = 0  # connections on which nothing came back any more
        self._channel, self._rng, self._values = channel, rng, Values(rng, hints)
        self._kinds = list(LANGUAGES[channel].messages.values())
        self._hints: Mapping[str, Sequence[Any]] = hints or {}
        self._node, self._key, self._server, self._address = node, key, server, address
        self._boot = secrets.token_hex(4)
        self._mark = FIRST_MARK
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        """By a name of its own, under which no other connection stands."""
        made = self._context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.set(zmq.IDENTITY, f"{self._node}:{self._boot}:{secrets.token_hex(8)}".encode())
        made.set(zmq.CURVE_SERVERKEY, self._server)
        made.set(zmq.CURVE_PUBLICKEY, self._key.public)
        made.set(zmq.CURVE_SECRETKEY, self._key.secret)
        made.connect(f"tcp://{self._address}")
        return made

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def send(self) -> None:
        """One message, and whatever has come back so far. Raises zmq.Again where the box reads nothing more."""
        self._socket.send_multipart(self.draw())
        self.sent += 1
        if self.sent % WINDOW == 0:
            self.settle()

    def send_largest(self, count: int) -> None:
        """The largest of the next `count` messages, ahead of them and more than once. Raises zmq.Again like `send`."""
        largest = self.largest(count)
        for _ in range(LARGEST_TIMES):
            self._socket.send_multipart(largest)
            self.settle()

    def largest(self, count: int) -> list[bytes]:
        """Returns the largest of the next `count` messages that can be read; all of them are still to come.

        Reading one takes many times its bytes for a moment, one that cannot be read is dropped at its first fault.
        """
        state, found, most = self._rng.getstate(), list[bytes](), 0
        for _ in range(count):
            frames = self.draw()
            if (size := sum(map(len, frames))) > most and _is_readable(self._channel, frames):
                found, most = frames, size
        self._rng.setstate(state)
        return found

    def settle(self) -> None:
        """Waits until all that was sent was read, or lost with its connection. Raises zmq.Again where it is not."""
        ends = time.monotonic() + SEND_S
        while time.monotonic() < ends:
            self._mark += 1
            self._socket.send_multipart(envelope.seal(Failure("failed", "read?"), id=self._mark))
            while self._socket.poll(ANSWER_TIMEOUT_S * 1000):
                frames = self._socket.recv_multipart()
                if _id(frames) == self._mark:
                    return
                self.answers[_kind(frames)] += 1
            self.lost += 1
            self._socket.close(0)
            self._socket = self._connect()
        raise zmq.Again

    def draw(self) -> list[bytes]:
        """The next message, as frames."""
        rng = self._rng
        body = self._values.message(rng.choice(self._kinds))
        tensors = self._tensors(body)
        try:
            raw = msgspec.msgpack.encode(body)
        except RecursionError:
            raw = b"\x91" * 600 + b"\xc0"
        sizes, sums = [len(t) for t in tensors], [xxhash.xxh3_64_intdigest(t) for t in tensors]
        row: list[Any] = [
            rng.choice((0, rng.randrange(1, 1 << 20), (1 << 62) - 1)),
            rng.random() < 0.03,
            list(SPOKEN) if rng.random() < 0.95 else rng.choice(([1, 255], [200, 255], [255, 1], [0, 0], [])),
            rng.choice((0.0, 1.0, 2000.0, 600_000.0)),
            sizes,
            sums,
            msgspec.Raw(raw),
        ]
        if rng.random() < 0.05:
            row[rng.choice((0, 1, 2, 3, 4, 5))] = self._values.oddity()
        packed = msgspec.msgpack.encode(row)
        digest = xxhash.xxh3_64_digest(packed)
        head = struct.pack("<4sB8s", envelope.MAGIC, envelope.FRAMING, digest)
        return [head + packed, *tensors]

    def _tensors(self, body: dict[str, Any]) -> list[bytes]:
        """What belongs to the message, as often as not."""
        rng = self._rng
        if rng.random() < 0.1:
            return [rng.randbytes(rng.choice((0, 1, 8, 5000))) for _ in range(rng.choice((1, 2, 16, 17)))]
        match body.get("type"):
            case "Forward":
                return [self._frame(rng.choice(list(TO_ENGINE.messages.values())))]
            case "Tokens":
                return [self._frame(rng.choice((Emissions, LastChunk, PrefixPulled)))]
            case "Call":
                return self._work(body)
            case "Hello" if rng.random() < 0.5:
                body |= {name: rng.choice(values) for name, values in self._hints.items() if name in HELLO}
                return []
            case "Hello":
                return [bytes(rng.choice((0, 1, 1 << 17)))]
        return []

    def _frame(self, kind: type[Any]) -> bytes:
        try:
            return MAGIC + bytes((FRAMING, *SPOKEN)) + msgspec.msgpack.encode(self._values.message(kind))
        except RecursionError:
            return MAGIC

    def _work(self, body: dict[str, Any]) -> list[bytes]:
        """Rows and an index of the sizes that a call says, as far as these are possible; what stands there is a lie."""
        rows, n, m = (body.get(name) for name in ("rows", "experts", "calls"))
        if not all(isinstance(size, int) and 0 < size < 2000 for size in (rows, n, m)):
            return []
        assert isinstance(rows, int)
        assert isinstance(n, int)
        assert isinstance(m, int)
        row_bytes = self._rng.choice(self._hints.get("row_bytes", (768,)))
        numbers = [self._rng.choice((0, 1, 2, 5, -1, 2**31 - 1)) for _ in range(2 * n + 2 * m)]
        if n < 30 and self._rng.random() < 0.5:  # one that can be
            body["calls"] = m = n
            weights = [0x3F800000, 0, 0x7F7FFFFF, -0x800001]
            numbers = [*range(n), *[1] * n, *[self._rng.randrange(rows) for _ in range(m)]]
            numbers += [self._rng.choice(weights) for _ in range(m)]
        return [bytes(rows * row_bytes), struct.pack(f"<{len(numbers)}i", *numbers)]


def read(channel: str, frames: Sequence[bytes]) -> Any:
    """Returns what the box makes of a message. Raises WireError."""
    message = LANGUAGES[channel].read(envelope.unseal(frames).body)
    if isinstance(message, Forward | Tokens) and len(frames) > 1:
        return (decode_to_engine if isinstance(message, Forward) else decode_from_engine)(frames[1])
    return message


def _is_readable(channel: str, frames: Sequence[bytes]) -> bool:
    try:
        read(channel, frames)
    except WireError:
        return False
    return True


def _kind(frames: Sequence[bytes]) -> str:
    """What came back: a failure's kind, or the tag of an answer."""
    try:
        body = msgspec.msgpack.decode(envelope.unseal(frames).body)
    except Exception:  # whatever it is, it is counted
        return "unreadable"
    return str(body.get("kind", body.get("type")))


def _id(frames: Sequence[bytes]) -> int:
    """Of the question that it answers; 0 where it cannot be read."""
    try:
        return envelope.unseal(frames).id
    except Exception:  # whatever it is, it is no mark
        return 0
