"""An engine's state at one moment, for dashboards: the place of each expert, and each request's progress.

One byte is one expert, a cell: its place, whether it is on its way up, and how much it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgemoe.types.bounds import Count, Seconds, Small, TokenCount

MAX_CELLS = 1 << 17
MAX_SHOWN = 64  # requests
NO_EXPERT, ELSEWHERE, ON_DISK, IN_RAM, IN_VRAM = range(5)  # a cell's three lowest bits: the best place that has it
COMING = 1 << 3  # on its way to a better one
USE_BITS, MOST_USE = 4, 15  # the four highest: 0 unused of late, 8 the mean of its layer, 2 more are twice as much

Cells = Annotated[bytes, Meta(max_length=MAX_CELLS)]
Phase = Literal["waiting", "prefill", "decode", "paused"]
TierCounts = Annotated[tuple[Count, ...], Meta(max_length=8)]


class RequestProgress(msgspec.Struct, frozen=True):
    """The progress of one request, without its user and its text."""

    phase: Phase
    age_s: Seconds
    prompt_tokens: TokenCount
    computed: TokenCount  # tokens that have keys and values
    emitted: TokenCount


class ServingSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Experts and requests of an engine at one moment."""

    layers: Small
    experts: Small
    cells: Cells  # [L, E]; empty of a model that has more than MAX_CELLS
    served: TierCounts = ()  # expert calls so far, by the tier that had the expert: VRAM, RAM, NVMe
    tokens: Count = 0  # decoded so far
    requests: Annotated[tuple[RequestProgress, ...], Meta(max_length=MAX_SHOWN)] = ()  # running, then waiting
