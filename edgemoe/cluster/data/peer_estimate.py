"""Estimates one peer: what experts it has, how fast the link to it is, and how fast it computes.

Times are measured on every call. The peer reports the time that it spent itself; the rest is the link's: a round trip,
and seconds per byte. Calls that follow each other closely wait for each other on the link; then the time between two
answers gives the rate. A pending call counts as at least as slow as it is old, so that a peer that stops answering gets
no more work even before a time-out. Estimates that only calls can measure (computing, and reading from disk) fade, so
that a peer that looked slow once is tried again.
"""

from __future__ import annotations

import numpy as np

from edgemoe.telemetry.unit_time import RECENT, UnitTime
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import ExpertWork, Offer, RemoteCall

SMALL_BYTES = 16 << 10  # messages up to here measure the round trip, larger ones the rate
FIRST_BYTES_PER_S = 50e6  # assumed until measured
FIRST_UNIT_S = 1e-3
READ_BYTES_PER_S = 1e9  # of a peer's disk, assumed until measured
RECOVERY = 0.6  # weight of a measurement that is much better than the mean: the peer has recovered


class PeerEstimate:
    """Holds the estimates of one peer. The event loop writes them; the compute thread reads single fields."""

    def __init__(self, node: str, boot: str, geometry: ExpertGeometry) -> None:
        self.node, self.boot, self._geometry = node, boot, geometry
        self.heard = True  # by our front
        self.ready = False  # it has sent a hello for the same model on the current connection
        self.silent = False  # a call timed out, and nothing was received since it was sent
        self.heard_s = -np.inf  # when its last answer came
        self.answered_s = -np.inf  # to a call
        self.refused = ""  # why it cannot help
        self.ram: BoolArray = np.zeros((geometry.layers, geometry.experts), np.bool_)  # [L, E] in its memory
        self.disk: BoolArray = np.zeros_like(self.ram)
        self.latency_s, self.s_per_byte = 1e-3, 1 / FIRST_BYTES_PER_S
        self.computing, self.reading = (
            UnitTime(FIRST_UNIT_S),
            UnitTime(1 / READ_BYTES_PER_S),
        )  # per unit of work, per byte
        self.calls, self.failures, self.busy_s = 0, 0, 0.0
        self.under_way: dict[int, RemoteCall] = {}

    @property
    def reachable(self) -> bool:
        """Returns whether the peer may be asked."""
        return self.heard and self.ready and not self.silent

    def offer(self, layer: int, wanted: IntArray, now_s: float) -> Offer | None:
        """Returns the peer's offer for the `wanted` experts of the layer; None where it has none of them."""
        ram, disk = self.ram[layer][wanted], self.disk[layer][wanted]
        if not (ram | disk).any():
            return None
        read_s = self._geometry.expert_bytes(layer) * self.reading.at(now_s)
        wait_s = np.where(ram, 0.0, np.where(disk, read_s, np.inf)).astype(np.float32)
        oldest_s = min((call.asked_s for call in list(self.under_way.values())), default=now_s)
        open_s = max(self.latency_s, now_s - oldest_s)
        row_s = 2 * self._geometry.row_bytes * self.s_per_byte
        return Offer(self.node, open_s, row_s, self.computing.at(now_s), wait_s)

    def absent(self, work: ExpertWork) -> int:
        """Counts the work's experts that are not in the peer's memory."""
        return int(np.count_nonzero(~self.ram[work.layer][work.experts]))

    def measure_way(self, size_bytes: int, seconds: float) -> None:
        """Adds a round trip of `size_bytes`, both ways together, without the time that the peer itself spent."""
        if size_bytes <= SMALL_BYTES:
            weight = RECENT if seconds > self.latency_s / 2 else RECOVERY
            self.latency_s += weight * (seconds - self.latency_s)
        else:
            rate = max(0.0, seconds - self.latency_s) / size_bytes
            weight = RECOVERY if 0 < rate < self.s_per_byte / 2 else RECENT  # 0: measures the round trip only
            self.s_per_byte += weight * (max(rate, 1e-11) - self.s_per_byte)

    def measure_flow(self, size_bytes: int, seconds: float) -> None:
        """Adds a transfer of `size_bytes` each way since the last answer, while the link was busy both ways."""
        self.s_per_byte += RECENT * (max(seconds / size_bytes, 1e-11) - self.s_per_byte)

    def measure_work(self, units: float, seconds: float) -> None:
        """Adds the time that the peer reports for computing `units`, with all experts in its memory."""
        self.computing.measure(seconds / units, self.answered_s)

    def measure_reads(self, size_bytes: int, units: float, seconds: float) -> None:
        """Adds a disk read of `size_bytes`: the time that the peer reports, less the expected computing."""
        read_s = seconds - units * self.computing.at(self.answered_s)
        self.reading.measure(max(read_s / size_bytes, 1e-11), self.answered_s)

    def failed(self, seconds: float) -> None:
        """Counts a call without an answer; the link counts as at least that slow."""
        self.failures += 1
        self.latency_s = max(self.latency_s, seconds)
