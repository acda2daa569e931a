"""`edgemoe replay scoreboard`: cache policies over sets of traces, cold and warm, with Belady's optimum. Imports numba.

docs/scoreboard.md has the rules. All figures are counts of misses, so that everybody gets the same ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.durable import read_plain
from edgemoe.errors import ConfigError
from edgemoe.replay.bound import ByteBelady
from edgemoe.replay.named_policies import NAMED
from edgemoe.replay.replay_policies import MAKERS, PolicyMaker
from edgemoe.replay.run import Replay, ReplayedStep
from edgemoe.replay.trace import MOST_TRACE_BYTES, Trace, first, load
from edgemoe.types.experts import CachePolicy, ExpertGeometry

WINDOWS = {"cold": slice(0, 1500), "warm": slice(5000, 7000)}  # tokens of a set, from nothing known on
FEWEST = 100  # tokens of a window, or it has no figures
MOST_SETS_BYTES = 1 << 20
BOUND = "belady"
KEYS = {"name", "model", "licence", "source", "files", "experts", "expert_bytes"}
Misses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TraceSet:
    """Traces of one kind of text from one model, as a file of sets describes them."""

    name: str
    model: str
    licence: str
    source: str
    files: Mapping[str, str]  # path from the file of sets -> SHA-256
    experts: int  # of a layer
    expert_bytes: int


class Figures(NamedTuple):
    """One policy in one window of one set, at one capacity."""

    name: str
    window: str
    capacity: float
    policy: str
    tokens: int
    misses: int
    demands: int
    closed: float  # share of the way from the best named policy to the optimum
    stall_ms: tuple[float, ...]  # of a token, by link, where RAM holds everything and nothing is prefetched


def read_sets(path: Path) -> list[TraceSet]:
    """Reads a file of sets. Raises ConfigError."""
    try:
        found = tomllib.loads(read_plain(path, MOST_SETS_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no file of trace sets: {error}") from error
    sets = found.get("set")
    if set(found) != {"set"} or not isinstance(sets, list):
        raise ConfigError(f"{path} has {sorted(found)}; a file of trace sets has [[set]] tables only")
    return [_set_of(each, path) for each in sets]


def _set_of(table: Any, path: Path) -> TraceSet:
    if not isinstance(table, dict) or set(table) != KEYS:
        raise ConfigError(f"{path}: a set has the keys {', '.join(sorted(KEYS))}, not {', '.join(sorted(table))}")
    texts = [table[key] for key in ("name", "model", "licence", "source")]
    files, numbers = table["files"], [table["experts"], table["expert_bytes"]]
    sound = all(isinstance(text, str) and text for text in texts) and all(type(n) is int and n > 0 for n in numbers)
    if not sound or not isinstance(files, dict) or not files or not all(isinstance(d, str) for d in files.values()):
        raise ConfigError(
            f"{path}: the set {table['name']!r} needs texts, numbers above 0, and a SHA-256 for each file"
        )
    return TraceSet(**table)


def load_set(traces: TraceSet, folder: Path, limit: int = 0) -> Trace:
    """Reads a set's files, whose digests must be the stated ones. Raises ConfigError, StoreError."""
    for name, stated in traces.files.items():
        try:
            digest = hashlib.sha256(read_plain(folder / name, MOST_TRACE_BYTES)).hexdigest()
        except OSError as error:
            raise ConfigError(f"{folder / name} cannot be read: {error.strerror}; {traces.source} has it") from error
        if digest != stated:
            raise ConfigError(f"{folder / name} has the SHA-256 {digest}, the set {traces.name!r} states {stated}")
    trace = load([folder / name for name in traces.files], experts=traces.experts)
    most = min(limit or trace.tokens, max(window.stop for window in WINDOWS.values()))
    return Trace(first(trace.requests, most), trace.experts)


