"""Work that boxes do for each other, as the compute thread sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray


class ExpertWork(NamedTuple):
    """Calls of distinct experts [n] of one layer; the i-th has the calls `offsets[i]:offsets[i + 1]` of m.

    Its result is the weighted sum of the experts' outputs by row, [r, H], in the model's dtype as `hidden` is.
    """

    layer: int
    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [m] row of `hidden`
    weights: FloatArray  # [m] routing weight
    hidden: npt.NDArray[np.uint8]  # [r, H * bytes of an item]


class Offer(NamedTuple):
    """What a peer would take, in seconds, for some experts [n] of a layer."""

    node: str
    open_s: float  # once: the round trip
    row_s: float  # each row of hidden states, there and back
    unit_s: float  # each unit of work, see `work_units`
    wait_s: FloatArray  # [n] until the expert is at hand there; inf: it has not got it


class RemoteCall:
    """Work that a peer was asked to do, and what came of it."""

    __slots__ = ("asked_s", "error", "node", "result", "work")

    def __init__(self, node: str, work: ExpertWork, asked_s: float) -> None:
        self.node, self.work, self.asked_s = node, work, asked_s
        self.result: memoryview | None = None  # [r, H] in the model's dtype
        self.error: Exception | None = None


class ExpertPeers(Protocol):
    """The other boxes, as the compute thread sees them. Never waits."""

    timeout_s: float  # after which a call has failed

    def offers(self, layer: int, experts: IntArray) -> Sequence[Offer]:
        """What the peers that can be reached would take for some experts [n] of a layer."""

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        """Seconds to bring each expert's bytes [n] here from a peer, some left out; inf where none has it."""

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        """Asks a peer; puts the call into `answers` when it has a result or an error."""


TOKENS_PER_READ = 8  # tokens that an expert computes in the time that reading its weights takes


def work_units(offsets: IntArray) -> FloatArray:
    """What computing each of n experts costs, in reads of one expert's weights; `offsets` [n + 1] of their calls."""
    units: FloatArray = np.maximum(1.0, np.diff(offsets) / TOKENS_PER_READ).astype(np.float32)
    return units
