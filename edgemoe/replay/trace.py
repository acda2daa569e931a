"""Routing traces: which experts each token of each request chose, and the steps in which a batch ran them.

Tables `*.ids.csv[.gz]` have columns seq (or req), pos and ids: layers separated by "|", experts by spaces. Of the
daemon's recordings (`*.routes`, or a folder of them) the decoded tokens are read. `foreign_traces` reads other
programs' traces.
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.durable import read_plain
from edgemoe.errors import ConfigError, StoreError
from edgemoe.replay import foreign_traces as foreign
from edgemoe.telemetry.routing_recording import SUFFIX, read_recording, recordings_in
from edgemoe.types.arrays import IntArray

Ids = npt.NDArray[np.int16]
ROUND = 4  # experts per layer are a multiple of it where nobody says: rare ones may not occur in a trace
MOST_TRACE_BYTES = 1 << 34
MOST_STEPS = 1000  # of which `touched` takes the mean
SAME = 0.9  # share of equal routes from which on two tokens at one place of a template count as the same


class TraceStep(NamedTuple):
    """One token of each running request."""

    requests: tuple[int, ...]  # [S]
    ids: Ids  # [S, L, k]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    requests: Sequence[Ids]  # each [T, L, k]
    experts: int

    @property
    def layers(self) -> int:
        return int(self.requests[0].shape[1])

    @property
    def top_k(self) -> int:
        return int(self.requests[0].shape[2])

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.requests)

    def touched(self, batch: int) -> float:
        """Returns the distinct experts of a layer-step, on average over the first MOST_STEPS steps."""
        counts = [
            len(chosen(step.ids[:, layer]))
            for step in islice(self.steps(batch), MOST_STEPS)
            for layer in range(self.layers)
        ]
        return float(np.mean(counts))

    def steps(self, batch: int) -> Iterator[TraceStep]:
        """Yields steps of one token of each of `batch` requests; where a request ends the next begins."""
        waiting = iter(enumerate(self.requests))
        running: list[tuple[int, Ids, int]] = []
        while True:
            while len(running) < batch and (request := next(waiting, None)) is not None:
                running.append((*request, 0))
            if not running:
                return
            yield TraceStep(tuple(name for name, _, _ in running), np.stack([ids[at] for _, ids, at in running]))
            running = [(name, ids, at + 1) for name, ids, at in running if at + 1 < len(ids)]


def load(paths: Sequence[Path], *, without_template: bool = False, limit: int = 0, experts: int = 0) -> Trace:
    """Files taken in turn, a request of each; the first `limit` tokens if not 0. Raises ConfigError, StoreError."""
    files = [requests for path in paths for requests in _read(path)]
    if without_template:
        files = [strip_template(requests) for requests in files]
    order = in_turn(files)
    shapes = {ids.shape[1:] for ids in order}
    if not order or len(shapes) != 1:
        found = ", ".join(f"{layers} layers with {k} experts a token" for layers, k in sorted(shapes)) or "no tokens"
        raise ConfigError(f"these traces are not of one model: {found}; replay one model at a time")
    used = max(int(ids.max()) for ids in order) + 1
    if min(int(ids.min()) for ids in order) < 0 or (experts and experts < used):
        raise ConfigError(f"a trace has experts outside 0 to {(experts or used) - 1}")
    return Trace(first(order, limit) if limit else order, experts or -(-used // ROUND) * ROUND)


def in_turn(files: Sequence[Sequence[Ids]]) -> list[Ids]:
    """Returns a request of each file, then the next of each, without empty requests."""
    return [ids for turn in zip_longest(*files) for ids in turn if ids is not None and len(ids)]


def strip_template(requests: Sequence[Ids]) -> list[Ids]:
    """Requests without the first and last tokens that they share with the request before them."""
    kept = [requests[0]] if requests else []
    for before, ids in pairwise(requests):
        head = _shared(before, ids)
        tail = _shared(before[::-1], ids[head:][::-1])
        kept.append(ids[head : len(ids) - tail])
    return kept


def _shared(a: Ids, b: Ids) -> int:
    """Counts the leading tokens of a and b, [T, L, k] each, that choose the same experts."""
    n = min(len(a), len(b))
    same = (a[:n, :, :, None] == b[:n, :, None, :]).any(axis=3).mean(axis=(1, 2)) >= SAME
    return n if same.all() else int(same.argmin())


def first(requests: Sequence[Ids], tokens: int) -> list[Ids]:
    """Returns the first `tokens` tokens of the requests."""
    ends = np.cumsum([len(ids) for ids in requests])
    last = int(np.searchsorted(ends, tokens))
    cut = list(requests[: last + 1])
    if last < len(requests):
        cut[last] = cut[last][: len(cut[last]) - int(ends[last]) + tokens]
    return cut


def _read(path: Path) -> list[list[Ids]]:
    """Returns the requests of each source in a path: of each table, and of a folder's recordings together."""
    try:
        if path.is_dir():
            recordings = recordings_in(path)
            tables = sorted([*path.glob("*.ids.csv"), *path.glob("*.ids.csv.gz")])
            if not recordings and not tables:
                raise ConfigError(f"{path} holds neither recordings (*{SUFFIX}) nor tables (*.ids.csv.gz)")
            return ([_recorded(recordings)] if recordings else []) + [_parsed(table) for table in tables]
        return [_recorded([path])] if path.suffix == SUFFIX else [_parsed(path)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _recorded(paths: Sequence[Path]) -> list[Ids]:
    """Returns the decoded tokens of each request, requests in the order in which they began."""
    tokens: dict[str, list[Ids]] = defaultdict(list)
    models = set()
    for path in paths:
        header, steps = read_recording(path)
        models.add((header.digest, header.layers, header.experts))
        for step in steps:
            meta = step.meta
            ends = np.cumsum(meta.query_lens)
            counts = meta.query_lens.tolist()
            for request, end, count, decodes in zip(
                meta.requests, ends.tolist(), counts, meta.decode.tolist(), strict=True
            ):
                if decodes:
                    tokens[request].extend(step.ids[:, end - count : end].swapaxes(0, 1))
    if len(models) > 1:
        raise StoreError(f"{paths[0].parent} holds recordings of several models; replay one at a time")
    return [np.stack(ids) for ids in tokens.values()]


def _parsed(path: Path) -> list[Ids]:
    """Returns the requests of a table, or of a trace of another program, which its name or its beginning tells."""
    try:
        raw = read_plain(path, MOST_TRACE_BYTES)
        name = path.name
        if name.endswith(".gz"):
            raw, name = gzip.decompress(raw), name.removesuffix(".gz")
        if name.endswith(".npy"):
            return [foreign.read_npy(raw)]
        text = raw.decode("ascii")
        if name.endswith((".json", ".jsonl")):
            return foreign.parse_vllm(text)
        if text.startswith(foreign.BIGMOE):
            return foreign.parse_bigmoe(text)
        return foreign.parse_colibri(text) if text[:1].isdigit() else parse_table(text)
    except (ValueError, OverflowError, EOFError, RecursionError, zlib.error) as error:
        raise ConfigError(
            f"{path} is no routing table (seq or req, pos, ids), nor another known trace: {error}"
        ) from error


def parse_table(text: str) -> list[Ids]:
    """Returns the requests of a table, in order. Raises ValueError, OverflowError with the fault."""
    first, _, body = text.partition("\n")
    if [name.strip() for name in first.split(",")][1:] != ["pos", "ids"]:
        raise ValueError(f"its first line is {first[:60]!r}")
    rows = [line.split(",") for line in body.splitlines() if line]
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError("its rows have not three columns")
    shapes = {(row[2].count("|") + 1, len(row[2].partition("|")[0].split())) for row in rows}
    if len(shapes) != 1:
        raise ValueError(f"its rows are of different shapes: {sorted(shapes)}")
    layers, top_k = shapes.pop()
    flat = np.array("|".join(row[2] for row in rows).replace("|", " ").split(), np.int16)
    if flat.size != len(rows) * layers * top_k:
        raise ValueError("its rows have different numbers of experts")
    ids: Ids = flat.reshape(len(rows), layers, top_k)
    ids.sort(axis=2)
    if (ids[:, :, 1:] == ids[:, :, :-1]).any():
        raise ValueError("a token chose one expert twice")
    names = [row[0] for row in rows]
    starts = [i for i in range(1, len(names)) if names[i] != names[i - 1]]
    return np.split(ids, starts)


def chosen(ids: Ids) -> IntArray:
    """Returns the distinct experts of one layer-step, from the routing of its tokens [S, k]."""
    return ids[0].astype(np.int64) if len(ids) == 1 else np.unique(ids).astype(np.int64)


class ReplayCounts(NamedTuple):
    """Counts of a box's events since its start."""

    misses: int = 0  # experts that decoding demanded and that VRAM lacked
    missed_bytes: int = 0
    stall_s: float = 0.0
    to_vram_bytes: int = 0
    to_ram_bytes: int = 0
    wasted_bytes: int = 0  # prefetched, and evicted before they were demanded
    moves: float = 0.0  # experts, into both
    prefetched: int = 0  # into VRAM, before they were demanded
    promoted: int = 0  # prefetches that were demanded on their way there
    withdrawn: int = 0  # prefetches that were given up on their way there

    def since(self, earlier: ReplayCounts) -> ReplayCounts:
        """Returns the counts of the events after `earlier`."""
        return ReplayCounts(*(now - then for now, then in zip(self, earlier, strict=True)))  # type: ignore[arg-type]
