"""The language of the control lane, front to front.

    Beat         told several times a second: that the box lives, whether it leads, which plan holds, how busy it is
    Announce     asked when it has changed, answered Welcome (or refused): what the box is and has
    GetPlan      answered PlanIs, with the plan as a tensor
    Forward      a Submit or Cancel for the other box's engine, as it would go to our own, as a tensor; answered Taken
    Tokens       what that engine emits, likewise; answered Taken, which names what nobody waits for any more
    RaftPayload  told: the embedded agreement's own messages

Whatever a leader says carries its epoch in Beat.leading.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgemoe.cluster.wire.keys import Peer
from edgemoe.cluster.wire.net import Failure

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Text = Annotated[str, Meta(max_length=256)]
Bitmap = Annotated[bytes, Meta(max_length=1 << 18)]


class RaftPayload(msgspec.Struct, frozen=True, tag=True):
    """A message between the members of the embedded agreement; opaque here."""

    data: bytes


class Beat(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A sign of life. `leading` is the epoch in which the box leads, 0 if it does not."""

    leading: Count = 0
    seen: Count = 0  # the highest epoch that the box knows of
    plan_version: Count = 0  # what the box goes by; as of the leader, what all are to go by
    plan_digest: Text = ""
    engine: Text = ""  # boot of the engine that takes requests; "" while none does
    requests: Count = 0  # running and waiting there
    slots: Count = 0  # that run at once
    capacity: Count = 0  # that may be there, waiting ones included


class EngineCard(msgspec.Struct, frozen=True):
    """An engine that has opened its lanes, and what it has."""

    boot: Text
    calls_port: Port
    bulk_port: Port
    model: Text  # digest
    layers: Count
    experts: Count
    expert_bytes: Count
    budget_experts: Count  # that can be at home there
    disk: Bitmap
    ram: Bitmap
    shares: bool  # computes for others


class Announce(msgspec.Struct, frozen=True, tag=True):
    """What a box is and has."""

    release: Text
    role: Literal["box", "witness"]
    address: Text  # HOST:PORT of its control lane
    devices: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    ram_bytes: Count = 0
    engine: EngineCard | None = None
    leaving: bool = False
    listed: Annotated[tuple[Peer, ...], Meta(max_length=256)] = ()  # whom it lets in


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The announcement is taken note of."""


class GetPlan(msgspec.Struct, frozen=True, tag=True):
    """Asks for the plan of this digest."""

    digest: Text


class PlanIs(msgspec.Struct, frozen=True, tag=True):
    """The plan's bytes are the message's tensor."""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """The message's tensor is a frame for an engine that serves this model: a Submit or a Cancel."""

    model: Text  # digest


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The message's tensor is a frame of an engine: Emissions."""


class Taken(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """It has been passed on. `unwanted` are (request, attempt) that nobody waits for."""

    unwanted: Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=1 << 14)] = ()


ControlMessage = RaftPayload | Beat | Announce | Welcome | GetPlan | PlanIs | Forward | Tokens | Taken | Failure
CONTROL: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
