"""Requests for simulated engines: lengths from the Azure traces in five distributions, prefixes from Mooncake's.

[Gimbal, V-A4] names the five and draws them in Fig. 5, without numbers. Here prompts fall into BINS bins of equal
width, and a distribution is a weight for each bin; requests keep their own outputs. "random" is the trace itself.
Arrivals are a stretch of the chat trace, scaled to the rate.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.offers import WaitingRequest

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BINS = 8
MAX_PROMPT = 4096  # 1.5 % of the chat trace's prompts are longer; left out
MAX_TOKENS = 2048  # the highest limit of a client
MAX_LONG = 32_768  # of Mooncake's prompts
MOONCAKE_TOKENS = 512  # that a key of the trace covers
WEIGHTS: dict[str, Numbers] = {
    "central": np.exp(-0.5 * ((np.arange(BINS) - (BINS - 1) / 2) / 1.2) ** 2),
    "descending": np.arange(BINS, 0, -1.0),
    "two-end": np.abs(np.arange(BINS) - (BINS - 1) / 2) ** 2,
    "average": np.ones(BINS),
}
DISTRIBUTIONS = ("random", *WEIGHTS)


class Trace(NamedTuple):
    """Requests of a trace, in order of arrival; all [n]."""

    at_s: Numbers
    prompt: Ints
    output: Ints


class Load(NamedTuple):
    """Requests of a run, and the length of each answer."""

    offered: list[WaitingRequest]
    output: list[int]


def azure(data: Path) -> Trace:
    """Returns the chat trace, without the longest prompts."""
    with gzip.open(data / "azure-llm-2023/conv.csv.gz", "rt") as file:
        rows = [
            (float(r["arrival_s"]), int(r["prompt_tokens"]), max(1, int(r["output_tokens"])))
            for r in csv.DictReader(file)
        ]
    at_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    kept = prompt <= MAX_PROMPT
    return Trace(at_s[kept], prompt[kept], output[kept])


def drawn(trace: Trace, distribution: str, count: int, rng: np.random.Generator) -> Load:
    """Returns requests with lengths of a distribution, and arrivals at one a second on average."""
    if distribution == "random":
        rows = rng.integers(0, len(trace.prompt), count)
    else:
        bins = (trace.prompt - 1) * BINS // MAX_PROMPT
        weights = WEIGHTS[distribution] / WEIGHTS[distribution].sum()
        chosen = rng.choice(BINS, count, p=weights)
        members = [np.flatnonzero(bins == n) for n in range(BINS)]
        rows = np.array([rng.choice(members[n]) for n in chosen])
    start = int(rng.integers(0, len(trace.at_s) - count))
    at_s = trace.at_s[start : start + count] - trace.at_s[start]
    at_s = at_s * (count / at_s[-1])
    offered = [
        WaitingRequest(str(n), int(trace.prompt[row]), float(at_s[n]), MAX_TOKENS)
        for n, row in enumerate(rows.tolist())
    ]
    return Load(offered, trace.output[rows].tolist())


def at_rate(load: Load, rate: float) -> Load:
    """Scales the requests to a rate per second; a very large one makes them arrive almost at once."""
    return Load([replace(one, arrived_s=one.arrived_s / rate) for one in load.offered], load.output)


def mooncake(data: Path, trace: str, count: int, start: int, longest: int = MAX_LONG) -> Load:
    """Returns requests of Mooncake's trace with its keys, at one a second; prompts above `longest` are left out.

    A user is the chain of a first block: the first block that not all requests of the trace have.
    """
    with gzip.open(data / f"mooncake-fast25/{trace}.jsonl.gz", "rt") as file:
        every = [row for row in map(json.loads, file) if row["input_length"] <= longest and row["hash_ids"]]
    common = int(len({row["hash_ids"][0] for row in every}) == 1)
    rows = every[start : start + count]
    at_s = np.array([row["timestamp"] for row in rows]) / 1000.0
    at_s = (at_s - at_s[0]) * (len(rows) / max(1e-9, at_s[-1] - at_s[0]))
    offered = [
        WaitingRequest(
            str(n),
            int(row["input_length"]),
            float(at_s[n]),
            MAX_TOKENS,
            user=str(row["hash_ids"][min(common, len(row["hash_ids"]) - 1)]),
            prefix=tuple(row["hash_ids"][: int(row["input_length"]) // MOONCAKE_TOKENS]),
            key_tokens=MOONCAKE_TOKENS,
        )
        for n, row in enumerate(rows)
    ]
    return Load(offered, [max(1, int(row["output_length"])) for row in rows])
