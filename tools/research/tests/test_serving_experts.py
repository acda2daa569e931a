"""Whole simulated engines take the time of their experts, and requests of one source are kept apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionTerm
from edgemoe.policy.routing.offers import PushRouting, WaitingRequest, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from tools.research.simulate.decode_pool import DecodeCosts
from tools.research.simulate.decode_traffic import Source, counted
from tools.research.simulate.serving.cluster import cluster_of, jobs_of
from tools.research.simulate.serving.engine_steps import StepCosts
from tools.research.simulate.serving.expert_times import Apart, experts_s, routed
from tools.research.simulate.serving.simulated_engine import EngineShape
from tools.research.simulate.serving.step_fitting import times_of

pytestmark = pytest.mark.slow  # compiles its own code
LAYERS, EXPERTS, TOP_K = 2, 16, 2
COSTS = DecodeCosts(step_s=1.0, token_s=0.0, expert_s=0.01, experts=EXPERTS)


def source(low: int, tokens: int = 20) -> Source:
    """Builds a source that always chooses the same two experts of each layer."""
    ids = np.full((tokens, LAYERS, TOP_K), [low, low + 1], np.int16)
    return Source("", counted(ids, EXPERTS), tokens, ids, counted(ids, EXPERTS), counted(ids, EXPERTS))


def shape(sources: list[Source]) -> EngineShape:
    return EngineShape(StepCosts(1.0, 0.0, 0.0, 0.0), slots=8, more_s=experts_s, data=routed(sources, COSTS))


def offered(sources: list[Source]) -> list[WaitingRequest]:
    forecast = PromptForecast(TOP_K)
    chances = [forecast.chance(each.prefill) for each in sources]
    return [WaitingRequest(str(n), 10, 0.1 * n, expected_tokens=20.0, chance=each) for n, each in enumerate(chances)]


def test_a_step_loads_all_experts_for_prompts_and_else_its_tokens_choices() -> None:
    sources = [source(0)]
    jobs = jobs_of(offered(sources), [5])
    cluster_of(1, shape(sources), PushRouting(fewest)).serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    assert ttft_s == pytest.approx([1 + 0.01 * LAYERS * EXPERTS])
    assert tpot_s == pytest.approx([1 + 0.01 * LAYERS * TOP_K])


def test_pulling_by_experts_puts_requests_together_that_choose_alike() -> None:
    sources = [source(n % 2 * 8) for n in range(8)]
    policy = PullRouting(PullLimits(crowding=0.0), UnionTerm(DecodeTimes(1.0, 0.01)))
    jobs = jobs_of(offered(sources), [20] * 8)
    cluster_of(2, shape(sources), policy).serve(jobs)
    assert {job.place for job in jobs[::2]}.isdisjoint({job.place for job in jobs[1::2]})


def test_requests_of_one_source_are_kept_apart() -> None:
    sources = [source(0)] * 3
    apart = Apart(PullRouting(PullLimits(crowding=0.0), UnionTerm(DecodeTimes(1.0, 0.01))), sources)
    cluster = cluster_of(2, shape(sources), apart)
    apart.engines = cluster.engines
    jobs = jobs_of(offered(sources), [20] * 3)
    cluster.serve(jobs)
    assert jobs[0].place != jobs[1].place
    assert jobs[2].first_s > min(jobs[0].end_s, jobs[1].end_s)


def test_far_experts_take_longer_and_steps_count_their_tokens_loads() -> None:
    sources = [source(0)]
    far_s = np.zeros((LAYERS, EXPERTS), np.float32)
    far_s[:, 1] = 0.03
    data = routed(sources, COSTS, far_s)
    jobs = jobs_of(offered(sources), [5])
    cluster_of(1, replace(shape(sources), data=data), PushRouting(fewest)).serve(jobs)
    ttft_s, tpot_s = times_of(jobs)
    assert ttft_s == pytest.approx([1 + LAYERS * (0.01 * EXPERTS + 0.03)])
    assert tpot_s == pytest.approx([1 + LAYERS * (0.01 * TOP_K + 0.03)])
    assert data.counted.tolist() == [4, 4 * LAYERS * TOP_K], "the first token is the prompt's"
