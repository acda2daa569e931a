"""The parts of the boxes' reports that decide a placement."""

from __future__ import annotations

import numpy as np
import pytest
from support.reports import report

from edgemoe.cluster.control.messages import LinkReport
from edgemoe.cluster.control.planning.placement_child import solve
from edgemoe.cluster.control.planning.planning_questions import PlacementAnswer, PlacementBox, PlacementQuestion
from edgemoe.policy.placement.problem import Placement
from edgemoe.policy.placement.route_score import RouteScore, score
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import pack_bits, unpack_bits

LAYERS, EXPERTS, TOP_K = 4, 16, 4


def homes(bits: tuple[bytes, ...]) -> BoolArray:
    return np.stack([unpack_bits(each, LAYERS, EXPERTS) for each in bits])


def test_the_longer_an_expert_takes_elsewhere_the_fewer_are_computed_there() -> None:
    """Against more boxes called, which cost the less of a call."""
    rng = np.random.default_rng(0)
    taste = rng.normal(0, 2, (3, 1, LAYERS, EXPERTS))
    scores = taste + rng.gumbel(size=(3, 300, LAYERS, EXPERTS))
    routes = list(np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16))
    whole, none = (pack_bits(np.full((LAYERS, EXPERTS), there)) for there in (True, False))

    def solved(unit_s: float) -> RouteScore:
        links = (LinkReport("x", 0.001, 1e8, unit_s),)
        told = [report(each, EXPERTS, links=links) for each in routes]
        boxes = tuple(
            PlacementBox((room,), whole, none, homes=none, report=each)
            for room, each in zip((24, 24, 40), told, strict=True)
        )
        sizes = (1000,) * LAYERS
        answer = solve(PlacementQuestion(1, "rendezvous", LAYERS, EXPERTS, (EXPERTS,) * LAYERS, sizes, 1, boxes))
        found, disk = homes(answer.homes), homes(answer.disk)
        return score(Placement(found, np.where(found, 0, -1).astype(np.int8), disk), routes)

    fast, slow = solved(1e-6), solved(0.02)
    assert slow.remote_share < 0.95 * fast.remote_share
    assert slow.rendezvous > fast.rendezvous


def test_a_plan_for_a_short_time_moves_little_and_saves_more_than_copying_costs() -> None:
    """By `migration.pays`: copying delays every request that waits for peers."""
    rng = np.random.default_rng(1)
    taste = rng.normal(0, 2, (3, 1, LAYERS, EXPERTS))
    scores = taste + rng.gumbel(size=(3, 300, LAYERS, EXPERTS))
    routes = list(np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16))
    told = [report(each, EXPERTS, links=(LinkReport("x", 0.001, 1e6, 0.0005),)) for each in routes]
    whole, size_bytes = np.ones((LAYERS, EXPERTS), np.bool_), 10_000
    now = [(np.arange(LAYERS * EXPERTS) % 3 == n).reshape(LAYERS, EXPERTS) for n in range(3)]
    rooms = [int(each.sum()) for each in now]
    boxes = tuple(
        PlacementBox((room,), pack_bits(whole), pack_bits(has), pack_bits(has), each)
        for room, has, each in zip(rooms, now, told, strict=True)
    )
    moved, gained = [], []
    for horizon_s in (0.0, 1000.0, 1.0, 0.001):
        asked = PlacementQuestion(
            1, "rendezvous", LAYERS, EXPERTS, (EXPERTS,) * LAYERS, (size_bytes,) * LAYERS, 1, boxes, horizon_s
        )
        answer = solve(asked)
        moved.append(int((homes(answer.homes) & ~np.stack(now)).sum()))
        gained.append(1 - answer.then_s / answer.now_s)
        if horizon_s:
            assert gained[-1] * horizon_s >= moved[-1] * size_bytes / 1e6 - 1e-6
    assert moved[0] > moved[2] > moved[3] == 0
    assert gained[2] > gained[0] * moved[2] / moved[0]


def test_a_plan_is_measured_by_the_same_rule_before_and_after_it_is_in_force() -> None:
    """Experts that no memory holds are served from every disk that has them."""
    rng = np.random.default_rng(2)
    taste = rng.normal(0, 2, (4, 1, LAYERS, EXPERTS))
    scores = taste + rng.gumbel(size=(4, 300, LAYERS, EXPERTS))
    told = [report(np.argsort(-each, axis=2)[..., :TOP_K].astype(np.int16), EXPERTS) for each in scores]
    whole, none = (pack_bits(np.full((LAYERS, EXPERTS), there)) for there in (True, False))

    def solved(policy: str, now: tuple[bytes, ...]) -> PlacementAnswer:
        boxes = tuple(PlacementBox((8,), whole, none, has, each) for has, each in zip(now, told, strict=True))
        sizes = (1000,) * LAYERS
        return solve(PlacementQuestion(1, policy, LAYERS, EXPERTS, (EXPERTS,) * LAYERS, sizes, 1, boxes, 300.0))

    first = solved("uniform", (none,) * 4)
    better = solved("rendezvous", first.homes)
    again = solved("rendezvous", better.homes)
    assert again.now_s == pytest.approx(better.then_s)
    assert better.then_s < better.now_s


@pytest.mark.parametrize("policy", ["rendezvous", "gimbal", "prism", "uniform"])
def test_an_expert_that_is_nowhere_has_the_answer_say_so(policy: str) -> None:
    rng = np.random.default_rng(3)
    scores = rng.gumbel(size=(2, 100, LAYERS, EXPERTS))
    told = [report(np.argsort(-each, axis=2)[..., :TOP_K].astype(np.int16), EXPERTS) for each in scores]
    there = np.ones((LAYERS, EXPERTS), np.bool_)
    there[1, 3] = False
    none = pack_bits(np.zeros((LAYERS, EXPERTS), np.bool_))
    boxes = tuple(PlacementBox((40,), pack_bits(there), none, none, each) for each in told)
    sizes = (1000,) * LAYERS
    answer = solve(PlacementQuestion(1, policy, LAYERS, EXPERTS, (EXPERTS,) * LAYERS, sizes, 1, boxes))
    assert (
        "1 experts are neither on disk nor in memory of any box; the first is expert 3 of layer 1" in answer.infeasible
    )
