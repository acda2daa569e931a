"""One peer as its callers see it: what it has, how fast the way to it is, and how fast it computes.

Times are measured on every call. Of a call's time, what the peer says that it spent itself is its own; the rest is
the way: a round trip, and seconds per byte. Where calls follow each other closely, they wait for each other on the way;
then what lies between two answers tells the rate. A call without an answer counts as at least as slow as it is old, so
that a peer that stops answering loses its work before any time-out says so. What only calls measure (computing, and
reading what is not in memory) fades, so that a peer that looked slow once is tried again.
"""

from __future__ import annotations

import numpy as np

from edgemoe.telemetry.unit_time import RECENT, UnitTime
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.peers import ExpertWork, Offer, RemoteCall

SMALL_BYTES = 16 << 10  # messages up to here measure the round trip, larger ones the rate
FIRST_BYTES_PER_S = 50e6  # assumed until measured
FIRST_UNIT_S = 1e-3
READ_BYTES_PER_S = 1e9  # of a peer's disk, assumed until measured
RECOVERY = 0.6  # weight of a measurement that is much better than those before: whatever kept the peer is over


class PeerEstimate:
    """Belongs to the event loop; the compute thread reads single fields."""

    def __init__(self, node: str, boot: str, layers: int, experts: int) -> None:
        self.node, self.boot = node, boot
        self.heard = True  # by our front
        self.ready = False  # it has said hello, for the same model, on the connection that stands
        self.silent = False  # a call was not answered in time, and nothing has been heard since it was asked
        self.heard_s = -np.inf  # when its last answer came
        self.answered_s = -np.inf  # to a call
        self.refused = ""  # why it cannot help
        self.ram: BoolArray = np.zeros((layers, experts), np.bool_)  # [L, E] in its memory
        self.disk: BoolArray = np.zeros((layers, experts), np.bool_)
        self.latency_s, self.s_per_byte = 1e-3, 1 / FIRST_BYTES_PER_S
        self.computing, self.reading = (
            UnitTime(FIRST_UNIT_S),
            UnitTime(1 / READ_BYTES_PER_S),
        )  # per unit of work, per byte
        self.calls, self.failures, self.busy_s = 0, 0, 0.0
        self.under_way: dict[int, RemoteCall] = {}

    @property
    def reachable(self) -> bool:
        """Whether it may be asked."""
        return self.heard and self.ready and not self.silent

    def offer(self, layer: int, wanted: IntArray, row_bytes: int, expert_bytes: int, now_s: float) -> Offer | None:
        """What it would take for the `wanted` experts of the layer; None where it has none of them."""
        ram, disk = self.ram[layer][wanted], self.disk[layer][wanted]
        if not (ram | disk).any():
            return None
        wait_s = np.where(ram, 0.0, np.where(disk, expert_bytes * self.reading.at(now_s), np.inf)).astype(np.float32)
        oldest_s = min((call.asked_s for call in list(self.under_way.values())), default=now_s)
        open_s = max(self.latency_s, now_s - oldest_s)
        return Offer(self.node, open_s, 2 * row_bytes * self.s_per_byte, self.computing.at(now_s), wait_s)

    def absent(self, work: ExpertWork) -> int:
        """How many of the work's experts are not in its memory."""
        return int(np.count_nonzero(~self.ram[work.layer][work.experts]))

    def measure_way(self, size_bytes: int, seconds: float) -> None:
        """A round trip of so many bytes, both ways together, without what the peer itself needed."""
        if size_bytes <= SMALL_BYTES:
            weight = RECENT if seconds > self.latency_s / 2 else RECOVERY
            self.latency_s += weight * (seconds - self.latency_s)
        else:
            rate = max(0.0, seconds - self.latency_s) / size_bytes
            weight = RECOVERY if 0 < rate < self.s_per_byte / 2 else RECENT  # 0: it says nothing but of the round trip
            self.s_per_byte += weight * (max(rate, 1e-11) - self.s_per_byte)

    def measure_flow(self, size_bytes: int, seconds: float) -> None:
        """So many bytes, each way, in the time since the last answer, while both ways were busy."""
        self.s_per_byte += RECENT * (max(seconds / size_bytes, 1e-11) - self.s_per_byte)

    def measure_work(self, units: float, seconds: float) -> None:
        """It computed so many units, all in its memory, in the time that it states in the answer that just came."""
        self.computing.measure(seconds / units, self.answered_s)

    def measure_reads(self, size_bytes: int, units: float, seconds: float) -> None:
        """It read so many bytes first: that took what computing does not take of the time that it states."""
        read_s = seconds - units * self.computing.at(self.answered_s)
        self.reading.measure(max(read_s / size_bytes, 1e-11), self.answered_s)

    def failed(self, seconds: float) -> None:
        """A call was not answered: the way is at least as slow as that."""
        self.failures += 1
        self.latency_s = max(self.latency_s, seconds)
