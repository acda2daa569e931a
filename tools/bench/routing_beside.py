"""Daemons' engines beside simulated ones: step times as the engines measured them, and the same requests simulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.baselines import Push, fewest
from edgemoe.policy.routing.offers import Offered
from edgemoe.policy.routing.pull import Pull, PullLimits
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from tools.bench.arrivals import Arrival
from tools.simulate.serving.cluster import cluster_of, jobs_of
from tools.simulate.serving.engine import EngineShape
from tools.simulate.serving.fitting import times_of
from tools.simulate.serving.steps import BLOCK, StepCosts
from tools.testbed.daemons import Answer, Daemon

STEP_TOKENS, KV_TOKENS = 2048, 8192
STATS_S = 1.2  # after which an engine has said what it has counted
Numbers = npt.NDArray[np.float64]


class LiveCosts(NamedTuple):
    """What steps take, and what clients wait beside them."""

    fixed_s: float
    prefill_s: float  # for each token
    decode_s: float  # for each sequence
    front_s: float  # before the first token, beside its step

    def rate(self, engines: int, slots: int, requests: Sequence[Arrival]) -> float:
        """Returns the requests a second at which engines with full slots do nothing else."""
        prompt = float(np.mean([len(one.prompt) for one in requests]))
        output = float(np.mean([one.output_tokens for one in requests]))
        step_s = self.fixed_s + slots * self.decode_s
        return engines / (self.fixed_s + prompt * self.prefill_s + output * step_s / slots)


def calibrated(daemons: Sequence[Daemon], prompt_of: Callable[[tuple[int, ...], int], list[int]]) -> LiveCosts:
    """Returns what the engines' steps take while all of them work: one and four sequences, then prompts."""
    alone = _steps(daemons, 1, prompt_of, 8, 96, "decode")
    together = _steps(daemons, 4, prompt_of, 8, 96, "decode")
    prompts = _steps(daemons, 1, prompt_of, 480, 1, "prefill", times=4)
    batch = np.array([alone.tokens / alone.steps, together.tokens / together.steps])
    took = np.array([alone.seconds / alone.steps, together.seconds / together.steps])
    decode_s = max(0.0, float((took[1] - took[0]) / max(batch[1] - batch[0], 1e-9)))
    fixed_s = max(1e-4, float(took[0] - batch[0] * decode_s))
    prefill_s = max(1e-7, (prompts.seconds - fixed_s * prompts.steps) / prompts.tokens)
    front_s = max(0.0, prompts.first_s - prompts.seconds / prompts.steps)
    return LiveCosts(fixed_s, prefill_s, decode_s, front_s)


class Steps(NamedTuple):
    """Steps of one kind, of all engines."""

    steps: float
    seconds: float
    tokens: float
    first_s: float  # mean time to the first token, as clients saw it


def _steps(
    daemons: Sequence[Daemon],
    at_once: int,
    prompt_of: Callable[[tuple[int, ...], int], list[int]],
    prompt: int,
    tokens: int,
    phase: str,
    times: int = 1,
) -> Steps:
    """Has every engine run so many requests of its own at once; returns its steps of that phase."""
    families = [named(family, phase=phase) for family in (names.STEPS, names.STEP_SECONDS, names.STEP_TOKENS)]

    def sums() -> Numbers:
        time.sleep(STATS_S)
        read = [daemon.metrics() for daemon in daemons]
        return np.array([sum(each.get(family, 0.0) for each in read) for family in families])

    before, firsts = sums(), list[float]()
    for turn in range(times):
        answers = [Answer() for _ in range(len(daemons) * at_once)]

        def one(n: int, answers: list[Answer] = answers, turn: int = turn) -> None:
            asked = prompt_of((9, at_once, turn, n), prompt)
            answers[n] = daemons[n % len(daemons)].complete(asked, tokens)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(answers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        firsts += [answer.times_s[0] for answer in answers if answer.times_s]
    steps, seconds, counted = (sums() - before).tolist()
    return Steps(max(steps, 1.0), seconds, max(counted, 1.0), float(np.mean(firsts)))


def simulated(
    costs: LiveCosts, rule: str, engines: int, slots: int, requests: Sequence[Arrival]
) -> tuple[Numbers, Numbers]:
    """Returns TTFT and TPOT of the requests in the simulator."""
    shape = EngineShape(
        StepCosts(costs.fixed_s, costs.prefill_s, costs.decode_s, 0.0),
        slots,
        KV_TOKENS // BLOCK,
        step_tokens=STEP_TOKENS,
        order="linear",
        output_reserve=0.25,
    )
    expected = float(np.mean([one.output_tokens for one in requests]))
    offered = [
        Offered(str(n), len(one.prompt), one.at_s, one.output_tokens, expected_tokens=expected)
        for n, one in enumerate(requests)
    ]
    jobs = jobs_of(offered, [one.output_tokens for one in requests])
    cluster_of(engines, shape, Pull(PullLimits()) if rule == "pull" else Push(fewest)).serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    long = np.array([job.output > 1 for job in jobs])
    return ttft_s + costs.front_s, tpot_s[long]
