"""Decode workers take the time of their distinct experts, and the study shows the gain by expert-aware routing."""

from __future__ import annotations

import numpy as np
import pytest

from tools.research.routing.prompt_parts import LAST, study
from tools.research.routing.routing_eldr import pool_study
from tools.research.routing.routing_plots import by_policy, by_rate
from tools.research.routing.routing_residency import table
from tools.research.simulate.decode_pool import DecodeCosts, DecodePool, DecodeRequests
from tools.research.simulate.decode_study import fitted, outcome
from tools.research.simulate.decode_traffic import Source, Traffic, counted, scene_of

LAYERS, EXPERTS, TOP_K = 2, 16, 2
COSTS = DecodeCosts(step_s=1.0, token_s=0.1, expert_s=0.01, experts=EXPERTS)


def routes(*tokens: list[list[int]]) -> np.ndarray:
    return np.array(tokens, np.int16)


def sources(count: int, seed: int = 0) -> list[Source]:
    """Draws sources, half of them with the lower experts, half with the upper ones."""
    rng = np.random.default_rng(seed)
    answer = []
    for n in range(count):
        low = n % 2 * EXPERTS // 2
        ids = np.array(
            [[rng.permutation(EXPERTS // 2)[:TOP_K] + low for _ in range(LAYERS)] for _ in range(60)], np.int16
        )
        prompt, rest = ids[:30], ids[30:]
        parts = [counted(part, EXPERTS) for part in (prompt, rest, prompt[-4:])]
        answer.append(Source("upper" if low else "lower", parts[0], 30, rest, parts[1], parts[2]))
    return answer


def test_a_step_takes_its_distinct_experts_time_and_newcomers_wait_for_the_next() -> None:
    one = routes([[0, 1], [0, 1]], [[0, 1], [0, 1]])
    two = routes([[0, 2], [4, 5]])
    requests = DecodeRequests(np.array([0.0, 0.5]), np.array([0, 1]), [one, two])
    met = DecodePool(requests, 1, 4, COSTS).run(lambda request, room, running, now_s: 0)
    first, both = 1 + 0.1 + 0.04, 1 + 0.2 + 0.01 * (3 + 4)
    assert met.tpot_s == pytest.approx([(first + both) / 2, both])
    assert met.wait_s == pytest.approx([0.0, first - 0.5])
    assert met.active == pytest.approx([(2 + 3.5) / 2, 3.5])
    assert met.batch == pytest.approx([1.5, 2.0])


def test_more_of_a_prompt_says_more_of_its_cluster_and_all_of_it_everything() -> None:
    """Sequences keep their experts, except for their first tokens."""
    rng = np.random.default_rng(0)
    sequences = []
    for n in range(48):
        own = rng.permutation(EXPERTS)[:4]
        ids = np.array([[rng.permutation(own)[:TOP_K] for _ in range(LAYERS)] for _ in range(256)], np.int16)
        ids[:32] = rng.integers(0, EXPERTS, (32, LAYERS, TOP_K))
        sequences.append((f"domain {n % 3}", ids))
    found = study(sequences, EXPERTS, drawn=2)
    like = [found[share]["like decoding"] for share in ("0.125", "0.5", "1")]
    assert like == sorted(like)
    assert found["1"]["in band"] == 1.0
    assert found[LAST]["like decoding"] < found["0.5"]["like decoding"], "domains have nothing in common here"


def test_two_requests_of_one_source_never_meet() -> None:
    scene = scene_of(sources(30), COSTS, Traffic(workers=2, batch=6, slots=8, requests=200))
    running: list[set[int]] = [set(), set()]

    def choose(request: int, room: np.ndarray, number: np.ndarray, now_s: float) -> int:
        worker = int(np.flatnonzero(room)[0])
        assert scene.requests.source[request] not in {scene.requests.source[n] for n in running[worker]}
        running[worker].add(request)
        assert len(running[worker]) <= scene.traffic.slots
        return worker

    pool = DecodePool(scene.requests, 2, scene.traffic.slots, COSTS)
    met = pool.run(choose, lambda request, worker: running[worker].remove(request))
    assert running == [set(), set()]
    assert (met.tpot_s > 0).all()
    assert {id(each) for each in scene.recorded}.isdisjoint({id(each) for each in scene.sources})
    assert outcome("JSQ", fitted(scene)).spread < 1.2


def test_routing_by_experts_loads_fewer_and_by_others_signatures_no_fewer() -> None:
    traffic = Traffic(workers=4, batch=5, slots=8, requests=300)
    rows = {row["policy"]: row for row in pool_study(sources(60), COSTS, traffic, seeds=range(1))}
    gained = {name: -row["experts/jsq"] for name, row in rows.items()}
    assert min(gained[name] for name in ("domain", "ELDR", "union")) > 10
    assert gained["union, no clusters"] > 5
    assert max(gained[name] for name in ("ELDR, placebo", "union, placebo")) < 3


@pytest.mark.parametrize("how", ["by domain", "by chance"])
def test_with_residency_a_policy_spends_less_on_experts_not_in_place(how: str) -> None:
    rows = {row["policy"]: row for row in table(sources(60), COSTS, how, 8.0, range(1))}
    assert rows["union"]["p50/jsq"] < rows["union, unaware"]["p50/jsq"] - (10 if how == "by domain" else 0)


def test_plots_show_every_policy_of_a_study() -> None:
    rows = pool_study(sources(60), COSTS, Traffic(workers=2, batch=4, slots=6, requests=60), seeds=range(2))
    drawn = by_policy({"model": {"8 workers, batch 8": rows}})
    assert [len(axes.patches) for axes in drawn.axes] == [len(rows)] * 3
    policies = ("SJF, 5 s", "algorithm 1", "Gimbal", "join shortest queue", "least requests", "pull")
    some = [{"policy": name, "ttft_mean_s_change": "-1.0 ± 0.5"} for name in policies]
    found = {f"lengths random, {kv} KV, {rate}% of 9": some for kv in ("ample", "tight") for rate in (80, 100)}
    drawn = by_rate({"fit": {}, **found})
    assert [len(axes.containers) for axes in drawn.axes] == [len(policies)] * 2
