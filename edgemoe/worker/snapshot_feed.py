"""Shows the front where every expert is, and how far requests are, while somebody looks.

Reads arrays that others write, on the event loop: the compute thread does nothing for it. Which experts are used is
seen in the signatures of the blocks that running sequences have filled last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.engine.engine import Engine
from edgemoe.engine.sequence import Sequence as RunningSequence
from edgemoe.engine.sequence import blocks_for
from edgemoe.experts.build import ExpertTiers
from edgemoe.ipc.messages import FromEngine, SnapshotReply
from edgemoe.types.arrays import BoolArray, FloatArray
from edgemoe.types.experts import Tier
from edgemoe.types.snapshot import (
    COMING,
    ELSEWHERE,
    IN_RAM,
    IN_VRAM,
    MAX_CELLS,
    MAX_SHOWN,
    MOST_USE,
    NO_EXPERT,
    ON_DISK,
    USE_BITS,
    Phase,
    RequestProgress,
    ServingSnapshot,
)

LOOK_S = 3.0  # that one Show lasts
EVERY_S = 0.5
HALF_LIFE_S = 10.0  # of the counted use, while anything runs
SAMPLE_SEQUENCES, SAMPLE_BLOCKS = 32, 2  # sampled for use, and the last blocks of each
MEAN_USE = 8  # in a cell, for the mean use of its layer


class SnapshotFeed:
    """Posts a snapshot every half second for LOOK_S after each `extend`."""

    def __init__(self, engine: Engine, tiers: ExpertTiers, post: Callable[[FromEngine], None]) -> None:
        self._engine, self._tiers, self._post = engine, tiers, post
        self._until_s = 0.0
        self._asked = asyncio.Event()
        self._use: FloatArray = np.zeros((tiers.geometry.layers, tiers.geometry.experts), np.float32)

    def extend(self) -> None:
        """Keeps posting for LOOK_S more, because a front asks."""
        self._until_s = time.monotonic() + LOOK_S
        self._asked.set()

    async def run(self) -> None:
        """Posts snapshots while they are asked for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            while time.monotonic() < self._until_s:
                self._post(SnapshotReply(self.snapshot()))
                await asyncio.sleep(EVERY_S)

    def snapshot(self) -> ServingSnapshot:
        """Returns a snapshot of the engine now."""
        residency, scheduler = self._tiers.residency, self._engine.scheduler
        self._note_use(scheduler.running[:SAMPLE_SEQUENCES])
        there = self._use.shape
        return ServingSnapshot(
            layers=there[0],
            experts=there[1],
            cells=self._cells().tobytes() if there[0] * there[1] <= MAX_CELLS else b"",
            served=tuple(residency.served),
            tokens=int(self._engine.runner.totals["tokens", "decode"]),
            requests=shown((*scheduler.running, *scheduler.waiting)),
        )

    def _note_use(self, running: Sequence[RunningSequence]) -> None:
        blocks = [block for seq in running for block in filled_last(seq)]
        if blocks:
            self._use *= np.float32(0.5 ** (EVERY_S / HALF_LIFE_S))
            self._use += self._engine.blocks.signatures[blocks].sum(axis=0, dtype=np.float32)

    def _cells(self) -> npt.NDArray[np.uint8]:
        residency = self._tiers.residency
        places = [(self._tiers.on_disk, ON_DISK), (residency.resident_mask(Tier.RAM), IN_RAM)]
        pools = (residency.ram, *residency.devices)
        if residency.devices:
            places.append((residency.resident_mask(Tier.VRAM), IN_VRAM))
        coming: BoolArray = np.logical_or.reduce([pool.coming >= 0 for pool in pools])
        return cells(self._tiers.geometry.exists, places, coming, self._use)


def filled_last(seq: RunningSequence) -> list[int]:
    """Returns the blocks that a sequence's latest computed tokens are in."""
    end = blocks_for(seq.computed)
    return seq.blocks[max(0, end - SAMPLE_BLOCKS) : end]


def cells(
    exists: BoolArray, places: Iterable[tuple[BoolArray, int]], coming: BoolArray, use: FloatArray
) -> npt.NDArray[np.uint8]:
    """Returns a byte for each expert, [L, E]; `places` [L, E] from the slowest on."""
    grid = np.where(exists, ELSEWHERE, NO_EXPERT).astype(np.uint8)
    for there, place in places:
        grid[there & exists] = place
    grid[coming] |= COMING
    mean = use.sum(axis=1, keepdims=True) / np.maximum(exists.sum(axis=1, keepdims=True), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = MEAN_USE + 2 * np.log2(use / mean)
    level = np.clip(np.rint(np.nan_to_num(level, nan=0.0, posinf=0.0, neginf=0.0)), 0, MOST_USE)
    grid |= level.astype(np.uint8) << USE_BITS
    return grid


def shown(sequences: Iterable[RunningSequence]) -> tuple[RequestProgress, ...]:
    """Returns how far requests are, the first MAX_SHOWN of them."""
    now_s = time.monotonic()
    return tuple(_shown(seq, now_s) for seq, _ in zip(sequences, range(MAX_SHOWN), strict=False))


def _shown(seq: RunningSequence, now_s: float) -> RequestProgress:
    phase: Phase
    if seq.decoding:
        phase = "decode"
    elif seq.blocks:
        phase = "prefill"
    else:
        phase = "paused" if seq.started else "waiting"
    return RequestProgress(phase, max(0.0, now_s - seq.arrived_s), seq.prompt_tokens, seq.computed, max(0, seq.emitted))
