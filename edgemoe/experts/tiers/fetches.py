"""Begins the loads of experts that are demanded and absent: into RAM, or through RAM into a device.

Residency calls it, and holds its lock meanwhile.
"""

from __future__ import annotations

import numpy as np

from edgemoe.experts.tiers.eviction import Evictor
from edgemoe.experts.tiers.slots import SlotPool, Transfer


def fetch(
    evictor: Evictor, ram: SlotPool, top: SlotPool, layer: int, experts: list[int], flags: list[int]
) -> tuple[list[Transfer | None], list[Transfer]]:
    """Places loads of absent `experts` [n] of a layer into the top tier; each slot gets its `flags` [n].

    Returns the loads [n], None where there is no room, and the transfers that can start now.
    """
    if top is ram:
        jobs = zip(evictor.take(top, len(experts)), experts, flags, strict=False)
        loads = [top.place(slot, layer, expert, flag, evictor.clock) for slot, expert, flag in jobs]
        return [*loads, *[None] * (len(experts) - len(loads))], loads
    return _fetch_through_ram(evictor, ram, top, layer, experts, flags)


def _fetch_through_ram(
    evictor: Evictor, ram: SlotPool, top: SlotPool, layer: int, experts: list[int], flags: list[int]
) -> tuple[list[Transfer | None], list[Transfer]]:
    """Does what `fetch` does for a device.

    An expert in RAM is copied from there at once. Another one is read into RAM first; its copy waits in the read's
    `then`. Experts in RAM are the first to get a slot.
    """
    base = layer * top.experts
    sources = ram.where[layer, experts]  # [n]
    ram.pins[sources[sources >= 0]] += 1
    order = np.argsort(sources < 0, kind="stable").tolist()  # those in RAM first
    slots = evictor.take(top, len(order))
    unread = [i for i in order[: len(slots)] if sources[i] < 0 and base + experts[i] not in ram.loads]
    reads = dict(zip(unread, evictor.take(ram, len(unread)), strict=False))
    loads: list[Transfer | None] = [None] * len(order)
    starts = []
    for i in order:
        source = int(sources[i])
        read = ram.loads.get(base + experts[i])
        if not slots or (source < 0 and read is None and i not in reads):
            if source >= 0:
                ram.pins[source] -= 1
            continue
        load = loads[i] = top.place(slots.pop(), layer, experts[i], flags[i], evictor.clock)
        if source >= 0:
            load.source = source
            ram.flags[source] &= flags[i]
            starts.append(load)
            continue
        if read is None:
            read = ram.place(reads[i], layer, experts[i], flags[i], evictor.clock)
            starts.append(read)
        read.then.append(load)
        read.demand = load.cold = True
        ram.flags[read.slot] &= flags[i]
    top.free.extend(slots)
    return loads, starts
