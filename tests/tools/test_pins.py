"""The check of what engines pinned finds a last copy that was given up."""

from __future__ import annotations

from tools.bench.pins import Event, lost_pins


def at(second: int, event: str, experts: int = 0) -> Event:
    return {"time": f"2026-01-01T00:00:{second:02}+00:00", "event": event, "experts": bytes([experts]).hex()}


def test_a_copy_that_another_box_has_may_be_dropped() -> None:
    logs = {"a": [at(1, "pins", 0b111), at(3, "pins dropped", 0b011)], "b": [at(2, "pins", 0b011)]}
    assert lost_pins(logs) == []


def test_the_last_copy_may_not() -> None:
    logs = {"a": [at(1, "pins", 0b111), at(3, "pins dropped", 0b101)], "b": [at(2, "pins", 0b011)]}
    assert [(box, experts) for _, box, experts in lost_pins(logs)] == [("a", [2])]


def test_what_was_dropped_and_what_an_ended_engine_had_are_there_no_more() -> None:
    dropped = {
        "a": [at(1, "pins", 1), at(3, "pins dropped", 1)],
        "b": [at(1, "pins", 1), at(4, "pins dropped", 1)],
    }
    assert [box for _, box, _ in lost_pins(dropped)] == ["b"]
    started = {"a": [at(1, "pins", 1), at(2, "engine started")], "b": [at(1, "pins", 1), at(3, "pins dropped", 1)]}
    assert [box for _, box, _ in lost_pins(started)] == ["b"]
