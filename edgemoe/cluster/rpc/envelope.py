"""Encodes messages between boxes as frames: an envelope with the message, then raw tensors. Checks all before use.

frame 0 = magic (4) | framing (1) | xxh3-64 of the rest (8) | msgpack of Envelope
frame n = raw bytes; their lengths and xxh3-64 sums stand in the envelope
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from edgemoe.errors import (
    EdgemoeError,
    PeerBusy,
    PeerError,
    PeerOutdated,
    PeerRefused,
    UnknownMessage,
    WireError,
    WireVersionError,
)
from edgemoe.types.bounds import Count, Sum64, Word
from edgemoe.wire import protocol
from edgemoe.wire.protocol import (
    MAX_FRAMES,
    MAX_TENSOR_BYTES,
    UNREADABLE,
    Buffer,
    Message,
    MessageLanguage,
    Versions,
    check_known,
)

M = TypeVar("M")
MAGIC = b"EMPR"
FRAMING = 2
MAX_ENVELOPE_BYTES = 1 << 20
MAX_REMAINING_MS = 600_000.0
FAILURE_CHARS = 1024  # of a failure's text; the rest is cut
HEAD = struct.Struct("<4sB8s")


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The head of a message. `id` 0 asks for no answer. `remaining_ms` is how long the sender still waits.

    Times are remaining times, so that clocks are never compared. Fields are identified by position: a later version
    may only add fields at the end, with defaults.
    """

    id: Count
    answer: bool
    speaks: Versions
    remaining_ms: Annotated[float, Meta(ge=0, le=MAX_REMAINING_MS)]
    sizes: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_TENSOR_BYTES)], ...], Meta(max_length=MAX_FRAMES)]
    sums: Annotated[tuple[Sum64, ...], Meta(max_length=MAX_FRAMES)]
    body: msgspec.Raw


_decoder = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()


def seal(
    body: msgspec.Struct,
    tensors: Sequence[Buffer] = (),
    *,
    id: int = 0,
    answer: bool = False,
    speaks: Versions | None = None,
    remaining_ms: float = 0.0,
) -> list[Buffer]:
    """Returns the frames that carry `body` and `tensors`. Raises WireError where they are too many or too large."""
    sizes = tuple(memoryview(t).nbytes for t in tensors)
    if len(sizes) > MAX_FRAMES or any(size > MAX_TENSOR_BYTES for size in sizes):
        raise WireError(f"{len(sizes)} tensors of up to {max(sizes)} bytes: too many or too large for one message")
    sums = tuple(xxhash.xxh3_64_intdigest(t) for t in tensors)
    raw = msgspec.Raw(_encoder.encode(body))
    packed = _encoder.encode(Envelope(id, answer, speaks or protocol.PROTOCOL_VERSIONS, remaining_ms, sizes, sums, raw))
    if len(packed) > MAX_ENVELOPE_BYTES:
        raise WireError(f"a {type(body).__name__} of {len(packed)} bytes; {MAX_ENVELOPE_BYTES} fit into an envelope")
    return [HEAD.pack(MAGIC, FRAMING, xxhash.xxh3_64_digest(packed)) + packed, *tensors]


def unseal(frames: Sequence[Buffer]) -> Envelope:
    """Returns the checked envelope of a message, whose tensors are `frames[1:]`. Raises WireError, WireVersionError."""
    if not frames or not HEAD.size < (size := memoryview(frames[0]).nbytes) <= MAX_ENVELOPE_BYTES + HEAD.size:
        raise WireError("a message without an envelope")
    magic, framing, checksum = HEAD.unpack_from(frames[0])
    if magic != MAGIC:
        raise WireError(f"{size} bytes that do not start with {MAGIC!r}: not one of ours")
    if framing != FRAMING:
        raise WireVersionError(f"a message of framing {framing} arrived, {FRAMING} is read here: run the same release")
    packed = memoryview(frames[0])[HEAD.size :]
    if xxhash.xxh3_64_digest(packed) != checksum:
        raise WireError("an envelope whose bytes changed on the way")
    try:
        envelope = _decoder.decode(packed)
    except UNREADABLE as error:
        raise WireError(f"an envelope that cannot be read: {error}") from error
    _check_tensors(envelope, frames[1:])
    return envelope


