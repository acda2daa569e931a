"""The policies that a trace can be replayed through, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgemoe.policy.cache_ranks import EWMA
from edgemoe.replay.bound import Belady
from edgemoe.replay.named_policies import NAMED
from edgemoe.replay.trace import Trace, chosen
from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import CachePolicy

PolicyMaker = Callable[[Trace, int], CachePolicy]  # from a trace and its batch size


def learned(hysteresis: float) -> PolicyMaker:
    """Returns the maker of `learned`, which prefetches an expert that ranks above its victim by the hysteresis."""
    from edgemoe.experts.predict.predictive_policy import LearnedPolicy  # imports numba

    return lambda trace, batch: LearnedPolicy(trace.layers, trace.experts, trace.top_k, hysteresis=hysteresis)


def _of_shape(policy: Callable[[int, int], CachePolicy]) -> PolicyMaker:
    return lambda trace, batch: policy(trace.layers, trace.experts)


MAKERS: dict[str, PolicyMaker] = {
    **{name: _of_shape(policy) for name, policy in NAMED.items()},
    "two-tier": lambda trace, batch: EWMA(trace.layers, trace.experts, trace.top_k),  # without ScoutGate and prefetch
    "learned": lambda trace, batch: learned(0.1)(trace, batch),
    "belady": lambda trace, batch: Belady(trace.layers, trace.experts, *next_uses(trace, batch)),
}


def next_uses(trace: Trace, batch: int) -> tuple[IntArray, IntArray]:
    """Returns the layer-step of each demand's next use, [N], and where each layer-step's demands start, [steps + 1]."""
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
