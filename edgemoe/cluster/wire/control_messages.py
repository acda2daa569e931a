"""The language of the control lane."""

from __future__ import annotations

import msgspec

from edgemoe.cluster.wire.net import Failure


class RaftPayload(msgspec.Struct, frozen=True, tag=True):
    """A message between the members of the embedded agreement; opaque here."""

    data: bytes


ControlMessage = RaftPayload | Failure
CONTROL: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
