"""The language of the control channel, front to front.

    Beat         told several times a second: that the box lives, whether it leads, which plan holds, how busy it is
    Announce     asked when it has changed, or a Beat wants it, answered Welcome (or refused): what the box is and has
    GetPlan      answered PlanIs, with the plan as a tensor
    Forward      a Submit or Cancel for the other box's engine, as it would go to our own, as a tensor; answered Taken
    Tokens       what that engine emits, likewise; answered Taken, which names what nobody waits for any more
    Check        asked once a second of whoever runs requests of ours, answered Dropped: those that it has not got
    RaftPayload  told: the embedded agreement's own messages

Whatever a leader says carries its epoch in Beat.leading.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.protocol import Language, Message
from edgemoe.cluster.rpc.transport import Failure
from edgemoe.types.bounds import MAX_NODES, Bitmap, Bytes, Count, Port, Small, Text

MAX_PAYLOAD_BYTES = 1 << 20  # of the agreement in one message
MAX_UNWANTED = 2000  # requests named in one answer; the rest with the next
Guests = Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_UNWANTED)]  # (request, attempt)


class RaftPayload(Message, frozen=True, tag="RaftPayload"):
    """A message between the members of the embedded agreement; opaque here."""

    data: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]


class Beat(Message, frozen=True, tag="Beat"):
    """A sign of life. `leading` is the epoch in which the box leads, 0 if it does not."""

    leading: Count = 0
    seen: Count = 0  # the highest epoch that the box knows of
    plan_version: Count = 0  # what the box goes by; as of the leader, what all are to go by
    plan_digest: Text = ""
    engine: Text = ""  # boot of the engine that takes requests; "" while none does
    requests: Count = 0  # running and waiting there
    slots: Count = 0  # that run at once
    capacity: Count = 0  # that may be there, waiting ones included
    unmet: bool = False  # the receiver's announcement is wanted: this box has none


class EngineCard(msgspec.Struct, frozen=True):
    """An engine that has opened its channels, and what it has."""

    boot: Text
    calls_port: Port
    bulk_port: Port
    model: Text  # digest
    layers: Small
    experts: Small
    expert_bytes: Bytes
    budget_experts: Count  # that can be at home there
    disk: Bitmap
    ram: Bitmap
    shares: bool  # computes for others


class Announce(Message, frozen=True, tag="Announce"):
    """What a box is and has."""

    release: Text
    role: Literal["box", "witness"]
    address: Text  # HOST:PORT of its control channel
    devices: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    ram_bytes: Bytes = 0
    engine: EngineCard | None = None
    leaving: bool = False
    agreement: Annotated[str, Meta(max_length=400)] = ""  # by which it decides who leads; "" of a box that joins
    listed: Annotated[tuple[Peer, ...], Meta(max_length=MAX_NODES)] = ()  # whom it lets in


class Welcome(Message, frozen=True, tag="Welcome"):
    """The announcement is taken note of."""


class GetPlan(Message, frozen=True, tag="GetPlan"):
    """Asks for the plan of this digest."""

    digest: Text


class PlanIs(Message, frozen=True, tag="PlanIs"):
    """The plan's bytes are the message's tensor."""


class Forward(Message, frozen=True, tag="Forward"):
    """The message's tensor is a frame for an engine that serves this model: a Submit or a Cancel."""

    model: Text  # digest


class Tokens(Message, frozen=True, tag="Tokens"):
    """The message's tensor is a frame of an engine: Emissions."""


class Taken(Message, frozen=True, tag="Taken"):
    """It has been passed on. `unwanted` are (request, attempt) that nobody waits for."""

    unwanted: Guests = ()


class Check(Message, frozen=True, tag="Check"):
    """Asks which of these requests, by (request, attempt), the engine of that boot has not got."""

    engine: Text
    requests: Guests


class Dropped(Message, frozen=True, tag="Dropped"):
    """Requests that are neither running nor on their way back: who owns them is to run them again."""

    requests: Guests = ()


ControlMessage = (
    RaftPayload | Beat | Announce | Welcome | GetPlan | PlanIs | Forward | Tokens | Taken | Check | Dropped | Failure
)
CONTROL: Language[ControlMessage] = Language(*get_args(ControlMessage))
