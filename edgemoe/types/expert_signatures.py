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
    """The experts that `tokens` tokens chose, as shares of the tokens in units of 1 / 65535, uint16 [L, E]."""

    tokens: Small
    chosen: ShareTable


class EndedRequest(msgspec.Struct, frozen=True):
    """The signatures of an unnamed request that has ended."""

    prompt: ExpertSignature
    answer: ExpertSignature


EndedRequests = Annotated[tuple[EndedRequest, ...], Meta(max_length=MOST_ENDED)]


class ExpertDemand(msgspec.Struct, frozen=True):
    """The experts that an engine's next step is expected to load. Tables are uint8 [L, E]."""

    absent: ByteTable  # probability that no running request chooses the expert, in units of 1 / 255
    far: ByteTable  # 0 for an expert in place, else the index in `far_s` of its place, from 1
    far_s: FarSeconds  # time to reach it: from RAM, from a peer, from the disk
    step_s: Seconds  # of a step beside experts
    expert_s: Seconds  # of each distinct expert of each layer
