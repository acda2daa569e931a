"""Requests of the simulator: real sequences with their routes, with random arrivals or a trace's.

Each server has a task, in turn. Its prompts are sequences of the task's second half; the last few tokens stand for the
answer, which is not marked in the recording. Placements know the first half only, as pairs and counts.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.policy.placement.route_score import Routes
from edgemoe.replay.trace import load
from tools.research.simulate.event_heap import Numbers
from tools.research.simulate.events import Prompts

TASKS = ("intent", "law", "translation")
EXPERTS = 64  # DeepSeek-V2-Lite's; its experts and hidden size follow
EXPERT_NUMBERS = 2048 * 1408 * 3
HIDDEN_BYTES = 2048 * 2


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task's sequences, [T, L, k] each: for placements, and for requests."""

    seen: tuple[Routes, ...]
    unseen: tuple[Routes, ...]


def tasks_of(data: Path) -> list[Task]:
    """Returns the tasks of DeepSeek-V2-Lite's tables, at any depth of a folder."""
    found = next(iter(data.rglob(f"{TASKS[0]}.ids.csv.gz")), None)
    if found is None:
        raise SystemExit(f"{data} has no {TASKS[0]}.ids.csv.gz")
    answer = []
    for task in TASKS:
        whole = [np.asarray(each) for each in load([found.with_name(f"{task}.ids.csv.gz")], experts=EXPERTS).requests]
        half = len(whole) // 2
        answer.append(Task(tuple(whole[:half]), tuple(whole[half:])))
    return answer


def prompts_of(tasks: list[Task], at_s: Numbers, servers: int, emitted: int, rng: np.random.Generator) -> Prompts:
    """Returns prompts that arrive at these times, at servers drawn evenly, each with one of its server's sequences."""
    server = rng.integers(0, servers, len(at_s))
    sequences = [each for task in tasks for each in task.unseen]
    starts = np.concatenate([[0], np.cumsum([len(each) for each in sequences])])
    firsts = np.cumsum([0, *(len(task.unseen) for task in tasks)])
    which = np.array([rng.integers(firsts[n % len(tasks)], firsts[n % len(tasks) + 1]) for n in server.tolist()])
    tokens = starts[which + 1] - starts[which]
    return Prompts(
        at_s,
        server,
        starts[which],
        tokens,
        np.minimum(emitted, tokens - 1),
        np.ascontiguousarray(np.concatenate(sequences)),
    )


def poisson(every_s: float, count: int, rng: np.random.Generator) -> Numbers:
    """Returns arrival times of requests, one every `every_s` on average."""
    return np.cumsum(rng.exponential(every_s, count))


def traced(path: Path, every_s: float, count: int) -> Numbers:
    """Returns arrival times of an Azure trace's first requests, stretched to one every `every_s`."""
    with gzip.open(path, "rt") as file:
        rows = [float(row["arrival_s"]) for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    at_s = np.array(rows) - rows[0]
    return np.asarray(at_s * (every_s * len(at_s) / max(at_s[-1], 1e-9)))
