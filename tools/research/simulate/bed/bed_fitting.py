"""Costs of the test bed's boxes, fitted to runs by simulating them.

A box's processor is a share of a core, throttled in periods of 10 ms; all its work takes from that share. Calls and
requests also wait without it, and experts take the devices' stated time. The fit minimises log errors of mean latency,
core seconds and decode steps, with a penalty for the distance from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from edgemoe.policy.placement.route_score import masks_of
from tools.research.placement.prism.plans import DEVICES, NODES
from tools.research.simulate.bed.bed_runs import BedRun
from tools.research.simulate.event_heap import Numbers
from tools.research.simulate.events import CORE_S, DECODE_S, DECODE_STEPS, Cluster, Host, Result, simulate
from tools.testbed.bed import RATE_MBIT

SEQUENCES = 16  # sequences that step together at a box, as in the runs
FREEDOM = 3.0  # log range of a cost that weighs as much as a figure's error of 1
LEAST_SHARE = 0.05  # of a core
MOST = 4  # rounds of the search
SEARCHES = 4


class BedCosts(NamedTuple):
    """Seconds of a processor, except `idle` and `wait_s`."""

    idle: float = 0.04  # share of a core of an idle box
    request_s: float = 5e-3
    step_s: float = 5e-3
    layer_s: float = 5e-4  # its attention and gate
    prompt_s: float = 2e-3  # of a layer more, in steps that have prompts
    row_s: float = 2e-5  # of each token in a layer
    expert_s: float = 5e-5
    call_s: float = 8e-4  # of each that a box makes
    serve_s: float = 8e-4  # of each that it answers
    wait_s: float = 1e-3  # of a call or its answer on its way, beside the link; without a processor
    front_s: float = 3e-2  # of a request from and to its client; without a processor


def cluster_of(run: BedRun, costs: BedCosts) -> Cluster:
    """Returns the run's boxes at these costs."""
    host = Host(
        np.maximum(run.cores - costs.idle, LEAST_SHARE),
        SEQUENCES,
        costs.request_s,
        costs.step_s,
        costs.prompt_s,
        costs.call_s,
        costs.serve_s,
        np.array(DEVICES),
        run.read_s,
    )
    link_s = run.row_bytes * 8 / (RATE_MBIT * 1e6)
    device = np.where(run.inside, 0, -1).astype(np.int8)
    ones = np.ones(len(run.cores), np.int64)
    times = (costs.layer_s, costs.row_s, 0.0, costs.expert_s, 0.0, link_s, costs.wait_s)
    return Cluster(masks_of(run.homes), device, ones, *times, host)


def took_s(run: BedRun, costs: BedCosts) -> tuple[Numbers, Result]:
    """Returns each request's simulated time, and the whole result."""
    result = simulate(run.prompts, cluster_of(run, costs))
    return result.end_s - run.prompts.at_s + costs.front_s, result


def box_figures(run: BedRun, costs: BedCosts) -> Numbers:
    """Returns each box's mean latency, core seconds, and seconds of a decode step, simulated, [3, N]."""
    took, result = took_s(run, costs)
    boxes = result.boxes
    means = [took[run.prompts.server == box].mean() for box in range(len(NODES))]
    core_s = boxes[:, CORE_S] + costs.idle * lasted_s(run)
    return np.array([means, core_s, boxes[:, DECODE_S] / np.maximum(boxes[:, DECODE_STEPS], 1.0)])


def lasted_s(run: BedRun) -> float:
    """Returns begin and end of the boxes' figures."""
    return float(np.max(run.prompts.at_s + run.latency_s))


def measured_figures(run: BedRun) -> Numbers:
    """Returns the same, measured."""
    boxes = [run.record["boxes"][node] for node in NODES]
    took = run.latency_s
    means = [took[run.prompts.server == box].mean() for box in range(len(NODES))]
    steps = [box["decode_s"] / max(box["decode_steps"], 1.0) for box in boxes]
    return np.array([means, [box["core_s"] for box in boxes], steps])


def fit(runs: Sequence[BedRun], most: int = MOST) -> BedCosts:
    """Returns the costs fitted to these runs, after `most` rounds of the search at most."""
    start = np.log(np.array(BedCosts()))
    measured = [np.log(np.maximum(measured_figures(run), 1e-6)) for run in runs]

    def residuals(logs: Numbers) -> Numbers:
        costs = BedCosts(*np.exp(logs).tolist())
        apart = [np.log(box_figures(run, costs)) - seen for run, seen in zip(runs, measured, strict=True)]
        latency, core, step = np.moveaxis(np.array(apart), 1, 0)
        alike, own = (latency + step) / 2, np.concatenate([latency - step, core])  # `alike` has the machine's speed
        return np.concatenate([np.ravel(alike), np.ravel(own), (logs - start) / FREEDOM])

    found = least_squares(residuals, start, diff_step=0.05, loss="soft_l1", max_nfev=most)
    return BedCosts(*np.exp(found.x).tolist())


def at_speed_of(run: BedRun, costs: BedCosts) -> BedCosts:
    """Returns the costs scaled to the machine's speed in that run, by its decode steps; `idle` stays."""
    factor = 1.0
    for _ in range(SEARCHES):
        slower = BedCosts(costs.idle, *(factor * each for each in costs[1:]))
        simulated, measured = box_figures(run, slower)[2], measured_figures(run)[2]
        factor *= float(np.exp(np.log(np.maximum(measured, 1e-6) / np.maximum(simulated, 1e-6)).mean()))
    return BedCosts(costs.idle, *(factor * each for each in costs[1:]))