def _check_tensors(envelope: Envelope, tensors: Sequence[Buffer]) -> None:
    if not len(tensors) == len(envelope.sizes) == len(envelope.sums) <= MAX_FRAMES:
        raise WireError(f"{len(tensors)} tensors arrived, the envelope names {len(envelope.sizes)}")
    for n, (tensor, size, wanted) in enumerate(zip(tensors, envelope.sizes, envelope.sums, strict=True)):
        if memoryview(tensor).nbytes != size or xxhash.xxh3_64_intdigest(tensor) != wanted:
            raise WireError(f"tensor {n} of {size} bytes changed on the way")


class Failure(Message, frozen=True, tag="Failure"):
    """The answer to a question that was not served. Part of every channel's language.

    `kind` is "busy", "unknown" for a message that this release does not have, "failed" where serving raised an
    unexpected error, or "refused". Any other kind counts as "refused".
    """

    kind: Word
    message: Annotated[str, Meta(max_length=FAILURE_CHARS)]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Returns the answer to a question whose serving raised `error`."""
        text = str(error) if isinstance(error, EdgemoeError) else f"it went wrong: {error!r}"
        kinds = ((PeerBusy, "busy"), (UnknownMessage, "unknown"), (EdgemoeError, "refused"), (Exception, "failed"))
        text = (
            text[:FAILURE_CHARS].encode("utf-8", "replace").decode()
        )  # the name of a file may hold bytes that are no text
        return cls(next(kind for of, kind in kinds if isinstance(error, of)), text)

    def error(self, node: str) -> PeerError:
        """Returns the error to raise where `node` was asked."""
        kind = {"busy": PeerBusy, "unknown": PeerOutdated}.get(self.kind, PeerRefused)
        return kind(f"{node}: {self.message}")


@dataclass(frozen=True, slots=True)
class Question(Generic[M]):
    """A message from a peer, which expects an answer unless envelope.id is 0."""

    peer: str
    boot: str
    envelope: Envelope
    message: M
    tensors: Sequence[memoryview]
    deadline: float  # by the loop's clock
    host: str = ""  # from which the connection comes


@dataclass(frozen=True, slots=True)
class Answer(Generic[M]):
    message: M
    tensors: Sequence[memoryview] = ()


class EnvelopeCodec(Generic[M]):
    """Seals messages for peers and opens theirs."""

    def __init__(
        self, node: str, speaks: Versions, channel: str, language: MessageLanguage[M], message_bytes: int
    ) -> None:
        self.channel = channel
        self._node, self._own, self._language = node, speaks, language
        self._message_bytes = message_bytes
        self._speaks: dict[str, Versions] = {}  # by each peer's last message

    def version(self, node: str) -> int:
        """Returns the highest protocol version that both speak; our lowest while the peer has named none."""
        theirs = self._speaks.get(node)
        return self._own.common(theirs) if theirs is not None else self._own.lowest

    def forget(self, node: str) -> None:
        """Forgets a peer's versions, because it may come back as another release."""
        self._speaks.pop(node, None)

    def seal(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer], **fields: Any) -> list[Buffer]:
        """Returns the frames of a message for a peer. Raises WireError, PeerOutdated."""
        check_known(body, self.version(node), node)
        frames = seal(body, tensors, speaks=self._own, **fields)
        if (size := sum(memoryview(frame).nbytes for frame in frames)) > self._message_bytes:
            raise WireError(f"a message of {size} bytes; {self._message_bytes} pass over {self.channel}")
        return frames

    def seal_failure(self, error: Exception, id: int = 0) -> list[Buffer]:
        """Returns the frames of a Failure, which every version can read."""
        return seal(Failure.of(error), id=id, answer=True, speaks=self._own)

    def open(self, node: str, frames: Sequence[memoryview]) -> Envelope:
        """Returns the checked envelope of a message. Raises WireError, or WireVersionError without a common version."""
        envelope = unseal(frames)
        if not self._own.common(envelope.speaks):
            raise WireVersionError(
                f"{node} speaks versions {envelope.speaks} of the protocol, "
                f"{self._node} {self._own}: run neighbouring releases"
            )
        self._speaks[node] = envelope.speaks
        return envelope

    def read(self, envelope: Envelope) -> M:
        """Returns the message in an envelope. Raises WireError."""
        return self._language.read(envelope.body)
