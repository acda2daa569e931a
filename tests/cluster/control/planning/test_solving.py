"""What a placement is made by, of all that boxes report."""

from __future__ import annotations

import numpy as np
from support.reports import report

from edgemoe.cluster.control.planning.messages import PlacementQuestion, QuestionedBox
from edgemoe.cluster.control.planning.solving import solve
from edgemoe.cluster.rpc.control_messages import LinkReport
from edgemoe.policy.placement.problem import Placement
from edgemoe.policy.placement.score import RouteScore, score
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
            QuestionedBox((room,), whole, none, homes=none, report=each)
            for room, each in zip((24, 24, 40), told, strict=True)
        )
        sizes = (1000,) * LAYERS
        answer = solve(PlacementQuestion(1, "rendezvous", LAYERS, EXPERTS, (EXPERTS,) * LAYERS, sizes, 1, 0.0, boxes))
        found, disk = homes(answer.homes), homes(answer.disk)
        return score(Placement(found, np.where(found, 0, -1).astype(np.int8), disk), routes)

    fast, slow = solved(1e-6), solved(0.02)
    assert slow.remote_share < 0.95 * fast.remote_share
    assert slow.rendezvous > fast.rendezvous


def test_a_plan_for_a_short_time_moves_little_and_saves_more_than_copying_costs() -> None:
    """By `migration.pays`: what is copied keeps all waiting who wait for peers."""
    rng = np.random.default_rng(1)
    taste = rng.normal(0, 2, (3, 1, LAYERS, EXPERTS))
    scores = taste + rng.gumbel(size=(3, 300, LAYERS, EXPERTS))
    routes = list(np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16))
    told = [report(each, EXPERTS, links=(LinkReport("x", 0.001, 1e6, 0.0005),)) for each in routes]
    whole, size_bytes = np.ones((LAYERS, EXPERTS), np.bool_), 10_000
    now = [(np.arange(LAYERS * EXPERTS) % 3 == n).reshape(LAYERS, EXPERTS) for n in range(3)]
    rooms = [int(each.sum()) for each in now]
    boxes = tuple(
        QuestionedBox((room,), pack_bits(whole), pack_bits(has), pack_bits(has), each)
        for room, has, each in zip(rooms, now, told, strict=True)
    )
    moved, gained = [], []
    for horizon_s in (0.0, 1000.0, 1.0, 0.001):
        asked = PlacementQuestion(
            1, "rendezvous", LAYERS, EXPERTS, (EXPERTS,) * LAYERS, (size_bytes,) * LAYERS, 1, 0.0, boxes, horizon_s
        )
        answer = solve(asked)
        moved.append(int((homes(answer.homes) & ~np.stack(now)).sum()))
        gained.append(1 - answer.then_s / answer.now_s)
        if horizon_s:
            assert gained[-1] * horizon_s >= moved[-1] * size_bytes / 1e6 - 1e-6
    assert moved[0] > moved[2] > moved[3] == 0
    assert gained[2] > gained[0] * moved[2] / moved[0]