def load_policy(text: str) -> tuple[str, PolicyMaker]:
    """Returns the name and the maker of FILE.py:CLASS, which is run. Raises ConfigError."""
    path, _, name = text.rpartition(":")
    spec = importlib.util.spec_from_file_location("entered_policy", path) if path.endswith(".py") else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"{text!r} is not FILE.py:CLASS")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        policy: Callable[[int, int, int], CachePolicy] = getattr(module, name)
        inspect.signature(policy).bind(1, 1, 1)
    except (OSError, SyntaxError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{text}: no class that takes (layers, experts, top_k): {error}") from error
    return name.lower(), lambda trace, batch: policy(trace.layers, trace.experts, trace.top_k)


def count_misses(trace: Trace, make: PolicyMaker, shares: Sequence[float]) -> Misses:
    """Returns the experts that each token missed at each capacity, [T, shares]. Experts are of one size."""
    geometry = ExpertGeometry(trace.layers, trace.experts, trace.top_k, 1, 1, "float32")
    policy = make(trace, 1)
    if hasattr(policy, "observe_residents") and len(shares) > 1:
        return np.concatenate([count_misses(trace, make, [share]) for share in shares], axis=1)
    replay = Replay(policy, geometry)
    size = geometry.largest_bytes
    replay.bounds = [ByteBelady(geometry, max(1, round(share * geometry.count)) * size) for share in shares]
    counts = [[0] * len(shares)]
    for step in trace.steps(1):
        replay.step(ReplayedStep.of(step))
        counts.append([bound.counts.misses for bound in replay.bounds])
    total = np.array(counts, np.int64)
    missed: Misses = total[1:] - total[:-1]
    return missed


def judge(
    traces: TraceSet,
    trace: Trace,
    makers: Mapping[str, PolicyMaker],
    shares: Sequence[float],
    links: Sequence[float],
) -> list[Figures]:
    """Returns the figures of each policy in one set. The named policies and the optimum are always among them."""
    missed = {name: count_misses(trace, make, shares) for name, make in makers.items()}
    figures = []
    for window, span in WINDOWS.items():
        tokens = len(range(*span.indices(trace.tokens)))
        if tokens < FEWEST:
            continue
        sums = {name: each[span].sum(0) for name, each in missed.items()}
        for i, share in enumerate(shares):
            best, least = min(int(sums[name][i]) for name in NAMED), int(sums[BOUND][i])
            for name, each in sums.items():
                misses = int(each[i])
                closed = (best - misses) / (best - least) if best > least else 0.0
                stall_ms = tuple(1000 * misses / tokens * traces.expert_bytes / link for link in links)
                demands = tokens * trace.layers * trace.top_k
                figures.append(
                    Figures(traces.name, window, share, name, tokens, misses, demands, round(closed, 4), stall_ms)
                )
    return figures


def run(
    path: Path,
    shares: Sequence[float],
    links: Sequence[float],
    *,
    entered: Sequence[str] = (),
    limit: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[TraceSet], list[Figures]]:
    """Replays all sets of a file through all policies. Raises ConfigError, StoreError."""
    sets, makers = read_sets(path), dict(MAKERS)
    for text in entered:
        name, make = load_policy(text)
        if name in makers:
            raise ConfigError(f"{text}: there is a policy {name!r} already; give the class another name")
        makers[name] = make
    figures = []
    for traces in sets:
        progress(traces.name)
        figures += judge(traces, load_set(traces, path.parent, limit), makers, shares, links)
    return sets, figures


def summarize(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Returns a row for each policy, window and capacity: means over sets, the best closed share first."""
    groups: dict[tuple[str, float, str], list[Figures]] = {}
    for each in figures:
        groups.setdefault((each.window, each.capacity, each.policy), []).append(each)
    rows: list[dict[str, Any]] = [
        {
            "window": window,
            "capacity": capacity,
            "policy": policy,
            "sets": len(those),
            "miss_ratio": float(np.mean([each.misses / each.demands for each in those])),
            "closed": float(np.mean([each.closed for each in those])),
            "least_closed": min(each.closed for each in those),
            "stall_ms": np.mean([each.stall_ms for each in those], axis=0).tolist(),
        }
        for (window, capacity, policy), those in groups.items()
    ]
    return sorted(rows, key=lambda row: (row["window"], row["capacity"], -row["closed"]))
