"""Routing to the least loaded engine."""

from __future__ import annotations

import pytest

from edgemoe.policy.routing.least_loaded import Rule, TargetLoad, route


def load(place: str, requests: int, here: bool = False, slots: int = 2, capacity: int = 4) -> TargetLoad:
    return TargetLoad(place, here, requests, slots, capacity)


@pytest.mark.parametrize("rule", ["local", "least"])
def test_an_engine_that_is_full_gets_nothing(rule: Rule) -> None:
    full = [load("here", 4, here=True), load("there", 4)]
    assert route(full, rule) == ""
    assert route([*full, load("other", 3)], rule) == "other"
    assert route([], rule) == ""


def test_local_stays_here_while_there_is_room_and_spread_goes_where_the_least_wait() -> None:
    loads = [load("here", 3, here=True), load("there", 2, slots=4), load("other", 2)]
    assert route(loads, "local") == "here"
    assert route(loads, "least") == "there"


def test_among_equals_this_box_is_first_and_then_the_name_decides() -> None:
    assert route([load("a", 1), load("z", 1, here=True)], "least") == "z"
    assert route([load("b", 1), load("a", 1)], "least") == "a"
    assert route([load("a", 1, slots=0, capacity=2), load("b", 2, slots=4)], "least") == "b"
