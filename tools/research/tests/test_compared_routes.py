"""Routes for comparison place every offer that there is room for; Gimbal's follows its pseudo-code."""

from __future__ import annotations

from random import Random

import pytest

from edgemoe.policy.routing.offers import PushRouting, RoutingTarget, TargetChooser, WaitingRequest
from tools.research.routing.compared_routes import Anywhere, BetterOfTwo, ByLabel, PseudoCodeGimbal, least_requests

OFFER = WaitingRequest("r", 100, 0.0, max_tokens=64, expected_tokens=32.0)
CHOOSERS = [Anywhere(Random(1)), BetterOfTwo(Random(1)), ByLabel({"0": frozenset(["a"])}), least_requests]


def engine(place: str, used: float = 0.0, prefill: int = 0, running: int = 0, waiting: int = 0) -> RoutingTarget:
    return RoutingTarget(
        place, 8, 16, 1000, round(1000 * (1 - used)), running, waiting, prefill_tokens=prefill, tokens_per_s=1000.0
    )


def test_they_choose_as_their_names_say() -> None:
    views = [engine("a", running=5), engine("b", running=1, waiting=3), engine("c", running=8)]
    three = [WaitingRequest(name, 100, 0.0) for name in "xyz"]
    assert [place for _, place in PushRouting(least_requests).assign(three, views, 0.0)] == ["a", "c", "a"]
    assert PushRouting(ByLabel({"x": frozenset("c")})).assign(three, views, 0.0)[0].place == "c"


@pytest.mark.parametrize("choose", CHOOSERS)
def test_offers_go_where_there_is_room_each_once(choose: TargetChooser) -> None:
    views = [engine("a", waiting=14), engine("b", waiting=15), engine("c", waiting=16)]
    offers = [WaitingRequest(str(n), 10, 0.0) for n in range(5)]
    found = PushRouting(choose).assign(offers, views, 0.0)
    assert [one.request for one in found] == ["0", "1", "2"]
    assert sorted(one.place for one in found) == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("views", "place"),
    [
        # KV over the threshold and uneven: the engine with the least of it (lines 5 to 7)
        ([engine("a", 0.95), engine("b", 0.5, prefill=9000)], "b"),
        # over the threshold and even: load decides if it differs by more than a request (lines 9 to 13)
        ([engine("a", 0.95, prefill=4000), engine("b", 0.91)], "b"),
        # KV ample: the text of [Gimbal] uses load here, too, the pseudo-code only turns
        ([engine("a", 0.1, prefill=4000), engine("b", 0.2)], "a"),
        # at the thresholds: usage counts from them on, load only beyond
        ([engine("a", 0.9), engine("b", 0.75)], "b"),
        ([engine("a", 0.5, prefill=3000), engine("b", 0.5)], "a"),
        # over by less than the difference, and load alike: in turn
        ([engine("a", 0.95), engine("b", 0.9)], "a"),
    ],
)
def test_the_pseudo_code_of_algorithm_1_case_by_case(views: list[RoutingTarget], place: str) -> None:
    assert PushRouting(PseudoCodeGimbal()).assign([OFFER], views, 0.0) == [("r", place)]
