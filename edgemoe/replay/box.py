"""A box that serves a trace: the tiers, loader and layer-steps that serve, with links, disk and computing simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch

from edgemoe.errors import ConfigError
from edgemoe.experts.compute.cost_model import CostModel
from edgemoe.experts.compute.cpu_experts import CpuExperts
from edgemoe.experts.compute.dispatch import DeviceTimings
from edgemoe.experts.compute.moe import FetchOptions, TieredExperts
from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.residency_records import VRAM
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.kernels.cpu.expert_math import ExpertMath
from edgemoe.replay.simulated import (
    NoMemory,
    SimulatedClock,
    SimulatedDisk,
    SimulatedLink,
    SimulatedWaiters,
    TimedArrivals,
)
from edgemoe.replay.trace import ReplayCounts
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.experts import ExpertGeometry, ExpertId, LivePolicy, Move, Tier
from edgemoe.types.size_classes import SlabLayout
from edgemoe.types.step import StepMeta, StepRouting, TokenGroups

NOTHING = torch.empty(0)


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """The hardware of a simulated box."""

    compute_s: float  # of one layer-step
    expert_bytes: int
    link_bytes_per_s: float  # RAM -> VRAM
    nvme_bytes_per_s: float  # NVMe -> RAM
    ram_share: float  # of all experts that RAM holds
    prefetch: bool
    layer_bytes: tuple[int, ...] = ()  # of one expert of each layer, where these differ; `expert_bytes` is their mean
    between_s: float = 0.0  # from a step's last layer to the next one's first

    def geometry(self, layers: int, experts: int, top_k: int) -> ExpertGeometry:
        """Returns a model with experts of these sizes; all that a cache has to know of it."""
        sizes = self.layer_bytes or (self.expert_bytes,) * layers
        return ExpertGeometry(layers, experts, top_k, 1, 1, "float32", layer_bytes=sizes)


class ReplayBox:
    """Serves layer-steps as the engine does. `residency` and `loader` are for plans."""

    def __init__(
        self, geometry: ExpertGeometry, capacity_bytes: int, machine: BoxSpec, policy: LivePolicy, *, prefetch: bool
    ) -> None:
        """Raises ConfigError for a capacity that does not hold one expert of each size."""
        self.geometry, self._machine, self.world = geometry, machine, SimulatedClock()
        self.capacity_bytes = capacity_bytes
        layout, ram = _layouts(geometry, capacity_bytes, machine.ram_share)
        shape = geometry.layers, geometry.experts
        pools = [SlotPool(Tier.RAM, *shape, ram, policy), SlotPool(Tier.VRAM, *shape, layout, policy)]
        self.residency = Residency(pools[0], pools[1:], wait=SimulatedWaiters(self.world))
        self._disk: SimulatedDisk | None = None
        if not ram.holds_all:
            self._disk = SimulatedDisk(self.world, geometry, machine.nvme_bytes_per_s)
        nothing: Any = self._disk  # where RAM holds everything, nothing is read
        memory: Any = NoMemory(ram)
        link = SimulatedLink(self.world, layout, machine.link_bytes_per_s)
        self.loader = ExpertLoader(
            self.residency, nothing, memory, [link], clock=self.world.clock, arrivals=lambda: TimedArrivals(self.world)
        )
        if self._disk is None:
            self._fill()
        else:
            self._running = self._disk.loop.create_task(self.loader.run())
        compute = SimulatedCompute()
        costs = CostModel(self.residency, self.loader, geometry.strides_bytes, cpu_helps=False, clock=self.world.clock)
        cpu_experts = CpuExperts(self.residency, compute, costs)
        fetching = FetchOptions(prefetch=prefetch, cpu_helps=False, deadline_s=math.inf)
        self._experts = TieredExperts(geometry, self.residency, self.loader, [compute], cpu_experts, fetching)
        self._sizes_bytes: list[int] = geometry.strides_bytes.tolist()
        self._counts, self._misses, self._missed_bytes = False, 0, 0
        self._missed = 0  # experts missed so far, by prompts and decoding
        self._weights = NOTHING  # of a layer's routing, of which only the shape counts
        self.computing_s: Iterator[float] = repeat(machine.compute_s)  # of one layer-step after the other

    def begin(self, meta: StepMeta) -> None:
        """Begins a step of these sequences."""
        self._counts = bool(meta.decode.all())
        self._experts.begin_step(meta)

    def run(self, layer: int, ids: torch.Tensor, hint: torch.Tensor | None = None) -> None:
        """Runs one layer, whose tokens chose `ids` [T, k]; `hint` [T, E] are logits for the next layer."""
        if hint is not None:
            self._experts.hint(layer + 1, hint)
        if self._weights.shape != ids.shape:
            self._weights = torch.zeros(ids.shape)
        self._experts.forward(layer, NOTHING, ids, self._weights)
        before, self._missed = self._missed, sum(self.residency.served[VRAM + 1 :])
        if self._counts:
            self._misses += self._missed - before
            self._missed_bytes += (self._missed - before) * self._sizes_bytes[layer]
        self.world.pass_s(next(self.computing_s))

    def end(self) -> StepRouting:
        """Ends the step and returns its routing."""
        return self._experts.end_step()

    def rest(self) -> None:
        """Lets the time between two steps pass."""
        self.world.pass_s(self._machine.between_s)

    @property
    def resident(self) -> BoolArray:
        """Returns which experts are in VRAM, [L, E]."""
        return self.residency.resident_mask(Tier.VRAM)

    @property
    def counts(self) -> ReplayCounts:
        vram, ram = self.residency.usage(Tier.VRAM), self.residency.usage(Tier.RAM)
        return ReplayCounts(
            self._misses,
            self._missed_bytes,
            sum(self._experts.stall_s),
            vram.moved_bytes,
            ram.moved_bytes,
            vram.wasted_bytes + ram.wasted_bytes,
            vram.moved + ram.moved,
            vram.prefetched,
            vram.promoted,
            vram.withdrawn,
        )

    def close(self) -> None:
        """Ends the reading task of the disk."""
        if self._disk is not None:
            self._disk.close(self._running)

    def _fill(self) -> None:
        """Puts everything into RAM."""
        for layer in range(self.geometry.layers):
            for expert in range(self.geometry.experts_of(layer)):
                load = self.residency.reserve(
                    Move(ExpertId(layer, expert), Tier.NVME, Tier.RAM, 0.0), PrefetchPriority.FILL
                )
                assert load is not None
                self.residency.complete_load(load)


class SimulatedCompute:
    """Computes nothing: the box lets the time pass."""

    def begin(self, layer: int, hidden: torch.Tensor) -> None:
        pass

    def add(self, slots: IntArray, group: TokenGroups) -> None:
        pass

    def end(self) -> torch.Tensor:
        return NOTHING

    def pop_timings(self) -> DeviceTimings:
        return DeviceTimings()

    def places(self, where: IntArray) -> None:
        return None  # nothing is computed

    def slots(self, where: IntArray, in_ram: IntArray) -> None:
        return None

    def synchronize(self) -> None:
        pass

    def clone_for_thread(self, math: ExpertMath) -> SimulatedCompute:
        return self


class TraceRanks:
    """Gives several boxes the ranks of one policy, which the replay asks and tells itself."""

    margin = 0.0

    def __init__(self, policy: Any, shape: tuple[int, int]) -> None:
        self._policy = policy
        self.ranks: FloatArray = np.zeros(shape, np.float32)

    def touch(self, layer: int, experts: IntArray) -> None:
        pass

    def rank(self, layer: int) -> FloatArray:
        return self.ranks

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        foreseen: tuple[FloatArray, FloatArray] = self._policy.fuse_chances(layer, experts, chance)
        return foreseen


def _layouts(geometry: ExpertGeometry, capacity_bytes: int, ram_share: float) -> tuple[SlabLayout, SlabLayout]:
    """Returns the slab layouts of VRAM and RAM, which holds the experts of VRAM. Raises ConfigError."""
    layout = SlabLayout.within(capacity_bytes, geometry)
    if layout is None:
        raise ConfigError(f"{capacity_bytes} bytes do not hold one expert of each size; replay a larger --capacity")
    whole_bytes = SlabLayout.whole_bytes(geometry)
    ram_bytes = whole_bytes if ram_share >= 1 else max(capacity_bytes, round(ram_share * geometry.all_bytes))
    ram = SlabLayout.within(ram_bytes, geometry)
    assert ram is not None, "it holds what VRAM does"
    return layout, ram
