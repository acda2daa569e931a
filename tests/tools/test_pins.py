"""Pins in the engines' logs show a last copy that was released, and the time to new homes after a death."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tools.bench.faults import homes
from tools.bench.pins import Event, homeless, lost_pins


def at(second: int, event: str, experts: int = 0) -> Event:
    return {"time": f"2026-01-01T00:00:{second:02}+00:00", "event": event, "experts": bytes([experts]).hex()}


def test_a_copy_that_another_box_has_may_be_dropped() -> None:
    logs = {"a": [at(1, "pins", 0b111), at(3, "pins dropped", 0b011)], "b": [at(2, "pins", 0b011)]}
    assert lost_pins(logs) == []


def test_the_last_copy_may_not() -> None:
    logs = {"a": [at(1, "pins", 0b111), at(3, "pins dropped", 0b101)], "b": [at(2, "pins", 0b011)]}
    assert [(box, experts) for _, box, experts in lost_pins(logs)] == [("a", [2])]


def test_dropped_pins_and_pins_of_an_ended_engine_are_gone() -> None:
    dropped = {
        "a": [at(1, "pins", 1), at(3, "pins dropped", 1)],
        "b": [at(1, "pins", 1), at(4, "pins dropped", 1)],
    }
    assert [box for _, box, _ in lost_pins(dropped)] == ["b"]
    started = {"a": [at(1, "pins", 1), at(2, "engine started")], "b": [at(1, "pins", 1), at(3, "pins dropped", 1)]}
    assert [box for _, box, _ in lost_pins(started)] == ["b"]


def test_a_dead_box_s_experts_are_homeless_until_others_have_pinned_them() -> None:
    logs = {
        "a": [at(1, "pins", 0b0111), at(4, "forwarded"), at(9, "engine started")],
        "b": [at(1, "pins", 0b1001), at(5, "pins", 0b1011), at(7, "pins", 0b1111), at(8, "pins", 0b1110)],
    }
    moment = datetime(2026, 1, 1, 0, 0, 3, tzinfo=UTC)
    assert homeless(logs, moment, died="a") == (2, 4.0)
    assert homeless(logs, moment) == (0, 0.0)
    assert homeless({**logs, "b": logs["b"][:2]}, moment, died="a") == (2, None)


def test_it_has_a_home_again_where_its_own_box_comes_back() -> None:
    logs = {"a": [at(1, "pins", 3), at(3, "engine started"), at(6, "pins", 2)], "b": [at(1, "pins", 1)]}
    moment = datetime(2026, 1, 1, 0, 0, 2, tzinfo=UTC)
    assert homeless(logs, moment, died="a") == (1, pytest.approx(4.0))


def test_the_table_counts_dead_experts_and_the_time_to_new_homes() -> None:
    killed = {"way": "kill", "drops": 3, "homeless": 5, "again_s": 7.25, "homes_s": 1.0}
    lines = list(homes([killed, killed | {"again_s": None}, {**killed, "way": "cut", "homeless": 0, "homes_s": 2.0}]))
    assert "(cut 1, kill 2): 9 times" in lines[0]
    assert "of 10 experts died in 2 trials; all had one again after 7.2 / 7.2 s" in lines[1]
    assert lines[2] == "in 1 of them."
    assert lines[3].endswith("2.0 s.")
