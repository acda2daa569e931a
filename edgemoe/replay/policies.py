"""The policies that a trace can be replayed through, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgemoe.errors import ConfigError
from edgemoe.policy import baselines
from edgemoe.policy.ewma import EWMA, PublishedPolicy
from edgemoe.replay.trace import Trace, chosen
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import CachePolicy

Maker = Callable[[Trace, int], CachePolicy]  # of a trace and its batch size


def _belady(trace: Trace, batch: int) -> CachePolicy:
    return baselines.Belady(trace.layers, trace.experts, *next_uses(trace, batch))


def learned(hysteresis: float) -> Maker:
    """`learned`, which prefetches what ranks so much higher than what goes for it."""
    from edgemoe.experts.predict.predictive_policy import LearnedPolicy  # imports numba

    return lambda trace, batch: LearnedPolicy(trace.layers, trace.experts, trace.top_k, hysteresis=hysteresis)


def nextuse(directory: Path) -> Maker:
    """`learned` with the trained network that was exported to `directory`. Raises ConfigError where there is none."""
    import torch  # takes seconds

    from tools.research.cache.next_use.model import read_export
    from tools.research.cache.next_use.network import NetworkPolicy

    torch.set_num_threads(1)  # its products are small
    try:
        network = read_export(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return lambda trace, batch: NetworkPolicy(network, trace.layers, trace.experts, trace.top_k)


MAKERS: dict[str, Maker] = {
    "fifo": lambda trace, batch: baselines.FIFO(trace.layers, trace.experts),
    "lru": lambda trace, batch: baselines.LRU(trace.layers, trace.experts),
    "lfu": lambda trace, batch: baselines.LFU(trace.layers, trace.experts),
    "lfru": lambda trace, batch: baselines.LFRU(trace.layers, trace.experts),
    "random": lambda trace, batch: baselines.Random(trace.layers, trace.experts),
    "belady": _belady,
    "ewma": lambda trace, batch: EWMA(trace.layers, trace.experts, trace.top_k),
    "published": lambda trace, batch: PublishedPolicy(trace.layers, trace.experts, trace.top_k),
    "learned": lambda trace, batch: learned(0.1)(trace, batch),
}


def next_uses(trace: Trace, batch: int) -> tuple[IntArray, IntArray]:
    """For each demand [N] the layer-step that needs the same expert next; where each layer-step's demands start."""
    demands = [
        layer * trace.experts + chosen(step.ids[:, layer])
        for step in trace.steps(batch)
        for layer in range(trace.layers)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(keys) for keys in demands])])
    keys = np.concatenate(demands)
    when = np.repeat(np.arange(len(demands)), np.diff(offsets))
    order = np.lexsort((when, keys))
    following = np.full(len(keys), np.iinfo(np.int64).max >> 1)
    same = keys[order[1:]] == keys[order[:-1]]
    following[order[:-1][same]] = when[order[1:][same]]
    return following, offsets
