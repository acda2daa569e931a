"""Which experts requests choose, as an engine tells its front, and a front the leader: counts, no tokens, no order.

    FindPrefix   front -> engine  what has the prefix cache of this prompt?
    PrefixFound  engine -> front  what that part of it chose
    PromptRead   engine -> front  what a prompt chose, once it is computed, where its front asked
    Choosing     engine -> front  what all that run there are expected to choose in a step, what that costs, and
                                  where boxes go by expert clusters, what requests chose that have ended

Between boxes PromptRead travels as Emissions do, Choosing within EngineUse, and the first two not at all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Attempt, Name, Salt, Seconds, ShareTable, Small, Tokens

ByteTable = Annotated[bytes, Meta(max_length=1 << 17)]  # of a model's experts, a byte each
FAR = 3  # places of an expert beside the fastest: RAM, a peer's memory, the disk
FarSeconds = Annotated[tuple[Seconds, ...], Meta(max_length=FAR)]
MOST_ENDED = 4  # requests that one message tells of; there is no need to know all


class SignatureTable(msgspec.Struct, frozen=True):
    """An expert signature: what so many tokens chose, as shares of them in units of 1 / 65535, uint16 [L, E]."""

    tokens: Small
    chosen: ShareTable


class EndedRequest(msgspec.Struct, frozen=True):
    """What a request chose that has ended. Which one that was is not said."""

    prompt: SignatureTable
    answer: SignatureTable


EndedRequests = Annotated[tuple[EndedRequest, ...], Meta(max_length=MOST_ENDED)]


class EngineChoices(msgspec.Struct, frozen=True):
    """What an engine's step is expected to load. Tables are uint8 [L, E]."""

    absent: ByteTable  # how likely none of those that run chooses the expert, in units of 1 / 255
    far: ByteTable  # 0 for an expert in place, else from which of `far_s` it has to be reached
    far_s: FarSeconds  # what that takes: from RAM, from a peer, from the disk
    step_s: Seconds  # of a step beside experts
    expert_s: Seconds  # of each distinct expert of each layer


class FindPrefix(Message, frozen=True, kw_only=True, tag="FindPrefix"):
    """Asks what the experts are that the part of a waiting request's prompt chose which the prefix cache has."""

    since = 2
    request: Name
    prompt: Tokens
    salt: Salt = b""  # of the request


class PrefixFound(Message, frozen=True, kw_only=True, tag="PrefixFound"):
    """Answers FindPrefix with the sum over the prompt's cached blocks; None where there are none."""

    since = 2
    request: Name
    signature: SignatureTable | None = None


class PromptRead(Message, frozen=True, kw_only=True, tag="PromptRead"):
    """Says which experts a prompt's whole blocks chose, those that came from the prefix cache included."""

    since = 2
    request: Name
    attempt: Attempt
    signature: SignatureTable


class Choosing(Message, frozen=True, kw_only=True, tag="Choosing"):
    """Says what an engine's requests are expected to choose. Sent on change, a few times a second at most."""

    since = 2
    choices: EngineChoices
    ended: EndedRequests = ()
