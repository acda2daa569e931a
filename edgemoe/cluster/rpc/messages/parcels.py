"""Messages between fronts by which a long frame travels beside the control lane: who is told of it fetches it.

    Parcel       in Forward, in place of its tensor: names a frame that waits at the sender
    FetchParcel  asked of the sender on the second connection, answered ParcelPart: a part of it
    ParcelPart   carries that part as its tensor

A parcel is named anew each time that a frame is sent, so that a part of an earlier one is never taken for one of this.
"""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
import xxhash
from msgspec import Meta

from edgemoe.cluster.rpc.envelope import MAX_TENSOR_BYTES, Buffer
from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Bytes

PARCEL_PART_BYTES = 64 << 10  # in one message: few enough that a heartbeat behind them is not late on a slow link
KEY_BYTES = 16
ParcelKey = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Parcel(msgspec.Struct, frozen=True):
    """A frame of so many bytes. The checksum is of the key and all of them."""

    key: ParcelKey
    bytes: Annotated[int, Meta(ge=1, le=MAX_TENSOR_BYTES)]
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]

    @classmethod
    def of(cls, key: ParcelKey, frame: Buffer) -> Self:
        """Returns the name of a frame."""
        return cls(key, len(frame), _checksum(key, frame))

    def is_intact(self, frame: Buffer) -> bool:
        """Returns whether these bytes are the frame."""
        return self.checksum == _checksum(self.key, frame)


class FetchParcel(Message, frozen=True, tag="FetchParcel"):
    """Asks for `bytes` bytes from `offset`."""

    since = 2
    key: ParcelKey
    offset: Bytes
    bytes: Annotated[int, Meta(ge=1, le=PARCEL_PART_BYTES)]


class ParcelPart(Message, frozen=True, tag="ParcelPart"):
    """Carries the bytes asked for."""

    since = 2


def _checksum(key: bytes, frame: Buffer) -> str:
    digest = xxhash.xxh3_128(key)
    digest.update(frame)
    return digest.hexdigest()
