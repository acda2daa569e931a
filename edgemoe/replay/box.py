"""A box that serves a trace: VRAM and RAM as caches, links that take their time, prefetch in what is idle.

Layer-steps run one after another: misses travel over the links in order, then the layer computes. A prefetch begins
only where it ends within the running layer's compute time, so that it never delays a demand. What it can cost is the
expert that it replaces; a ledger of what came first, the use of the one or of the other, decides whether requests are
carried out or only watched. Imports numba.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

DoubleArray = npt.NDArray[np.float64]
NONE = -1
LEDGER_DECAY = 0.99  # per outcome
TRIAL = 20.0  # outcomes before requests are carried out, and the share of good ones that it takes
GOOD_SHARE = 0.55
METRICS = 8
STALL, COMPUTE, TO_VRAM, TO_RAM, WASTED, PREFETCHED, GOOD, BAD = range(METRICS)


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """What a box is made of."""

    compute_s: float  # of one layer-step
    expert_bytes: int
    link_bytes_per_s: float  # RAM -> VRAM
    nvme_bytes_per_s: float  # NVMe -> RAM
    ram_share: float  # of all experts that RAM holds
    prefetch: bool
    margin: float  # how much higher a requested expert must rank than the one that it replaces
    layer_bytes: tuple[int, ...] = ()  # of one expert of each layer, where these differ; `expert_bytes` is their mean

    @property
    def link_s(self) -> float:
        """One expert's way from RAM to VRAM."""
        return self.expert_bytes / self.link_bytes_per_s

    @property
    def prefetches(self) -> bool:
        """Whether a prefetch ever fits into a layer's compute time."""
        return self.prefetch and self.link_s <= self.compute_s

    def metrics(self, misses: float, layer_steps: int) -> DoubleArray:
        """Of a box whose RAM holds everything and that never prefetches: what misses alone tell."""
        metrics = np.zeros(METRICS)
        metrics[STALL], metrics[COMPUTE] = misses * self.link_s, layer_steps * self.compute_s
        metrics[TO_VRAM] = misses
        return metrics


class _State(NamedTuple):
    """Where experts are, and what is awaited of prefetches; expert e of layer l is key l * E + e."""

    vram: BoolArray  # [L * E]
    ram: BoolArray  # [L * E]
    free: IntArray  # [2] slots of VRAM and RAM
    pinned: IntArray  # [L * E] the layer-step that last demanded it
    unused: BoolArray  # [L * E] prefetched, and not demanded since
    rival: IntArray  # [L * E] of a request: what it replaces, and the reverse
    requested: BoolArray  # [L * E] of the two, the one that was requested
    times: DoubleArray  # [3] now, and when each link is idle
    ledger: DoubleArray  # [2] outcomes, and good ones
    metrics: DoubleArray  # one for each of STALL, COMPUTE, ...


class _Speed(NamedTuple):
    """What things take, and how much higher a requested expert must rank."""

    compute_s: float
    link_s: float
    nvme_s: float
    margin: float


class ReplayBox:
    """One box and its metrics."""

    def __init__(self, layers: int, experts: int, slots: int, machine: BoxSpec) -> None:
        self.machine, self.experts = machine, experts
        total = layers * experts
        self.metrics = np.zeros(METRICS)
        ram_slots = max(slots, round(machine.ram_share * total))
        whole = ram_slots >= total
        self._state = _State(
            vram=np.zeros(total, np.bool_),
            ram=np.full(total, whole, np.bool_),
            free=np.array([slots, 0 if whole else ram_slots], np.int64),
            pinned=np.full(total, NONE, np.int64),
            unused=np.zeros(total, np.bool_),
            rival=np.full(total, NONE, np.int64),
            requested=np.zeros(total, np.bool_),
            times=np.zeros(3),
            ledger=np.zeros(2),
            metrics=self.metrics,
        )
        nvme_s = machine.expert_bytes / machine.nvme_bytes_per_s
        self._speed = _Speed(machine.compute_s, machine.link_s, nvme_s, machine.margin)
        self._clock = 0

    def run(self, layer: int, experts: IntArray, rank: FloatArray, prefetch_requests: bool) -> None:
        """One layer-step that demands distinct experts [n]; `rank` [L, E]; `prefetch_requests`: it foretells needs."""
        self._clock += 1
        prefetch = self.machine.prefetches and prefetch_requests
        _run(layer * self.experts + experts, rank.ravel(), self._clock, self._state, self._speed, prefetch)


