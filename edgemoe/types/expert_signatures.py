"""Expert signatures, and the tables an engine reports about them: counts and shares; no tokens, no order of choices."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.types.bounds import Seconds, ShareTable, Small

ByteTable = Annotated[bytes, Meta(max_length=1 << 17)]  # of a model's experts, a byte each
FAR = 3  # places of an expert beside the fastest: RAM, a peer's memory, the disk
FarSeconds = Annotated[tuple[Seconds, ...], Meta(max_length=FAR)]
MOST_ENDED = 4  # requests that one message tells of; there is no need to know all


class ExpertSignature(msgspec.Struct, frozen=True):
    """An expert signature: what so many tokens chose, as shares of them in units of 1 / 65535, uint16 [L, E]."""

    tokens: Small
    chosen: ShareTable


class EndedRequest(msgspec.Struct, frozen=True):
    """What a request chose that has ended. Which one that was is not said."""

    prompt: ExpertSignature
    answer: ExpertSignature


EndedRequests = Annotated[tuple[EndedRequest, ...], Meta(max_length=MOST_ENDED)]


class ExpertDemand(msgspec.Struct, frozen=True):
    """What an engine's step is expected to load. Tables are uint8 [L, E]."""

    absent: ByteTable  # how likely none of those that run chooses the expert, in units of 1 / 255
    far: ByteTable  # 0 for an expert in place, else from which of `far_s` it has to be reached
    far_s: FarSeconds  # what that takes: from RAM, from a peer, from the disk
    step_s: Seconds  # of a step beside experts
    expert_s: Seconds  # of each distinct expert of each layer
