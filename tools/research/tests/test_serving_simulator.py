"""Simulated engines: times of steps, blocks, savings by prefixes, and routes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.routing.offers import PushRouting, RoundRobin, WaitingRequest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from tools.research.simulate.serving.cluster import Knowledge, cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import StepCosts
from tools.research.simulate.serving.serving_workload import DISTRIBUTIONS, MAX_PROMPT, Trace, at_rate, drawn
from tools.research.simulate.serving.simulated_engine import EngineShape, Job
from tools.research.simulate.serving.step_fitting import times_of

COSTS = StepCosts(fixed_s=0.01, prefill_s=0.001, decode_s=0.002, context_s=0.0)
SHAPE = EngineShape(COSTS, slots=4, blocks=64, step_tokens=32)


def offered(name: int, prompt: int, at_s: float = 0.0, prefix: tuple[int, ...] = ()) -> WaitingRequest:
    return WaitingRequest(str(name), prompt, at_s, max_tokens=64, prefix=prefix, key_tokens=16)


def served(
    requests: list[WaitingRequest], output: list[int], shape: EngineShape = SHAPE, engines: int = 1
) -> list[Job]:
    jobs = jobs_of(requests, output)
    cluster_of(engines, shape, PushRouting(RoundRobin())).serve(jobs)
    return jobs


def test_a_request_alone_takes_its_chunks_and_its_tokens() -> None:
    [job] = served([offered(0, 40, at_s=1.0)], [3])
    chunks = 2 * COSTS.fixed_s + 40 * COSTS.prefill_s
    assert job.first_s == pytest.approx(1.0 + chunks)
    assert job.end_s == pytest.approx(job.first_s + 2 * (COSTS.fixed_s + COSTS.decode_s))


def test_a_decoding_sequence_goes_on_beside_a_prompt_and_pays_for_it() -> None:
    first, second = served([offered(0, 16), offered(1, 31, at_s=0.02)], [10, 1])
    assert second.first_s == pytest.approx(first.first_s + COSTS.fixed_s + 31 * COSTS.prefill_s + COSTS.decode_s)
    assert first.end_s - first.first_s == pytest.approx(9 * (COSTS.fixed_s + COSTS.decode_s) + 31 * COSTS.prefill_s)


def test_an_engine_that_plans_ahead_lets_a_request_in_one_step_later_but_not_where_it_has_nothing_to_do() -> None:
    step_s = COSTS.fixed_s + COSTS.decode_s
    rows = [offered(0, 16), offered(1, 16, at_s=0.030)], [20, 1]
    first, second = served(*rows, replace(SHAPE, plans_ahead=True))
    at_once, later = served(*rows)
    assert first.first_s == at_once.first_s == pytest.approx(COSTS.fixed_s + 16 * COSTS.prefill_s)
    assert second.seen_s == later.seen_s == pytest.approx(first.first_s + step_s)
    assert later.first_s == pytest.approx(later.seen_s + step_s + 16 * COSTS.prefill_s)
    assert second.first_s == pytest.approx(later.first_s + step_s)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60), st.floats(0.0, 2.0)), min_size=1, max_size=20),
    st.sampled_from(["exact", "corrected", "reports"]),
    st.booleans(),
    st.booleans(),
)
def test_every_request_ends_with_all_its_tokens_and_every_block_comes_back(
    rows: list[tuple[int, int, float]], knowledge: Knowledge, pulled: bool, plans_ahead: bool
) -> None:
    """64 blocks are little more than the largest request needs, so that sequences must make room for others."""
    rows = sorted(rows, key=lambda row: row[2])
    prefixes = [tuple(range(prompt // 16)) if n % 2 else () for n, (prompt, _, _) in enumerate(rows)]
    requests = [offered(n, row[0], row[2], prefixes[n]) for n, row in enumerate(rows)]
    policy = PullRouting(PullLimits()) if pulled else PushRouting(RoundRobin())
    jobs = jobs_of(requests, [output for _, output, _ in rows])
    shape = replace(SHAPE, order="sjf", output_reserve=0.25, plans_ahead=plans_ahead)
    cluster = cluster_of(2, shape, policy, knowledge, key_tokens=16)
    cluster.serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    assert (ttft_s > 0).all()
    assert (tpot_s >= 0).all()
    assert not any(math.isnan(job.end_s) for job in jobs)
    assert all(engine.batch.free[0] == SHAPE.blocks and not engine.busy for engine in cluster.engines.values())


def test_a_prefix_that_the_cache_has_is_not_computed_again() -> None:
    again = [offered(n, 65, at_s=float(n), prefix=(1, 2, 3, 4)) for n in range(2)]
    jobs = jobs_of(again, [1, 1])
    cluster = cluster_of(1, SHAPE, PushRouting(RoundRobin()), key_tokens=16)
    cluster.serve(jobs)
    assert jobs[1].first_s - 1.0 == pytest.approx(COSTS.fixed_s + 1 * COSTS.prefill_s)
    [cache] = [engine.cache for engine in cluster.engines.values()]
    assert cache is not None
    assert (cache.hits, cache.probes) == (4, 8)


def test_pull_sends_a_prefix_to_its_engine_and_round_robin_does_not() -> None:
    requests = [offered(n, 65, at_s=float(n), prefix=(1, 2, 3, 4)) for n in range(4)]
    hits = {}
    for policy in (PullRouting(PullLimits(crowding=0.01)), PushRouting(RoundRobin())):
        cluster = cluster_of(2, SHAPE, policy, key_tokens=16)
        cluster.serve(jobs_of(requests, [1] * 4))
        hits[type(policy)] = sum(engine.cache.hits for engine in cluster.engines.values() if engine.cache)
    assert hits == {PullRouting: 12, PushRouting: 8}


def test_reports_half_a_second_old_pile_up_at_one_engine_unless_corrected() -> None:
    requests = [offered(n, 16, at_s=0.01 * n) for n in range(12)]
    places = {}
    for knowledge in ("corrected", "reports"):
        jobs = jobs_of(requests, [4] * 12)
        cluster_of(3, SHAPE, PullRouting(PullLimits()), knowledge).serve(jobs)  # type: ignore[arg-type]
        places[knowledge] = [sum(job.place == place for job in jobs) for place in ("000", "001", "002")]
    assert places == {"corrected": [4, 4, 4], "reports": [12, 0, 0]}


def test_distributions_weigh_lengths_as_they_say_and_keep_rows_whole() -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, MAX_PROMPT, 5000)
    trace = Trace(np.arange(5000.0), prompt, prompt + 1)
    shares = {}
    for distribution in DISTRIBUTIONS:
        load = at_rate(drawn(trace, distribution, 2000, rng), 4.0)
        lengths = np.array([one.prompt_tokens for one in load.offered])
        assert load.output == (lengths + 1).tolist()
        assert load.offered[-1].arrived_s == pytest.approx(500.0, rel=0.01)
        shares[distribution] = np.histogram(lengths, 4, (0, MAX_PROMPT))[0] / 2000
    assert shares["average"] == pytest.approx([0.25] * 4, abs=0.05)
    assert shares["central"][1:3].sum() > 0.8
    assert shares["two-end"][1:3].sum() < 0.2
    assert (np.diff(shares["descending"]) < 0).all()