@njit(nogil=True)
def _run(demanded: IntArray, rank: FloatArray, clock: int, state: _State, speed: _Speed, prefetch: bool) -> None:
    vram, ram, free, pinned, unused = state.vram, state.ram, state.free, state.pinned, state.unused
    times, metrics = state.times, state.metrics
    began = times[0]
    ready = began
    for key in demanded:
        pinned[key] = clock
        _settle(key, state)
    for key in demanded:
        unused[key] = False
        if vram[key]:
            continue
        source_s = began
        if not ram[key]:
            times[2] = max(times[2], began) + speed.nvme_s
            source_s = times[2]
            _take(ram, vram, rank, pinned, clock, free, 1)
            ram[key] = True
            metrics[TO_RAM] += 1
        times[1] = max(times[1], source_s) + speed.link_s
        ready = max(ready, times[1])
        metrics[TO_VRAM] += 1
        victim = _take(vram, vram, rank, pinned, clock, free, 0)
        if victim != -2:
            vram[key] = True
            if victim >= 0 and unused[victim]:
                unused[victim] = False
                metrics[WASTED] += 1
    metrics[STALL] += ready - began
    metrics[COMPUTE] += speed.compute_s
    times[0] = ready + speed.compute_s
    if prefetch:
        _request_prefetch(rank, clock, state, speed, ready)


@njit(nogil=True)
def _take(
    tier: BoolArray, above: BoolArray, rank: FloatArray, pinned: IntArray, clock: int, free: IntArray, which: int
) -> int:
    """Makes room for one expert in a tier: the key that goes, -1 for a free slot, -2 where there is no room."""
    if free[which] > 0:
        free[which] -= 1
        return -1
    victim, lowest = -2, np.inf
    for key in range(len(tier)):
        held = tier[key] and pinned[key] != clock and (which == 0 or not above[key])
        if held and rank[key] < lowest:
            victim, lowest = key, rank[key]
    if victim >= 0:
        tier[victim] = False
    return victim


@njit(nogil=True)
def _settle(key: int, state: _State) -> None:
    """Settles the request that a needed expert was part of, as good or bad."""
    rival, requested, ledger = state.rival, state.requested, state.ledger
    other = rival[key]
    if other < 0:
        return
    good = requested[key]
    ledger[0] = LEDGER_DECAY * ledger[0] + 1
    ledger[1] = LEDGER_DECAY * ledger[1] + (1 if good else 0)
    state.metrics[GOOD if good else BAD] += 1
    rival[key] = rival[other] = NONE
    requested[key] = requested[other] = False


@njit(nogil=True)
def _request_prefetch(rank: FloatArray, clock: int, state: _State, speed: _Speed, idle_from: float) -> None:
    """Prefetches that fit into the layer's compute time, best first; or one that is only watched."""
    vram, ram, unused, rival, times = state.vram, state.ram, state.unused, state.rival, state.times
    ledger, link_s = state.ledger, speed.link_s
    trusted = ledger[0] >= TRIAL and ledger[1] >= GOOD_SHARE * ledger[0]
    times[1] = max(times[1], idle_from)
    while times[1] + link_s <= times[0]:
        best, victim, highest, lowest = NONE, NONE, -np.inf, np.inf
        for key in range(len(vram)):
            if state.pinned[key] == clock or rival[key] >= 0:
                continue
            if vram[key]:
                if rank[key] < lowest and not unused[key]:
                    victim, lowest = key, rank[key]
            elif ram[key] and rank[key] > highest:
                best, highest = key, rank[key]
        if best < 0 or victim < 0 or highest <= lowest + speed.margin or not math.isfinite(lowest):
            return
        rival[best], rival[victim] = victim, best
        state.requested[best] = True
        if not trusted:
            return
        times[1] += link_s
        vram[victim] = False
        vram[best] = unused[best] = True
        state.metrics[TO_VRAM] += 1
        state.metrics[PREFETCHED] += 1
