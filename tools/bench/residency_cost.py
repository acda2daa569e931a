"""The compute thread's cost of residency for a layer-step, without kernels, grouping and copying.

python -m tools.bench.residency_cost [--steps 4000] [--shape 48,128] [--misses 0,6] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from edgemoe.experts.tiers.residency import Residency
from edgemoe.experts.tiers.slab import HostSlab
from edgemoe.experts.tiers.slots import PrefetchPriority, SlotPool, SlotTransfer
from edgemoe.experts.transfer.loader import ExpertLoader
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.experts import ExpertId, Move, Tier
from edgemoe.types.size_classes import SlabLayout

TOP_K, SHARE = 8, 0.25  # experts of a layer-step; share of all experts on the device
GOAL_US = {0: 3.0, 6: 15.0}  # by misses


class Ranks:
    """A policy that learns elsewhere: it counts uses, and its ranks are constant."""

    margin = 0.0

    def __init__(self, layers: int, experts: int) -> None:
        self._ranks: FloatArray = np.random.default_rng(1).random((layers, experts), np.float32)

    def touch(self, layer: int, experts: IntArray) -> None:
        pass

    def rank(self, layer: int) -> FloatArray:
        return self._ranks

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        return chance, chance


class StandInLink:
    """Accepts copies, and ends them at a call."""

    def __init__(self) -> None:
        self.copies: list[SlotTransfer] = []

    def attach(self, listener: ExpertLoader) -> None:
        self._listener = listener

    def copy(self, load: SlotTransfer) -> None:
        self.copies.append(load)

    def idle(self) -> bool:
        return False

    has_room = idle

    def finish(self) -> None:
        for load in self.copies:
            self._listener.on_arrived(load)
            self._listener.on_released(load)
        self.copies.clear()


class Desk:
    """Tiers with everything in RAM and a quarter on the device, and layer-steps one after another."""

    def __init__(self, layers: int, experts: int) -> None:
        self._shape, self._rng = (layers, experts), np.random.default_rng(0)
        policy, slots = Ranks(layers, experts), int(SHARE * layers * experts)
        ram = SlotPool(Tier.RAM, layers, experts, layers * experts, policy)
        self.residency = Residency(ram, [SlotPool(Tier.VRAM, layers, experts, slots, policy)])
        self.link = StandInLink()
        store: Any = None
        links: list[Any] = [self.link]
        self.loader = ExpertLoader(self.residency, store, HostSlab(SlabLayout.even(1, 4096)), links)
        everything = [ExpertId(layer, expert) for expert in range(experts) for layer in range(layers)]
        for tier, count in ((Tier.RAM, len(everything)), (Tier.VRAM, slots)):
            for expert in everything[:count]:
                self._fill(Move(expert, Tier(tier + 1), tier, 0.0))

    def _fill(self, move: Move) -> None:
        load = self.residency.reserve(move, PrefetchPriority.FILL)
        assert load is not None
        self.residency.complete_load(load)
        if load.source >= 0:
            self.residency.unpin(load.source)

    def run(self, steps: int, misses: int) -> Iterator[tuple[float, float]]:
        """Yields microseconds of layer-steps with `misses`: on this thread, and of an arrival on the link's."""
        residency, layers = self.residency, self._shape[0]
        for step in range(steps):
            layer = step % layers
            experts = self._choose(layer, misses)
            began = time.perf_counter()
            slots = residency.pin_if_all_resident(0, layer, experts, None)
            if slots is not None:
                residency.release(0, slots)
                yield (time.perf_counter() - began) * 1e6, 0.0
                continue
            arrivals: SimpleQueue[SlotTransfer] = SimpleQueue()
            claim = residency.acquire(0, layer, experts, arrivals)
            self.loader.start(claim.loads)
            waits = time.perf_counter()
            self.link.finish()
            goes_on = time.perf_counter()
            residency.stop_arrivals(arrivals)
            residency.mark_computed(layer, experts)
            residency.release(0, claim.slots)
            ended = time.perf_counter()
            yield (ended - goes_on + waits - began) * 1e6, (goes_on - waits) * 1e6 / misses

    def _choose(self, layer: int, misses: int) -> IntArray:
        resident = self.residency.resident_mask(Tier.VRAM)[layer]
        here = self._rng.choice(np.flatnonzero(resident), TOP_K - misses, replace=False)
        return np.concatenate((here, self._rng.choice(np.flatnonzero(~resident), misses, replace=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--shape", default="48,128", help="layers,experts")
    parser.add_argument("--misses", default="0,6")
    parser.add_argument("--json", action="store_true", help="print nothing else")
    args = parser.parse_args()
    layers, experts = map(int, args.shape.split(","))
    desk, rows = Desk(layers, experts), []
    for misses in map(int, args.misses.split(",")):
        us, arrival_us = np.median(list(desk.run(args.steps, misses))[args.steps // 10 :], axis=0).tolist()
        rows.append({"misses": misses, "us": round(us, 2), "arrival_us": round(arrival_us, 2)})
    desk.residency.check_integrity(idle=True)
    print(json.dumps({"shape": [layers, experts], "steps": args.steps, "layer_steps": rows}))
    for row in rows if not args.json else ():
        goal = f", goal {GOAL_US[int(row['misses'])]:g}" if row["misses"] in GOAL_US else ""
        print(
            f"{row['misses']} misses of {TOP_K}: {row['us']} us a layer-step{goal}; {row['arrival_us']} us an arrival"
        )


if __name__ == "__main__":
    main()
