"""From budgets to a working set of tiers: slabs, residency, links and arithmetic, for every kind of device."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from edgemoe.config.budgets import DeviceBudget
from edgemoe.errors import ConfigError
from edgemoe.experts.activity import ActivityCounter
from edgemoe.experts.compute.cost_model import CostModel
from edgemoe.experts.compute.cpu_experts import CpuExperts
from edgemoe.experts.compute.cuda_link import ignore_progress
from edgemoe.experts.compute.device_spread import DeviceSpread
from edgemoe.experts.compute.dispatch import DeviceTime, EmulatedCompute, ExpertCompute, HostCompute
from edgemoe.experts.compute.moe import AS_USUAL, FetchOptions, TieredExperts
from edgemoe.experts.compute.peer_layer_step import PeerExperts
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slab import HostSlab, layout_in
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool, TierUsage
from edgemoe.experts.transfer.link_stats import SavedLinkStats
from edgemoe.experts.transfer.links import EmulatedLink, TierLink
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.kernels.cpu.expert_math import ExpertMath, ExpertSlab
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.kernels.cpu.runtime import KernelContext
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, ExpertReader, LivePolicy, Move, Tier
from edgemoe.types.peers import ExpertPeers
from edgemoe.types.size_classes import SlabLayout


@dataclass(frozen=True, slots=True)
class TierMemory:
    """The memory that the tiers may use."""

    ram_bytes: int
    devices: Sequence[DeviceBudget] = ()
    containment: bool = True  # experts in VRAM are in RAM too
    lock_ram: bool = False  # keep it out of reach of swap
    costs: Path | None = None  # the file of measured transfer times
    progress: Callable[[float], None] = ignore_progress  # takes the share of RAM that is pinned for a GPU


class TierDevice(NamedTuple):
    """A device's parts; the slab belongs to link and compute."""

    layout: SlabLayout
    link: TierLink
    compute: ExpertCompute


class ExpertTiers:
    """All that one engine needs to run experts from NVMe, RAM and devices.

    `experts` is for the decoder; `run` belongs on the engine's asyncio loop, in a task that is cancelled to stop;
    `close` comes after it. `residency` and `loader` are for the controller.
    """

    def __init__(
        self,
        geometry: ExpertGeometry,
        store: ExpertReader,
        memory: TierMemory,
        policies: Mapping[Tier, LivePolicy],
        kernels: KernelContext | None,
        *,
        fetching: FetchOptions = AS_USUAL,
        on_disk: BoolArray | None = None,
    ) -> None:
        """Allocates the tiers. `policies` for VRAM and RAM may be one object; `kernels` compute on the CPU.

        `on_disk` [L, E] marks the experts that the store can read by itself; None: all. Raises CapacityError for a
        budget that holds no expert.
        """
        ram = HostSlab(layout_in(memory.ram_bytes, geometry, "RAM for experts"), lock=memory.lock_ram)
        self.geometry, self.ram, self.ram_bytes = geometry, ram, ram.size_bytes
        self.on_disk = geometry.exists if on_disk is None else on_disk
        self._kernels, self._math = kernels, (math := ExpertMath(kernels))
        self._on_gpu = any(device.kind.startswith("cuda") for device in memory.devices)
        slabs = _matrices(ram, geometry)
        math.calibrate(dict.fromkeys(slab.layout for slab, _ in slabs), geometry.bf16)
        self.devices = [
            _open(device, geometry, ram, math, memory.progress) for device in memory.devices if device.kind != "cpu"
        ]
        pools = [
            SlotPool(Tier.VRAM, geometry.layers, geometry.experts, device.layout, policies[Tier.VRAM])
            for device in self.devices
        ]
        ram_pool = SlotPool(Tier.RAM, geometry.layers, geometry.experts, ram.layout, policies[Tier.RAM])
        host = HostCompute(slabs, math)
        self._computes = computes = [device.compute for device in self.devices] or [host.clone_for_thread(math)]
        self.residency = Residency(ram_pool, pools, containment=memory.containment)
        device_links = [device.link for device in self.devices]
        self.loader = ExpertLoader(self.residency, store, ram, device_links, on_disk=on_disk)
        links = {str(i): device.link.stats for i, device in enumerate(self.devices)}
        self.link_stats = {"nvme": self.loader.stats, **links}
        self._saved_stats = SavedLinkStats(memory.costs, self.link_stats)
        self.experts = TieredExperts(
            geometry,
            self.residency,
            self.loader,
            computes,
            CpuExperts(
                self.residency,
                host,
                CostModel(self.residency, self.loader, geometry.strides_bytes, cpu_helps=fetching.cpu_helps),
            ),
            fetching,
        )

    def join(self, peers: ExpertPeers) -> None:
        """Lets peers compute or send missing experts from now on."""
        self.experts.remote = remote = PeerExperts(
            self.geometry, self.residency, self.experts.cpu_experts.costs, peers, self.on_disk
        )
        self.loader.elsewhere = remote.elsewhere

    def spread_by(self, activity: ActivityCounter | None) -> None:
        """Distributes experts over several devices by `activity`, from now on: experts chosen together go to different
        devices.
        """
        if activity is not None and len(self.devices) > 1:
            self.experts.spread = DeviceSpread(self.residency, self.loader, self.geometry, activity)

    def kernels_for_peers(self) -> KernelContext | None:
        """Returns kernels for the thread that computes for peers; None where a GPU computes."""
        return None if self._on_gpu or self._kernels is None else self._kernels.clone_for_thread()

    def second(self, kernels: KernelContext | None, *, deadline_s: float) -> TieredExperts:
        """Returns the same experts for the thread that computes for peers, which brings its own kernels."""
        math, residency = self._math.clone_for_thread(kernels), self.residency.for_peers()
        computes = [compute.clone_for_thread(math) for compute in self._computes]
        costs = CostModel(residency, self.loader, self.geometry.strides_bytes)
        cpu_experts = self.experts.cpu_experts.clone_for_thread(residency, math, costs)
        fetching = FetchOptions(prefetch=False, deadline_s=deadline_s)
        return TieredExperts(self.geometry, residency, self.loader, computes, cpu_experts, fetching)

    async def run(self) -> None:
        """Fills free slots in idle time and serves loads, until cancelled."""
        self.loader.prefetch(self._fill(), PrefetchPriority.FILL)
        beside = [asyncio.create_task(self._saved_stats.save_periodically())]
        if self.experts.spread is not None:
            beside.append(asyncio.create_task(self.experts.spread.run()))
        try:
            await self.loader.run()
        finally:
            for task in beside:
                task.cancel()

    def close(self) -> None:
        """Ends the links. To be called when `run` has ended; forwards that wait fail."""
        for device in self.devices:
            device.link.close()
        self._saved_stats.save()

    def metrics(self) -> dict[str, float]:
        """Returns the numbers for /metrics by their final names. May be called from any thread."""
        return tier_metrics(self)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Asserts residency's invariants; with `idle`, also that nothing is pinned or on its way."""
        self.residency.check_integrity(idle=idle)

    def _fill(self) -> Iterator[Move]:
        """Yields moves that fill all slots, with the same experts of every layer."""
        layers, experts = self.residency.device_of.shape
        target = Tier.VRAM if self.devices else Tier.RAM
        everything = (ExpertId(layer, expert) for expert in range(experts) for layer in range(layers))
        readable = (expert for expert in everything if self.on_disk[expert])
        for expert in itertools.islice(readable, self.residency.usage(Tier.RAM).slots):
            yield Move(expert, Tier.NVME, target, 0.0)


