"""The answers of one box with everything in memory to each prompt, and its tokens' experts.

Placements know the routes of the prompts `seen`. Requests use the prompts `asked`, with the same answers under every
placement.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.families.config import spec_from_config
from edgemoe.policy.placement.route_score import Routes
from edgemoe.store.manifest import Manifest
from edgemoe.telemetry.routing_recording import SUFFIX, read_recording
from edgemoe.types.experts import ExpertGeometry
from tools.bench.faults import common
from tools.research.placement.prism.models import Model, Prompts, prompts_of
from tools.testbed.bed import Bed, BedError
from tools.testbed.daemons import Daemon

SEEN, ASKED = 32, 48  # prompts of each task
PROMPT_TOKENS = 16
READY_S = 300.0  # kernels are compiled once


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A model's tasks as known before the first request."""

    prompts: Prompts  # asked
    answers: dict[str, list[str]]
    seen: dict[str, Routes]  # [T, L, k] of each task's prompts and answers
    asked: dict[str, Routes]


def geometry_of(store: Path) -> ExpertGeometry:
    return spec_from_config(Manifest.load(store).spec_config).geometry


def profile_of(model: Model, prompts: Path, work: Path) -> Profile:
    """Returns the profile kept in `work`; measures it first if there is none."""
    every = prompts_of(model, prompts, SEEN + ASKED, PROMPT_TOKENS)
    asked = {task: each[SEEN:] for task, each in every.items()}
    sizes = "-".join(map(str, (SEEN, ASKED, PROMPT_TOKENS, *model.answer_tokens.values())))
    kept = work / f"profile-{model.name}-{sizes}-{Manifest.load(model.store).digest[:12]}.npz"
    if not kept.exists():
        answers, routes = _measure(model, every, work)
        parts: dict[str, npt.NDArray[Any]] = {}
        for task, each in routes.items():
            parts |= {f"seen {task}": np.concatenate(each[:SEEN]), f"asked {task}": np.concatenate(each[SEEN:])}
        parts["answers"] = np.array(json.dumps({task: each[SEEN:] for task, each in answers.items()}))
        with kept.open("wb") as file:
            np.savez_compressed(file, **parts)  # type: ignore[arg-type]
    with np.load(kept) as found:
        return Profile(
            asked,
            json.loads(str(found["answers"])),
            {task: found[f"seen {task}"] for task in model.tasks},
            {task: found[f"asked {task}"] for task in model.tasks},
        )


def _measure(model: Model, every: Prompts, work: Path) -> tuple[dict[str, list[str]], dict[str, list[Routes]]]:
    """Returns each prompt's answer and routes, by task."""
    with Bed(["alone"]) as bed, tempfile.TemporaryDirectory(dir=work) as scratch:
        recorded = Path(scratch) / "routes"
        settings = common(model.store, geometry_of(model.store).count) | {
            "model.store_dir": model.store.parent,  # beside which compiled kernels are kept
            "record.dir": recorded,
        }
        daemon = Daemon(bed["alone"], Path(scratch) / "box", settings)
        try:
            daemon.start()
            daemon.wait_ready(READY_S)
            answers = {
                task: [daemon.complete(prompt, model.tokens_of(task)).text for prompt in prompts]
                for task, prompts in every.items()
            }
            daemon.stop()
        finally:
            daemon.close()
        recordings = iter(requests_of(sorted(recorded.rglob(f"*{SUFFIX}"))))
    by_task = {task: [_of(prompt, recordings) for prompt in prompts] for task, prompts in every.items()}
    return answers, by_task


def _of(prompt: list[int], recordings: Iterator[tuple[list[int], Routes]]) -> Routes:
    """Returns the routes of the next request with that prompt, without the engine's own warm-up."""
    for tokens, routes in recordings:
        if tokens[: len(prompt)] == prompt:
            return routes
    raise BedError("a request was not recorded")


def requests_of(recordings: Sequence[Path]) -> list[tuple[list[int], Routes]]:
    """Returns each request's tokens, prompt and answer, and their routes [T, L, k], in the order of their start."""
    tokens: dict[str, list[int]] = {}
    routes: dict[str, list[Routes]] = {}
    for path in recordings:
        for step in read_recording(path)[1]:
            ends = np.cumsum(step.meta.query_lens)
            for request, begin, end in zip(step.meta.requests, ends - step.meta.query_lens, ends, strict=True):
                tokens.setdefault(request, []).extend(step.meta.tokens[begin:end].tolist())
                routes.setdefault(request, []).append(step.ids[:, begin:end].transpose(1, 0, 2))
    return [(tokens[request], np.concatenate(parts)) for request, parts in routes.items()]


# --- skew -------------------------------------------------------------------------------------------------------


def frequencies(routes: Routes, experts: int) -> npt.NDArray[np.float64]:
    """Returns the share of tokens that choose each expert, [L, E] [Prism, Fig. 2 and 3]."""
    counts = np.array([np.bincount(routes[:, n].ravel(), minlength=experts) for n in range(routes.shape[1])])
    return counts / len(routes)


def skew(frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the share of a layer's choices that its hottest quarter of experts has, [L]; even: .25."""
    hottest = np.sort(frequency, axis=1)[:, -(frequency.shape[1] // 4) :]
    return np.asarray(hottest.sum(axis=1) / frequency.sum(axis=1), np.float64)


def overlap(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Returns the similarity of two tasks: the common part of their shares of each layer's choices, on average."""
    a, b = (each / each.sum(axis=1, keepdims=True) for each in (one, other))
    return float(np.minimum(a, b).sum(axis=1).mean())
