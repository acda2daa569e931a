"""The operations of the embedded agreement's log, as they lie in journals and pass between releases.

    operation = version (1 byte) | msgpack array: name, fields in order

Names, versions and the order of fields never change; a field that is added comes last and has a default. `version` is
the version of the protocol that brought the operation: a leader proposes none that a voter does not speak.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from edgemoe.wire.protocol import PROTOCOL_VERSIONS

MAX_OP_BYTES = 4096

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]


class ClaimLease(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """`node` leads in `epoch`, unless another epoch or renewal than expected came in between."""

    SINCE: ClassVar[int] = 1
    node: Name
    epoch: Count
    expect_epoch: Count
    expect_renewals: Count


class RenewLease(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """The leader of `epoch` renews its lease."""

    SINCE: ClassVar[int] = 1
    epoch: Count


class ResignLease(msgspec.Struct, frozen=True, array_like=True, tag="resign"):
    """The lease of `epoch` ends."""

    SINCE: ClassVar[int] = 1
    epoch: Count


class CommitPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """The plan of this version and digest is the plan."""

    SINCE: ClassVar[int] = 1
    epoch: Count
    version: Count
    digest: Annotated[str, Meta(max_length=256)]


Op = ClaimLease | RenewLease | ResignLease | CommitPlan
_decoder: msgspec.msgpack.Decoder[Op] = msgspec.msgpack.Decoder(Op)


def encode(op: Op) -> bytes:
    """Returns the operation as it is proposed."""
    return bytes([op.SINCE]) + msgspec.msgpack.encode(op)


def decode(data: bytes) -> Op | None:
    """Returns the operation; None for a later version or for data that is no operation. Raises nothing."""
    if not 0 < len(data) <= MAX_OP_BYTES or not 1 <= data[0] <= PROTOCOL_VERSIONS.highest:
        return None
    try:
        op = _decoder.decode(data[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return op if data[0] == op.SINCE else None
