"""Counts the calls until a box that lies is cut off: the ledger and checker of answers, by a simulated clock.

`python -m tools.research.lying_box` prints the table of results/lying_box.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edgemoe.cluster.data.answer_checker import AnswerChecker, CheckingMeans
from edgemoe.cluster.data.answer_ledger import AnswerLedger
from edgemoe.telemetry.unit_time import work_units
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.peers import ExpertWork

SIZES = ExpertGeometry(layers=48, experts=64, top_k=8, hidden=4, width=4, dtype="float32")
EXPERTS = 3  # of a call
CALL_S = 2e-3  # from one call to the next, while the box is busy
READ_S = 3e-4  # that an expert's weights take to be read from memory
COLD_S = 6e-3  # that a check takes whose experts are not in memory, at another box or from the disk
WRONG, RIGHT = (memoryview(np.full(SIZES.hidden, value, np.float32).view(np.uint8).data) for value in (2.0, 1.0))


class Scenario(NamedTuple):
    """How the box works and how much it checks."""

    name: str
    share: float = 0.01
    in_memory: bool = True  # the experts that the other box computes lie here too
    burst_calls: int = 0  # between pauses; 0: none
    pause_s: float = 0.0


class Outcome(NamedTuple):
    """The end of one run."""

    calls: int  # until the box was cut off
    checked: int
    busy_share: float  # of the busy time, spent on checks


SCENARIOS = (
    Scenario("without a pause, experts in memory here"),
    Scenario("without a pause, experts not in memory", in_memory=False),
    Scenario("the same, `check_share` 0.1", share=0.1, in_memory=False),
    Scenario("answers of 400 calls, pauses of 5 s, not in memory", in_memory=False, burst_calls=400, pause_s=5.0),
    Scenario("answers of 400 calls, pauses of 5 s, in memory", burst_calls=400, pause_s=5.0),
)


async def run(scenario: Scenario, lie_share: float, seed: int, most_calls: int = 200_000) -> Outcome:
    """Runs a box against another one that lies in `lie_share` of its answers."""
    rng, now_s, idle, busy_s, cut = random.Random(seed), [0.0], [False], [0.0], list[str]()
    mask = np.full(SIZES.experts, scenario.in_memory)

    def spend(seconds: float) -> None:
        now_s[0] += seconds
        busy_s[0] += 0.0 if idle[0] else seconds

    async def here(works: Sequence[ExpertWork]) -> list[memoryview]:
        if scenario.in_memory:
            chosen = np.concatenate([work.experts for work in works])
            spend(READ_S * float(work_units(np.cumsum([0, *np.bincount(chosen)[np.unique(chosen)]])).sum()))
        else:
            spend(COLD_S)
        return [RIGHT for _ in works]

    async def another(_work: ExpertWork, _than: str) -> None:
        return None

    means = CheckingMeans(here, another, lambda _: mask, lambda: idle[0])
    ledger = AnswerLedger(SIZES, scenario.share, rng)
    checker = AnswerChecker(ledger, scenario.share, means, lambda node, _: cut.append(node), lambda: now_s[0])

    async def pass_time(seconds: float) -> None:
        now_s[0] += seconds
        while await checker.check_some():
            pass

    calls = 0
    while not cut and calls < most_calls:
        calls += 1
        ledger.note("b", _call(rng), WRONG if rng.random() < lie_share else RIGHT)
        await pass_time(CALL_S)
        if scenario.burst_calls and calls % scenario.burst_calls == 0:
            idle[0] = True
            for _ in range(int(scenario.pause_s / 0.05)):
                await pass_time(0.05)
            idle[0] = False
    record = ledger.records["b"]
    return Outcome(calls, record.right + record.wrong, busy_s[0] / (calls * CALL_S))


def _call(rng: random.Random) -> ExpertWork:
    experts = np.array(sorted(rng.sample(range(SIZES.experts), EXPERTS)))
    hidden = np.ones((1, SIZES.hidden), np.float32).view(np.uint8)
    rows: Any = np.zeros(EXPERTS, np.int64)
    return ExpertWork(
        rng.randrange(SIZES.layers), experts, np.arange(EXPERTS + 1), rows, np.ones(EXPERTS, np.float32), hidden
    )


def table(seeds: int) -> str:
    """Returns the results of all scenarios as a table."""
    lines = ["| box | lies in | calls, median (p90) | answers checked | busy time spent |", "|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        for lie_share in (0.01, 0.1):
            ends = [asyncio.run(run(scenario, lie_share, seed)) for seed in range(seeds)]
            calls = np.array([end.calls for end in ends])
            checked = sum(end.checked for end in ends) / calls.sum()
            busy = np.mean([end.busy_share for end in ends])
            middle, late = np.quantile(calls, [0.5, 0.9]).astype(int)
            lines.append(f"| {scenario.name} | {lie_share:.0%} | {middle:,} ({late:,}) | {checked:.1%} | {busy:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable()
    print(table(seeds=40))