def _open(
    device: DeviceBudget,
    geometry: ExpertGeometry,
    ram: HostSlab,
    math: ExpertMath,
    progress: Callable[[float], None],
) -> TierDevice:
    layout = layout_in(device.expert_bytes, geometry, f"experts on {device.kind}")
    if device.kind == "emulated":
        slab = HostSlab(layout)
        link = EmulatedLink(ram, slab, device.link_bytes_per_s, device.link_expert_bytes)
        slabs = _matrices(slab, geometry)
        if not device.memory_bytes_per_s:
            return TierDevice(layout, link, HostCompute(slabs, math))
        memory = DeviceTime(device.memory_bytes_per_s)
        return TierDevice(layout, link, EmulatedCompute(slabs, math, geometry.strides_bytes, memory))
    if device.kind.startswith("cuda:"):
        from edgemoe.experts.compute.cuda import open_cuda

        return TierDevice(layout, *open_cuda(device.kind, layout, geometry, ram, progress))
    raise ConfigError(f"device {device.kind} is none of cpu, emulated, cuda:N")


def _matrices(slab: HostSlab, geometry: ExpertGeometry) -> list[tuple[ExpertSlab, int]]:
    """Returns for each layer the slab's slots as its experts lie in them, and the number of the first of these."""
    kinds = [
        (size_class, ExpertLayout.of(geometry, layer))
        for layer, size_class in enumerate(slab.layout.classes.layer_class)
    ]
    views = {kind: ExpertSlab(torch.from_numpy(slab.slots(kind[0])), kind[1], geometry.bf16) for kind in set(kinds)}
    return [(views[kind], slab.layout.first(kind[0])) for kind in kinds]


def tier_metrics(tiers: ExpertTiers) -> dict[str, float]:
    """Counts hits, moves, stalls, slabs and links. From any thread."""
    residency = tiers.residency
    metrics: dict[str, float] = {}
    for tier in Tier:
        name = tier.name.lower()
        slower = sum(residency.served[tier + 1 :])
        if tier >= residency.fastest:
            metrics[named(names.TIER_HITS, tier=name)] = residency.served[tier]
            metrics[named(names.TIER_MISSES, tier=name)] = slower
            metrics[named(names.STALL_SECONDS, tier=name)] = tiers.experts.stall_s[tier]
    metrics |= _slab(Tier.RAM, residency.usage(Tier.RAM), "nvme")
    if residency.fastest is Tier.VRAM:
        metrics[names.CPU_EXPERTS] = tiers.experts.cpu_experts.experts
        metrics |= _slab(Tier.VRAM, residency.usage(Tier.VRAM), "ram")
    for link, stats in tiers.link_stats.items():
        metrics[named(names.LINK_RATE, link=link)] = stats.bytes_per_s
        metrics[named(names.LINK_IDLE, link=link)] = stats.idle_share
    return metrics


def _slab(tier: Tier, usage: TierUsage, source: str) -> dict[str, float]:
    name = tier.name.lower()
    way = {"from": source, "to": name}
    return {
        named(names.TIER_SLOTS, tier=name): usage.slots,
        named(names.TIER_BYTES, tier=name): usage.size_bytes,
        named(names.TIER_EXPERTS, tier=name): usage.used,
        named(names.BYTES_MOVED, **way): usage.moved_bytes,
        named(names.PREFETCHES, **way): usage.prefetched,
        named(names.PREFETCH_WASTED, tier=name): usage.wasted_bytes,
    }
