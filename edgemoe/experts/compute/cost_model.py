"""Estimates how long each way to compute an expert takes on this box, and which ones the CPU should compute."""

from __future__ import annotations

import time

import numpy as np

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import NVME, RAM, VRAM
from edgemoe.experts.tiers.slots import BoolArray
from edgemoe.experts.transfer.link_stats import Clock
from edgemoe.experts.transfer.links import TierLink
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.policy.resolve import CostMatrix as CostArray
from edgemoe.policy.resolve import WayCosts, finish_s, resolve
from edgemoe.telemetry.unit_time import UnitTime, work_units
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.step import TokenGroups

COMPUTE, DISK, BULK, FIRST_LINK = range(4)  # channels; behind the links come the caller's
TOP, CPU, FIRST_ELSEWHERE = range(3)  # ways; TOP: on the fastest tier, which the expert is brought to
# assumed until measured; the CPU's is optimistic, so that it is tried
READ_BYTES_PER_S, COPY_BYTES_PER_S, CPU_BYTES_PER_S = 1e9, 8e9, 50e9
FIRST_UNIT_S = 1e-4
FEW = 16  # experts that are all considered; of more, only the experts that the CPU computes fastest, as time allows
WORTH_S = 1e-3  # least gain for a layer: deciding, and copying up later, also take time
RECENT = 0.1


class CostModel:
    """Estimates the cost of each way to compute an expert on this box. Measured by one compute thread."""

    def __init__(
        self,
        residency: Residency,
        loader: ExpertLoader,
        sizes_bytes: IntArray,
        *,
        cpu_helps: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes the size of an expert of each layer, `sizes_bytes` [L]."""
        self._cpu_helps = cpu_helps
        self._residency, self._loader, self._clock = residency, loader, clock
        self._sizes_bytes: list[int] = sizes_bytes.tolist()
        self._largest_bytes: int = max(self._sizes_bytes)
        self.thread_unit_s = FIRST_UNIT_S  # of the compute thread, for a unit of work on the top tier
        self.device_unit_s = 0.0  # of a device that works beside it, likewise
        self.cpu = UnitTime(self._largest_bytes / CPU_BYTES_PER_S)  # for a largest one that it does beside devices

    def observe(self, units: float, seconds: float) -> None:
        """Adds the compute thread's time for work on the top tier."""
        self.thread_unit_s += RECENT * (seconds / units - self.thread_unit_s)

    def observe_device(self, units: float, seconds: float) -> None:
        """Adds the device's time for work that the compute thread launched."""
        self.device_unit_s += RECENT * (seconds / units - self.device_unit_s)

    @property
    def unit_s(self) -> float:
        """Returns the seconds of a unit of work on the top tier, where launching and computing overlap."""
        return max(self.thread_unit_s, self.device_unit_s)

    def observe_cpu(self, layer: int, units: float, seconds: float) -> None:
        """Adds the CPU's time for work of a layer that it did beside devices."""
        self.cpu.measure(seconds / (units * self._share(layer)), self._clock())

    def read_s(self, layer: int) -> float:
        """Returns the seconds to read one expert of a layer from the disk."""
        return self._sizes_bytes[layer] / (self._loader.stats.bytes_per_s or READ_BYTES_PER_S)

    def raise_s(self, layer: int) -> float:
        """Returns the seconds to copy one expert of a layer from RAM to the device that takes it soonest."""
        return min((self._copy_s(layer, link) for link in self._loader.links), default=0.0)

    def _copy_s(self, layer: int, link: TierLink) -> float:
        return self._sizes_bytes[layer] / (link.stats.unhindered_bytes_per_s or COPY_BYTES_PER_S)

    def _cpu_s(self, layer: int) -> float:
        return self.cpu.at(self._clock()) * self._share(layer)

    def _share(self, layer: int) -> float:
        """Returns the size of a layer's experts among the largest ones'."""
        return self._sizes_bytes[layer] / self._largest_bytes

    def load(
        self, layer: int, experts: IntArray, tiers: IntArray, units: FloatArray, more: tuple[int, int] = (0, 0)
    ) -> CostArray:
        """Returns the seconds for which each expert [n] in `tiers` [n] occupies each channel, by way, [n, w, c].

        See `WayCosts`. `more` ways and channels, filled with 0, are appended to the box's own.
        """
        links = self._loader.links
        load = np.zeros((len(experts), FIRST_ELSEWHERE + more[0], FIRST_LINK + len(links) + more[1]))
        load[:, TOP, COMPUTE] = self.unit_s * units
        load[:, TOP, DISK] = np.where(tiers == NVME, self.read_s(layer), 0.0)
        load[:, CPU, COMPUTE] = np.inf
        for i, link in enumerate(links):
            its = self._residency.device_of[layer, experts] == i
            load[its, TOP, FIRST_LINK + i] = self._copy_s(layer, link)
            if self._cpu_helps and link.stats.bytes_per_s:  # else the link goes first, so that it is measured
                load[its & (tiers == RAM), CPU, COMPUTE] = self._cpu_s(layer)
        load[:, CPU, COMPUTE] *= units
        return load

    def for_cpu(self, layer: int, group: TokenGroups) -> BoolArray | None:
        """Returns a mask of the experts [n] that the CPU should compute from RAM to finish soonest; None for none."""
        if not self._loader.links or not self._cpu_helps:
            return None
        tiers = self._residency.tiers_of(layer, group.experts)
        in_ram, missing = tiers == RAM, int(np.count_nonzero(tiers != VRAM))
        copy_s, cpu_s = [self._copy_s(layer, link) for link in self._loader.links], self._cpu_s(layer)
        if not in_ram.any() or (missing + 0.5) * max(copy_s) <= cpu_s + WORTH_S:
            return None
        chosen = self._split(layer, group.experts, tiers, work_units(group.offsets))
        return chosen if chosen.any() else None

    def _split(self, layer: int, experts: IntArray, tiers: IntArray, units: FloatArray) -> BoolArray:
        """Returns a mask of the experts [n] that the CPU should compute if no single way is best for all."""
        missing, chosen = np.flatnonzero(tiers != VRAM), np.zeros(len(experts), np.bool_)
        load = self.load(layer, experts[missing], tiers[missing], units[missing])
        alone, busy = load.sum(axis=2), np.zeros(load.shape[2])
        busy[COMPUTE] = self.unit_s * (units.sum() - units[missing].sum())
        for i, link in enumerate(self._loader.links):
            busy[FIRST_LINK + i] = 0.0 if link.idle() else link.piece_s / 2  # of a prefetch under way
        ways = WayCosts(load, alone, np.zeros_like(busy), busy)
        late_s, order = finish_s(ways, np.full(len(missing), TOP)), np.argsort(alone[:, CPU], kind="stable")
        in_time = int(
            np.searchsorted(np.cumsum(alone[order, CPU]), late_s)
        )  # the number that the CPU can compute until then
        if in_time:
            some, rest = np.split(order, [max(in_time, FEW)])
            ways = WayCosts(load[some], alone[some], ways.opening, busy + load[rest, TOP].sum(axis=0))
            best = resolve(ways)
            if late_s - best.finish_s >= WORTH_S:
                chosen[missing[some]] = best.way == CPU
        return chosen
