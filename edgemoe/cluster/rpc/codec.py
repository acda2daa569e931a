"""Encodes a channel's messages for a peer's protocol version, and checks those received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from edgemoe.cluster.rpc.envelope import Buffer, Envelope, seal, unseal
from edgemoe.cluster.rpc.transport import Failure, Transport
from edgemoe.errors import WireError, WireVersionError
from edgemoe.wire.protocol import Language, Versions, check_known

M = TypeVar("M")


class Codec(Generic[M]):
    """Seals messages for peers and opens theirs."""

    def __init__(self, transport: Transport, channel: str, language: Language[M], message_bytes: int) -> None:
        self.channel = channel
        self._transport, self._language = transport, language
        self._message_bytes = message_bytes
        self._speaks: dict[str, Versions] = {}  # by each peer's last message

    def version(self, node: str) -> int:
        """Returns the highest protocol version that both speak; our lowest while the peer has named none."""
        theirs = self._speaks.get(node)
        return self._transport.speaks.common(theirs) if theirs is not None else self._transport.speaks.lowest

    def forget(self, node: str) -> None:
        """Forgets a peer's versions, because it may come back as another release."""
        self._speaks.pop(node, None)

    def seal(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer], **fields: Any) -> list[Buffer]:
        """Returns the frames of a message for a peer. Raises WireError, PeerOutdated."""
        check_known(body, self.version(node), node)
        frames = seal(body, tensors, speaks=self._transport.speaks, **fields)
        if (size := sum(memoryview(frame).nbytes for frame in frames)) > self._message_bytes:
            raise WireError(f"a message of {size} bytes; {self._message_bytes} pass over {self.channel}")
        return frames

    def seal_failure(self, error: Exception, id: int = 0) -> list[Buffer]:
        """For whoever asked, known or not: every version has it."""
        return seal(Failure.of(error), id=id, answer=True, speaks=self._transport.speaks)

    def open(self, node: str, frames: Sequence[memoryview]) -> Envelope:
        """Returns the checked envelope of a message. Raises WireError, or WireVersionError without a common version."""
        envelope = unseal(frames)
        if not self._transport.speaks.common(envelope.speaks):
            raise WireVersionError(
                f"{node} speaks versions {envelope.speaks} of the protocol, "
                f"{self._transport.node} {self._transport.speaks}: run neighbouring releases"
            )
        self._speaks[node] = envelope.speaks
        return envelope

    def read(self, envelope: Envelope) -> M:
        """Returns the message in an envelope. Raises WireError."""
        return self._language.read(envelope.body)
