"""Arrivals for load tests: real traces, thinned and scaled, or a Poisson process. Prompts are token ids.

Azure traces give times and lengths; their prompts are random ids. Mooncake traces also give a hash for each block of
512 prompt tokens. Equal hashes become equal tokens, so prefix reuse is the trace's. Each seed gives other prompts.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load test, `at_s` seconds after the start."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The selection from a trace for a small box. Lengths are multiplied by `scale`, then clipped."""

    vocab: int
    scale: float = 1.0
    max_prompt_tokens: int = 4096
    max_output_tokens: int = 256

    def prompt_tokens(self, recorded: int) -> int:
        return int(np.clip(round(recorded * self.scale), 1, self.max_prompt_tokens))

    def output_tokens(self, recorded: int) -> int:
        return int(np.clip(round(recorded * self.scale), 1, self.max_output_tokens))


def poisson(
    rate: float, count: int, shape: Shape, seed: int, prompt_tokens: int, output: int, fixed: bool = False
) -> list[Arrival]:
    """Draws `count` arrivals at `rate` per second; lengths are geometric around the given means, or constant."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.full(count, prompt_tokens) if fixed else rng.geometric(1 / prompt_tokens, count)
    outputs = np.full(count, output) if fixed else rng.geometric(1 / output, count)
    return [
        Arrival(float(at), _random_ids(rng, shape, int(p)), shape.output_tokens(int(o)))
        for at, p, o in zip(times, prompts, outputs, strict=True)
    ]


def from_trace(path: Path, rate: float, count: int, shape: Shape, seed: int) -> list[Arrival]:
    """Returns the first `count` requests of an Azure (.csv.gz) or Mooncake (.jsonl.gz) trace, at `rate` per second."""
    rng = np.random.default_rng(seed)
    rows = _mooncake(path, rng, shape, seed) if ".jsonl" in path.name else _azure(path, rng, shape)
    arrivals = [row for row, _ in zip(rows, range(count), strict=False)]
    if not arrivals:
        raise SystemExit(f"{path}: no requests in this trace")
    return stretch(arrivals, rate)


def stretch(arrivals: list[Arrival], rate: float) -> list[Arrival]:
    """Scales the gaps between arrivals so that the mean rate is `rate` per second."""
    first = arrivals[0].at_s
    span_s = max(arrivals[-1].at_s - first, 1e-9)
    factor = (len(arrivals) / rate) / span_s
    return [replace(a, at_s=(a.at_s - first) * factor) for a in arrivals]


def _azure(path: Path, rng: np.random.Generator, shape: Shape) -> Iterator[Arrival]:
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            prompt = _random_ids(rng, shape, int(row["prompt_tokens"]))
            yield Arrival(float(row["arrival_s"]), prompt, shape.output_tokens(int(row["output_tokens"])))


def _mooncake(path: Path, rng: np.random.Generator, shape: Shape, seed: int) -> Iterator[Arrival]:
    block = max(1, round(MOONCAKE_BLOCK_TOKENS * shape.scale))
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            wanted = shape.prompt_tokens(int(row["input_length"]))
            hashes = row["hash_ids"][: wanted // block + 1]
            ids = [_block_ids(shape, (seed, int(h)), block) for h in hashes]
            prompt = np.concatenate([*ids, rng.integers(0, shape.vocab, wanted)])[:wanted]
            yield Arrival(row["timestamp"] / 1000, tuple(prompt.tolist()), shape.output_tokens(row["output_length"]))


def _block_ids(shape: Shape, seed: tuple[int, int], tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, shape.vocab, tokens)


def _random_ids(rng: np.random.Generator, shape: Shape, recorded: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, shape.vocab, shape.prompt_tokens(recorded)).tolist())
