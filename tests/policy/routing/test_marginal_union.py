"""Requests go where their experts are in use, or in reach, already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgemoe.policy.routing.eldr import BandChooser
from edgemoe.policy.routing.marginal_union import (
    DecodeTimes,
    PromptForecast,
    UnionChooser,
    UnionTerm,
    engine_step,
)
from edgemoe.policy.routing.offers import PushRouting, RoutingTarget, WaitingRequest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ClusterFit, ExpertClusters, absence
from edgemoe.types.arrays import FloatArray

LAYERS, EXPERTS, TOP_K = 2, 8, 2
FORECAST = PromptForecast(TOP_K)
TIMES = DecodeTimes(step_s=0.01, expert_s=0.001)
LOW, HIGH = (0, 1), (6, 7)


def counts(experts: tuple[int, ...], tokens: int = 200) -> FloatArray:
    found = np.zeros((LAYERS, EXPERTS), np.float32)
    found[:, list(experts)] = tokens * TOP_K / len(experts)
    return found


def offered(experts: tuple[int, ...], name: str = "r", waited_s: float = 0.0) -> WaitingRequest:
    signature = counts(experts)
    return WaitingRequest(
        name, 200, -waited_s, expected_tokens=10.0, signature=signature, chance=FORECAST.chance(signature)
    )


def engine(place: str, *running: tuple[int, ...], slots: int = 4) -> RoutingTarget:
    union = sum((absence(FORECAST.chance(counts(each))) for each in running), np.zeros((LAYERS, EXPERTS), np.float32))
    return RoutingTarget(place, slots, slots, 1000, 1000, running=len(running), union=union, tokens_per_s=1000.0)


def test_a_forecast_goes_by_the_prompt_and_without_one_by_chance() -> None:
    assert FORECAST.chance(np.zeros((LAYERS, EXPERTS))) == pytest.approx(TOP_K / EXPERTS)
    found = FORECAST.chance(counts(LOW))
    assert (found[:, list(LOW)] > 0.85).all()
    assert found.sum(axis=1) == pytest.approx(TOP_K)


def test_a_request_joins_similar_ones_unless_they_are_many() -> None:
    choose = UnionChooser(TIMES)
    alike, other = engine("a", HIGH, HIGH), engine("b", LOW, LOW)
    assert choose(offered(HIGH), [alike, other], 0.0).place == "a"
    assert choose(offered(LOW), [alike, other], 0.0).place == "b"
    assert choose(offered((3, 4)), [engine("a", HIGH, LOW, HIGH), other], 0.0).place == "b"
    assert choose(replace(offered(HIGH), chance=None), [alike, engine("b", LOW)], 0.0).place == "b"


def test_experts_far_from_an_engine_cost_their_fetch() -> None:
    far = np.zeros((LAYERS, EXPERTS), np.float32)
    far[:, list(HIGH)] = 0.05
    away, near = replace(engine("a"), resident=far), engine("b", LOW)
    assert UnionChooser(TIMES)(offered(HIGH), [away, near], 0.0).place == "b"
    assert UnionChooser(TIMES)(offered(LOW), [away, engine("b", HIGH)], 0.0).place == "a"


def test_offers_that_are_placed_together_see_each_other() -> None:
    offers = [offered(each, str(n)) for n, each in enumerate((LOW, HIGH, LOW, HIGH))]
    placed = dict(PushRouting(UnionChooser(TIMES)).assign(offers, [engine("a"), engine("b")], 0.0))
    assert placed["0"] == placed["2"] != placed["1"] == placed["3"]


def test_an_engine_that_does_not_say_counts_as_full_of_different_requests() -> None:
    silent, alike = replace(engine("a", LOW, LOW), union=None), engine("b", LOW, LOW)
    chance = FORECAST.chance(counts(LOW))
    costs = [engine_step(view, chance, TIMES).cost_s(chance) for view in (silent, alike)]
    assert costs[0] > costs[1]


@pytest.mark.parametrize("requests", [0, 1, 4])
def test_a_request_that_chooses_every_expert_costs_a_finite_time(requests: int) -> None:
    view = replace(engine("a"), union=None, running=requests)
    chance = np.ones((LAYERS, EXPERTS), np.float32)
    assert np.isfinite(engine_step(view, chance, TIMES).cost_s(chance))


def test_engines_with_room_take_matching_requests_even_if_they_came_later() -> None:
    policy = PullRouting(PullLimits(), UnionTerm(TIMES))
    full, open_ = engine("a", LOW, LOW, slots=2), engine("b", HIGH, HIGH)
    came = [offered(LOW, "low", waited_s=0.01), offered(HIGH, "high")]
    assert policy.assign(came, [full, open_], 0.0)[0].request == "high"
    aged = [offered(LOW, "low", waited_s=30.0), offered(HIGH, "high")]
    assert policy.assign(aged, [full, open_], 0.0)[0].request == "low"


def test_the_term_is_an_engine_s_cost_for_all_expected_tokens() -> None:
    views = [engine("a", LOW), engine("b", HIGH)]
    once, twice = offered(LOW), replace(offered(LOW), expected_tokens=20.0)
    term = UnionTerm(TIMES)
    found = term([once, twice, replace(once, chance=None)], views)
    assert once.chance is not None
    costs = [engine_step(view, once.chance, TIMES).cost_s(once.chance) for view in views]
    assert found == pytest.approx(np.array([[10 * cost, 20 * cost, 0] for cost in costs]))
    busier = engine("a", LOW, LOW, HIGH)
    assert term([once], [busier])[0, 0] > term([once], views)[0, 0] == found[0, 0]


def test_pulling_without_terms_fills_engines_evenly() -> None:
    offers = [replace(offered(LOW, str(n)), prompt_tokens=1) for n in range(4)]
    views = [replace(engine(place), prefill_tokens=0, tokens_per_s=1e9) for place in "ab"]
    placed = [place for _, place in PullRouting(PullLimits()).assign(offers, views, 0.0)]
    assert sorted(placed) == ["a", "a", "b", "b"]


def test_the_band_knows_engines_by_name() -> None:
    weights = np.ones((LAYERS, EXPERTS), np.float32)
    centroids = np.stack([counts(each).ravel() / np.linalg.norm(counts(each)) for each in (LOW, HIGH)])
    clusters = ExpertClusters(
        weights, centroids, np.zeros((2, LAYERS, EXPERTS), np.float32), ClusterFit(1, 0, np.ones(2, int))
    )
    choose = BandChooser(clusters, ["a", "b"])
    views = [engine("new"), engine("b", LOW, LOW, LOW), engine("a", HIGH)]
    assert choose(offered(LOW), views, 0.0).place == "a"
    assert choose(offered(HIGH), views, 0.0).place == "b"
    assert choose(replace(offered(LOW), signature=None), views, 0.0).place == "new"
