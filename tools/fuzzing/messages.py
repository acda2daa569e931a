"""Messages of a hostile peer on one channel: of any type that the box reads there, true or not."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from edgemoe.cluster.control.messages import CONTROL, ForwardedEmissions, ForwardedFrame
from edgemoe.cluster.data.messages import BULK, EXPERT_CALLS
from edgemoe.cluster.rpc import envelope
from edgemoe.errors import WireError
from edgemoe.ipc.messages import (
    FRAMING,
    FROM_ENGINE,
    MAGIC,
    TO_ENGINE,
    Emissions,
    LastChunkStarted,
    PrefixKVFetched,
    decode_from_engine,
    decode_to_engine,
)
from edgemoe.wire.protocol import PROTOCOL_VERSIONS, MessageLanguage
from tools.fuzzing.values import Values

LANGUAGES: dict[str, MessageLanguage[Any]] = {"control": CONTROL, "calls": EXPERT_CALLS, "bulk": BULK}
# Without these a peer's engine accepts no requests, no box leads, or the peer has members agreed and strikes itself.
SURE = ("boot", "model", "seen", "verb")
MOOD = 1000
VERSIONS: tuple[list[int], ...] = ([1, 255], [200, 255], [255, 1], [0, 0], [])
HELLO = ("model", "layers", "experts", "row_bytes", "expert_bytes", "ram", "disk")
PASSED_ON = (Emissions, LastChunkStarted, PrefixKVFetched)  # messages that a box accepts from another box's engine


class ChannelMessages:
    """Draws messages by `rng`. `hints` are values by field name that the box knows.

    Of every MOOD messages about half of the types are left out, so that effects of one type last [swarm testing].
    """

    def __init__(self, channel: str, rng: random.Random, hints: Mapping[str, Sequence[Any]] | None = None) -> None:
        self._channel, self._rng, self._hints = channel, rng, hints or {}
        self._values = Values(rng, hints, SURE)
        self._all = list(LANGUAGES[channel].messages.values())
        self._kinds, self._left, self._foreign = self._all, 0, False  # the mood, and the messages left in it

    def draw(self, asked: int = 0) -> list[bytes]:
        """Draws the next message as frames; the answer to the question `asked` if it has an id."""
        rng = self._rng
        if not self._left:
            self._kinds = [kind for kind in self._all if rng.random() < 0.5] or self._all
            self._left, self._foreign = MOOD, rng.random() < 0.3
        self._left -= 1
        body = self._values.message(rng.choice(self._kinds))
        tensors = self._tensors(body)
        try:
            raw = msgspec.msgpack.encode(body)
        except RecursionError:
            raw = b"\x91" * 600 + b"\xc0"
        sizes, sums = [len(t) for t in tensors], [xxhash.xxh3_64_intdigest(t) for t in tensors]
        row: list[Any] = [
            asked or rng.choice((0, rng.randrange(1, 1 << 20), (1 << 62) - 1)),
            rng.random() < (0.97 if asked else 0.03),
            rng.choice(VERSIONS) if self._foreign and rng.random() < 0.1 else list(PROTOCOL_VERSIONS),
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

    def largest(self, count: int) -> list[bytes]:
        """Returns the largest readable one of the next `count` messages, without consuming them.

        Reading one takes many times its bytes for a moment; an unreadable one is dropped at its first fault.
        """
        state = self._rng.getstate(), self._kinds, self._left, self._foreign
        found, most = list[bytes](), 0
        for _ in range(count):
            frames = self.draw()
            if (size := sum(map(len, frames))) > most and _is_readable(self._channel, frames):
                found, most = frames, size
        self._rng.setstate(state[0])
        _, self._kinds, self._left, self._foreign = state
        return found

    def _tensors(self, body: dict[str, Any]) -> list[bytes]:
        """Draws the tensors of the message, correct ones as often as not."""
        rng = self._rng
        if rng.random() < 0.1:
            return [rng.randbytes(rng.choice((0, 1, 8, 5000))) for _ in range(rng.choice((1, 2, 16, 17)))]
        match body.get("type"):
            case "Forward":
                return [self._frame(rng.choice(list(TO_ENGINE.messages.values())))]
            case "Tokens" if rng.random() < 0.2:
                return [self._frame(rng.choice(list(FROM_ENGINE.messages.values())))]
            case "Tokens":
                return [self._frame(rng.choice(PASSED_ON))]
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
            return MAGIC + bytes((FRAMING, *PROTOCOL_VERSIONS)) + msgspec.msgpack.encode(self._values.message(kind))
        except RecursionError:
            return MAGIC

    def _work(self, body: dict[str, Any]) -> list[bytes]:
        """Draws rows and an index in the sizes of a call, if these are possible, with false contents."""
        rows, n, m = (body.get(name) for name in ("rows", "experts", "calls"))
        if not all(isinstance(size, int) and 0 < size < 2000 for size in (rows, n, m)):
            return []
        assert isinstance(rows, int)
        assert isinstance(n, int)
        assert isinstance(m, int)
        row_bytes = self._rng.choice(self._hints.get("row_bytes", (768,)))
        numbers = [self._rng.choice((0, 1, 2, 5, -1, 2**31 - 1)) for _ in range(2 * n + 2 * m)]
        if n < 30 and self._rng.random() < 0.5:  # a possible one
            body["calls"] = m = n
            weights = [0x3F800000, 0, 0x7F7FFFFF, -0x800001]
            numbers = [*range(n), *[1] * n, *[self._rng.randrange(rows) for _ in range(m)]]
            numbers += [self._rng.choice(weights) for _ in range(m)]
        return [bytes(rows * row_bytes), struct.pack(f"<{len(numbers)}i", *numbers)]


def read(channel: str, frames: Sequence[bytes]) -> Any:
    """Decodes a message as the box does. Raises WireError."""
    message = LANGUAGES[channel].read(envelope.unseal(frames).body)
    if isinstance(message, ForwardedFrame | ForwardedEmissions) and len(frames) > 1:
        return (decode_to_engine if isinstance(message, ForwardedFrame) else decode_from_engine)(frames[1])
    return message


def _is_readable(channel: str, frames: Sequence[bytes]) -> bool:
    try:
        read(channel, frames)
    except WireError:
        return False
    return True
