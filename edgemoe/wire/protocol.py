"""Protocol versions, and languages: the messages of one channel, and how they are decoded.

Every message names the versions that its sender speaks. The next version may add a message with `since` = that version,
or an optional field. Tags and field names never change; a renamed attribute keeps its outer name by
`msgspec.field(name=...)`. tests/support/protocol.json holds them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, Union

import msgspec
from msgspec import Meta

from edgemoe.errors import PeerOutdated, UnknownMessage, WireError

M = TypeVar("M")
Version = Annotated[int, Meta(ge=1, le=255)]
MAX_FRAMES = 16  # of one message: its envelope, then tensors
MAX_TENSOR_BYTES = 64 << 20
Buffer = bytes | bytearray | memoryview
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class Versions(NamedTuple):
    """A range of protocol versions, both ends included."""

    lowest: Version
    highest: Version

    def common(self, theirs: Versions) -> int:
        """Returns the highest version that both speak; 0 where there is none."""
        highest = min(self.highest, theirs.highest)
        return highest if highest >= max(self.lowest, theirs.lowest) else 0

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"


PROTOCOL_VERSIONS = Versions(3, 3)  # spoken by this release; 0.1.0 speaks 1 and 2, whose messages have other names


class Message(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """Base of all messages; each has its own `tag`."""

    since: ClassVar[int] = 1  # the first version of the protocol that has it


class _Tagged(msgspec.Struct):
    type: str = ""


class MessageLanguage(Generic[M]):
    """Decodes the messages of one channel, or of one direction between front and engine."""

    def __init__(self, *messages: type[Any]) -> None:
        self.messages = {str(message.__struct_config__.tag): message for message in messages}
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(Union[messages])  # noqa: UP007

    def read(self, body: bytes | memoryview | msgspec.Raw) -> M:
        """Returns a checked message. Raises UnknownMessage for a tag of no message here, else WireError."""
        try:
            return self._decoder.decode(body)
        except UNREADABLE as error:
            tag = tag_of(body)
            if tag and tag not in self.messages:
                raise UnknownMessage(f"{tag[:64]!r} is no message that this release reads here") from error
            raise WireError(f"a {tag[:64] or 'message'} that cannot be read: {error}") from error


def tag_of(body: bytes | memoryview | msgspec.Raw) -> str:
    """Returns a message's tag; "" where it cannot be read."""
    try:
        return msgspec.msgpack.decode(body, type=_Tagged).type
    except UNREADABLE:
        return ""


def check_known(message: msgspec.Struct, spoken: int, whom: str) -> None:
    """Raises PeerOutdated for a message that version `spoken` of the protocol does not have."""
    if message.since > spoken:  # type: ignore[attr-defined]
        raise PeerOutdated(f"{whom} runs an earlier release, which does not know {type(message).__struct_config__.tag}")
