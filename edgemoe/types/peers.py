"""Expert work that boxes compute for each other: the types that the compute thread uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray


class ExpertWork(NamedTuple):
    """Calls of n distinct experts of one layer, m calls in all; expert i has calls `offsets[i]:offsets[i + 1]`.

    The result is the weighted sum of the experts' outputs by row, [r, H], in the model's dtype as `hidden` is.
    """

    layer: int
    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [m] row of `hidden`
    weights: FloatArray  # [m] routing weight
    hidden: npt.NDArray[np.uint8]  # [r, H * bytes of an item]


class PeerCosts(NamedTuple):
    """A peer's estimated cost in seconds of computing experts [n] of a layer."""

    node: str
    open_s: float  # of the round trip, once per call
    row_s: float  # of each row of hidden states, sent and returned
    unit_s: float  # of each unit of work, see `telemetry.unit_time.work_units`
    wait_s: FloatArray  # [n] until the expert is in memory there; inf: the peer does not have it


class RemoteCall:
    """A call to a peer, and its result or error once there is one."""

    __slots__ = ("asked_s", "error", "node", "result", "work")

    def __init__(self, node: str, work: ExpertWork, asked_s: float) -> None:
        self.node, self.work, self.asked_s = node, work, asked_s
        self.result: memoryview | None = None  # [r, H] in the model's dtype
        self.error: Exception | None = None


class ExpertPeers(Protocol):
    """Calls other boxes from the compute thread. No method waits."""

    timeout_s: float  # after which a call has failed

    def offers(self, layer: int, experts: IntArray) -> Sequence[PeerCosts]:
        """Returns the offers of all reachable peers for experts [n] of a layer."""

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        """Returns seconds to fetch each expert [n] from a peer that is not in `without`; inf where none has it."""

    def holders_away(self, layer: int, expert: int) -> Sequence[str]:
        """Returns the peers that have the expert and cannot be reached at the moment."""

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        """Sends work to a peer. Puts the call into `answers` when it has a result or an error."""


def row_floats(rows: memoryview, bf16: bool) -> FloatArray:
    """Returns the numbers of rows of hidden states or sums, which are bfloat16 where `bf16`, else float32."""
    if bf16:
        return np.left_shift(np.frombuffer(rows, np.uint16), 16, dtype=np.uint32).view(np.float32)
    return np.frombuffer(rows, np.float32)
