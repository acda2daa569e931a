"""Naive references: caches as they would be written down in a few minutes, one expert at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from edgemoe.replay.trace import Trace

LAW = Path(__file__).parents[1] / "data" / "routing" / "law.ids.csv.gz"
Event = tuple[int, list[int]]  # layer, distinct experts


def random_trace(
    seed: int, requests: int = 4, tokens: int = 40, layers: int = 3, experts: int = 12, k: int = 3
) -> Trace:
    """Makes requests that prefer some experts to others."""
    random = np.random.default_rng(seed)
    all_ids = []
    for _ in range(requests):
        taste = random.gumbel(size=(layers, experts)) * 1.5
        noise = random.gumbel(size=(tokens, layers, experts))
        all_ids.append(np.sort(np.argsort(-(taste + noise), axis=2)[:, :, :k], axis=2).astype(np.int16))
    return Trace(all_ids, experts)


def events_of(trace: Trace, batch: int) -> list[Event]:
    return [
        (layer, sorted({int(e) for row in step.ids for e in row[layer]}))
        for step in trace.steps(batch)
        for layer in range(trace.layers)
    ]


def naive_misses(events: list[Event], capacity: int, name: str) -> int:
    """Counts demand misses of an event-atomic cache; among several lowest ranks, the lowest slot is evicted."""
    resident: dict[tuple[int, int], int] = {}  # and their slots
    last: dict[tuple[int, int], int] = {}
    count: Counter[tuple[int, int]] = Counter()
    misses = 0
    for now, (layer, experts) in enumerate(events):
        needed = [(layer, e) for e in experts]
        for key in needed:
            last[key] = now
            count[key] += 1
        for key in needed:
            if key in resident:
                continue
            misses += 1
            slot = len(resident)
            if slot >= capacity:
                others = sorted(resident.keys() - set(needed), key=resident.__getitem__)
                if not others:
                    continue
                slot = resident.pop(min(others, key=lambda x: _worth(name, x, now, last, count, events)))
            resident[key] = slot
    return misses


def _worth(name, key, now, last, count, events) -> float:  # type: ignore[no-untyped-def]
    age = now - last[key]
    if name == "lru":
        return -age
    if name == "lfu":
        return count[key] + 1 / (1 + age)
    if name == "lfru":
        return float(np.float32(count[key] / (1 + age)))
    later = (t for t in range(now + 1, len(events)) if events[t][0] == key[0] and key[1] in events[t][1])
    return -next(later, 10**9)  # belady
