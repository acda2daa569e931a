"""The time of a step on one box by the share of remote experts [Prism, Fig. 5]."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from tools.research.placement.prism.models import SETTINGS, Model
from tools.research.placement.prism.plans import NODES, partly_remote
from tools.research.placement.prism.prism_runs import Machine, Record, Run, boxes, since, state
from tools.research.placement.prism.profile import Profile, geometry_of

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)


def measure_share(run: Run, model: Model, profile: Profile, machine: Machine, folder: Path) -> Record:
    """Measures decode steps, one request after the other, on the first box, which lacks a share of the experts."""
    wanted = float(run.method)
    homes = partly_remote(model, wanted)
    slots = [max(1, int(each.sum())) for each in homes]
    tasks = model.tasks_of(SETTINGS[1])
    asked = [(tasks[n % 3], n // 3) for n in range(run.requests)]
    with boxes(folder, model, run, machine, homes, slots) as made:
        box, wrong = made[NODES[0]], 0
        for task, number in asked[:6]:
            box.complete(profile.prompts[task][number], model.tokens_of(task))
        before = state(made)
        began_s = time.monotonic()
        for task, number in asked:
            answer = box.complete(profile.prompts[task][number], model.tokens_of(task))
            wrong += answer.text != profile.answers[task][number]
        took_s = time.monotonic() - began_s
        grown = since(before, state(made))[NODES[0]]
    return (
        asdict(run)
        | asdict(machine)
        | {
            "wrong": wrong,
            "request_s": round(took_s / run.requests, 4),
            "layer_ms": round(1e3 * grown["decode_s"] / grown["decode_steps"] / geometry_of(model.store).layers, 4),
            "remote": round(grown["remote"] / grown["experts"], 3),
            "box": grown,
        }
    )
