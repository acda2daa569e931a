"""Costs of a step, fitted to requests measured on vLLM, and the simulation's error.

LLMServingSim's measurement: Qwen3-30B-A3B, two replicas with expert parallelism, 128 sequences, 2,048 tokens a step.
Half of the requests are fitted. The replicas step together, so they are one engine of twice the size, whose steps are
planned as the one before begins. TTFT counts from the end of the step during which a request arrived.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from edgemoe.policy.routing.offers import PushRouting, WaitingRequest, fewest
from tools.research.simulate.serving.cluster import cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import StepCosts
from tools.research.simulate.serving.simulated_engine import EngineShape, Job

MEASURED = "llmservingsim-measured/qwen3-30b-a3b_rtxpro6000_vllm_requests.csv"
REPLICAS, SLOTS, STEP_TOKENS = 2, 128, 2048
START = (0.025, 3e-5, 6e-5, 4e-8, 0.002)  # start of the fit: `StepCosts`, and seconds after the engine
Numbers = npt.NDArray[np.float64]


class Measured(NamedTuple):
    """Requests and their times, in order of arrival."""

    offered: list[WaitingRequest]
    output: list[int]
    ttft_s: Numbers
    tpot_s: Numbers


def read(data: Path) -> Measured:
    """Returns the measured requests."""
    with (data / MEASURED).open() as file:
        rows = list(csv.DictReader(file))
    offered = [WaitingRequest(str(n), int(row["prompt_tokens"]), float(row["arrival_s"])) for n, row in enumerate(rows)]
    ttft_s, tpot_s = (np.array([float(row[name]) for row in rows]) for name in ("ttft_s", "tpot_s"))
    return Measured(offered, [int(row["output_tokens"]) for row in rows], ttft_s, tpot_s)


def times_of(jobs: list[Job]) -> tuple[Numbers, Numbers]:
    """Returns seconds to each request's first token, and seconds for each token after it."""
    first_s = np.array([job.first_s for job in jobs])
    end_s = np.array([job.end_s for job in jobs])
    ttft_s = first_s - np.array([job.offered.arrived_s for job in jobs])
    return ttft_s, (end_s - first_s) / np.maximum(1, np.array([job.output for job in jobs]) - 1)


def simulated(measured: Measured, costs: StepCosts, front_s: float) -> tuple[Numbers, Numbers]:
    """Returns TTFT and TPOT of the measured requests in the simulator."""
    jobs = jobs_of(measured.offered, measured.output)
    shape = EngineShape(costs, REPLICAS * SLOTS, step_tokens=REPLICAS * STEP_TOKENS, plans_ahead=True)
    cluster_of(1, shape, PushRouting(fewest)).serve(jobs)
    waited_s = np.array([job.seen_s - job.offered.arrived_s for job in jobs])
    ttft_s, tpot_s = times_of(jobs)
    return ttft_s - waited_s + front_s, tpot_s


def of_one(costs: StepCosts) -> StepCosts:
    """Returns the costs of one replica's step, if the other has as much work."""
    return StepCosts(costs.fixed_s, *(REPLICAS * each for each in costs[1:]))


def halves(measured: Measured) -> tuple[slice, slice]:
    """Returns the requests to fit to, and the ones to score."""
    half = len(measured.output) // 2
    return slice(0, half), slice(half, None)


def fit(measured: Measured, seen: slice) -> tuple[StepCosts, float]:
    """Returns a step's costs, and the front's additional seconds, fitted to the requests `seen`."""

    def loss(logs: Numbers) -> float:
        *costs, front_s = np.exp(logs).tolist()
        ttft_s, tpot_s = simulated(measured, StepCosts(*costs), front_s)
        ttft = np.log(ttft_s / measured.ttft_s)[seen]
        tpot = np.log(tpot_s / measured.tpot_s)[seen]
        return float(4.0 * (ttft**2).mean() + 3.0 * np.abs(tpot).mean())

    found = minimize(loss, np.log(START), method="Nelder-Mead", options={"maxfev": 700})
    *costs, front_s = np.exp(found.x).tolist()
    return StepCosts(*costs), front_s


def errors(measured: Measured, costs: StepCosts, front_s: float, unseen: slice) -> dict[str, float]:
    """Returns the errors in per cent of the requests that were not fitted, and of all."""
    answer = {}
    both = zip(("ttft", "tpot"), simulated(measured, costs, front_s), (measured.ttft_s, measured.tpot_s), strict=True)
    for name, ours, theirs in both:
        for part, rows in (("unseen", unseen), ("all", slice(None))):
            answer[f"{name}_{part}_mean"] = round(100 * float(ours[rows].mean() / theirs[rows].mean() - 1), 1)
            answer[f"{name}_{part}_p50"] = round(100 * float(np.median(ours[rows]) / np.median(theirs[rows]) - 1), 1)
            apart = np.abs(ours[rows] / theirs[rows] - 1)
            answer[f"{name}_{part}_each"] = round(100 * float(apart.mean()), 1)
    return answer
