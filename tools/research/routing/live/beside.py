"""Live engines compared with simulated ones: measured step times, and the same requests in the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.offers import PushRouting, RoutingPolicy, WaitingRequest, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from tools.bench.arrivals import Arrival
from tools.research.routing.live.boxes import STATS_S
from tools.research.simulate.serving.cluster import cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import StepCosts
from tools.research.simulate.serving.simulated_engine import EngineShape
from tools.research.simulate.serving.step_fitting import times_of
from tools.testbed.daemons import Daemon

STEP_TOKENS = 2048
Numbers = npt.NDArray[np.float64]
Ask = Callable[
    [int, int, int], list[float]
]  # requests at once at each box, prompt and answer tokens -> seconds to first tokens


class LiveCosts(NamedTuple):
    """Times of a step, and of clients beside it."""

    fixed_s: float
    prefill_s: float  # for each token
    decode_s: float  # for each sequence
    front_s: float  # before the first token, beside its step

    def scaled(self, steps: Steps) -> LiveCosts:
        """Returns costs scaled to these decode steps, measured beside clients and fronts on the same cores."""
        expected = self.fixed_s + steps.tokens / steps.steps * self.decode_s
        by = steps.seconds / steps.steps / expected
        return LiveCosts(self.fixed_s * by, self.prefill_s * by, self.decode_s * by, self.front_s)


class Steps(NamedTuple):
    """Steps of one kind, of all engines."""

    steps: float
    seconds: float
    tokens: float


@contextmanager
def counting(daemons: Sequence[Daemon], phase: str) -> Iterator[list[Steps]]:
    """Adds the engines' steps of that phase during the block to the list."""
    families = [named(family, phase=phase) for family in (names.STEPS, names.STEP_SECONDS, names.STEP_TOKENS)]

    def sums() -> Numbers:
        time.sleep(STATS_S)
        read = [daemon.metrics() for daemon in daemons]
        return np.array([sum(each.get(family, 0.0) for each in read) for family in families])

    before, found = sums(), list[Steps]()
    yield found
    steps, seconds, tokens = (sums() - before).tolist()
    found.append(Steps(max(steps, 1.0), seconds, max(tokens, 1.0)))


def calibrated(daemons: Sequence[Daemon], ask: Ask) -> LiveCosts:
    """Measures the engines' steps while all of them work: one and four sequences, then prompts."""
    with counting(daemons, "decode") as alone:
        ask(1, 8, 96)
    with counting(daemons, "decode") as together:
        ask(4, 8, 96)
    firsts: list[float] = []
    with counting(daemons, "prefill") as prompts:
        for _ in range(4):
            firsts += ask(1, 480, 1)
    batch = np.array([each[0].tokens / each[0].steps for each in (alone, together)])
    took = np.array([each[0].seconds / each[0].steps for each in (alone, together)])
    read = prompts[0]
    decode_s = max(0.0, float((took[1] - took[0]) / max(batch[1] - batch[0], 1e-9)))
    fixed_s = max(1e-4, float(took[0] - batch[0] * decode_s))
    prefill_s = max(1e-7, (read.seconds - fixed_s * read.steps) / read.tokens)
    front_s = max(0.0, float(np.mean(firsts)) - read.seconds / read.steps)
    return LiveCosts(fixed_s, prefill_s, decode_s, front_s)


def simulated(
    costs: LiveCosts, rule: str, daemons: Sequence[Daemon], slots: int, requests: Sequence[Arrival]
) -> tuple[Numbers, Numbers]:
    """Returns TTFT and TPOT of the requests in the simulator, under pull, spread or local."""
    shape = EngineShape(
        StepCosts(costs.fixed_s, costs.prefill_s, costs.decode_s, 0.0),
        slots,
        int(daemons[0].metrics()[names.KV_BLOCKS]),
        step_tokens=STEP_TOKENS,
        order="sjf",
        output_reserve=0.25,
    )
    expected = float(np.mean([one.output_tokens for one in requests]))
    offered = [
        WaitingRequest(str(n), len(one.prompt), one.at_s, one.output_tokens, expected_tokens=expected)
        for n, one in enumerate(requests)
    ]
    jobs = jobs_of(offered, [one.output_tokens for one in requests])
    policies: dict[str, RoutingPolicy] = {"pull": PullRouting(PullLimits()), "least": PushRouting(fewest)}
    cluster_of(len(daemons), shape, policies[rule]).serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    long = np.array([job.output > 1 for job in jobs])
    return ttft_s + costs.front_s, tpot_s[long]
