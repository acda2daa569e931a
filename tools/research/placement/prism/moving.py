"""Waiting times of requests while experts move: the same arrivals with a migration and without, in turn.

Boxes start with evenly spread experts. In one run of two the plan has a goal, the placement for the requests, and
experts move as requests begin. They are padded, so that this takes a while. Requests due during the move are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.research.placement.prism.models import SETTINGS, Model
from tools.research.placement.prism.plans import NODES, place_by
from tools.research.placement.prism.prism_runs import Machine, Record, Run, measure
from tools.research.placement.prism.profile import Profile
from tools.testbed.float32_model import float32_demo

WIDTH = 1024  # of experts: 2.4 MB each
MOVES, STAYS = "moves", "stays"
REQUESTS = 110  # for 60 s
LEAST = 20  # requests during moves, for a quantile to be given
Values = npt.NDArray[np.float64]


def moving_runs(model: Model, seed: int, requests: int, pace: float) -> Iterator[Run]:
    """Returns a run with moving experts and one without, each first in every other round."""
    for method in (MOVES, STAYS) if seed % 2 == 0 else (STAYS, MOVES):
        yield Run("moving", model.name, method, SETTINGS[:1], seed, requests or REQUESTS, pace, 0.0)


def measure_moving(run: Run, model: Model, profile: Profile, machine: Machine, folder: Path) -> Record:
    """Returns the results of a run's requests on the model with padded experts, which gives the same tokens."""
    wide = replace(model, store=float32_demo(model.store.parent.parent, WIDTH))
    goal = place_by("rendezvous", wide, run.settings[0], profile).homes if run.method == MOVES else None
    return measure(run, wide, profile, machine, folder, first="uniform", goal=goal)


def moving_s(record: Record) -> tuple[float, float] | None:
    """Returns begin and end of the move, in seconds since the requests began; None if there was none."""
    begins_s = next((plan[0] for plan in record["plans"] if plan[2]), None)
    if begins_s is None:
        return None
    ends_s = next((plan[0] for plan in record["plans"] if plan[0] > begins_s and not plan[2]), np.inf)
    return max(0.0, begins_s), max(0.0, ends_s)


def took_s(record: Record, from_s: float, to_s: float) -> Values:
    """Returns the latencies of requests that were due then, or in progress as it began."""
    whole = np.array([pair for node in NODES for pair in record["latency"][node]], np.float64)
    return np.asarray(whole[(whole[:, 0] < to_s) & (whole.sum(axis=1) > from_s), 1], np.float64)


def moving_table(records: Sequence[Record]) -> Iterator[str]:
    """Returns latencies during and after moves, of all rounds together, in ms: p50 / p99."""
    still = {record["seed"]: record for record in records if record["method"] == STAYS}
    pairs = [
        (record, still[record["seed"]], span)
        for record in records
        if record["seed"] in still and (span := moving_s(record)) is not None
    ]
    yield ""
    yield "| experts | requests | moved, against none: p50 | p99 | moving, ms: p50 / p99 | none, ms: p50 / p99 |"
    yield "|---|---|---|---|---|---|"
    for name, spans in (
        ("while they moved", [span for _, _, span in pairs]),
        ("after", [(ends_s, np.inf) for _, _, (_, ends_s) in pairs]),
    ):
        moved = _together([took_s(record, *span) for (record, _, _), span in zip(pairs, spans, strict=True)])
        kept = _together([took_s(other, *span) for (_, other, _), span in zip(pairs, spans, strict=True)])
        if min(len(moved), len(kept)) >= LEAST:
            ours, theirs = (1e3 * np.quantile(each, (0.5, 0.99)) for each in (moved, kept))
            p50, p99 = 100 * (ours / theirs - 1)
            cells = (" / ".join(f"{value:.0f}" for value in each) for each in (ours, theirs))
            yield f"| {name} | {len(moved)} | {p50:+.1f} % | {p99:+.1f} % | " + " | ".join(cells) + " |"
    spans_s = ", ".join(f"{ends_s - begins_s:.0f}" for _, _, (begins_s, ends_s) in pairs)
    yield f"\nExperts moved for {spans_s} s; wrong answers {sum(record['wrong'] for record in records)}."


def _together(values: Sequence[Values]) -> Values:
    return np.concatenate([np.zeros(0), *values])
