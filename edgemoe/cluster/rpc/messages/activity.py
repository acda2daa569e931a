"""What an engine's requests choose of late, as it tells its front. Between boxes it travels within Report."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Bitmap, Count, PairTable, Rate, ShareTable


class Activity(Message, frozen=True, kw_only=True, tag="Activity"):
    """What this engine's own requests chose of late, as shares of their tokens in units of 1 / 65535.

    `chosen` is uint16 [L, E], as is `computed`, of steps; `pairs` uint16 [P, 4]: layer, both experts, share; the
    heaviest of each layer. `resident` are the experts in memory, at home or not. Sent every ten seconds.
    """

    tokens: Annotated[float, Meta(ge=0, le=1e15)]  # with decay
    chosen: ShareTable
    pairs: PairTable = b""
    resident: Bitmap = b""
    passed: PairTable = b""  # in place of pairs: an expert, and one of the next layer
    steps: Count = 0  # of this engine
    tokens_per_s: Rate = 0.0  # of late, however short a time has been counted
    computed: ShareTable = b""
    steps_per_token: Rate = 0.0
