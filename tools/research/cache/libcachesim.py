"""The policies of the libcachesim library, if it is installed: misses only, one object after another."""

from __future__ import annotations

import importlib
from typing import Any

from edgemoe.errors import ConfigError
from edgemoe.replay.trace import Trace, chosen


def replay(trace: Trace, name: str, slots: list[int], batch: int, score_from: float, expert_bytes: int) -> list[Any]:
    """Returns figures for each capacity; a layer-step is its experts in order, not one event."""
    from edgemoe.replay.run import ReplayMetrics

    try:
        library = importlib.import_module("libcachesim")
    except ImportError as error:
        raise ConfigError(
            f"there is no policy {name!r} here; libcachesim's policies need it installed: pip install 'edgemoe[bench]'"
        ) from error
    kind = {known.lower(): known for known in dir(library)}.get(name.lower())
    if kind is None or not issubclass(_class(library, kind), library.CacheBase):
        raise ConfigError(f"neither edgemoe nor libcachesim has a policy {name!r}")
    metrics = []
    for each in slots:
        cache, request = _class(library, kind)(cache_size=each), library.Request()
        request.obj_size = 1
        result, tokens = ReplayMetrics(), 0
        for step in trace.steps(batch):
            scored = tokens >= score_from * trace.tokens
            tokens += len(step.requests)
            for layer in range(trace.layers):
                for expert in chosen(step.ids[:, layer]).tolist():
                    request.obj_id = layer * trace.experts + expert
                    hit = cache.get(request)
                    if scored:
                        result.misses += not hit
                        result.demands += 1
            result.steps += scored * len(step.requests)
        result.missed_bytes, result.demanded_bytes = result.misses * expert_bytes, result.demands * expert_bytes
        metrics.append(result)
    return metrics


def _class(library: Any, name: str) -> type:
    found = getattr(library, name)
    if not isinstance(found, type):
        raise ConfigError(f"libcachesim has no policy {name!r}")
    return found
