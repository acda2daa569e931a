"""A short run of what `tools/fuzz engine` sends, at a real engine."""

from __future__ import annotations

from tools.fuzzing.engine import Messages, fuzz


def test_the_same_seed_draws_the_same_messages_of_every_kind() -> None:
    one, two = Messages(5), Messages(5)
    drawn = [one.draw() for _ in range(300)]
    assert repr(drawn) == repr([two.draw() for _ in range(300)])
    assert {"Submit", "Cancel", "Ping", "Reload", "Peers", "Plan"} <= {str(body.get("type")) for body in drawn}


def test_no_message_ends_an_engine_or_changes_what_others_get() -> None:
    seen = fuzz("", 300, seed=1)
    assert seen["ok"], seen
    assert {"length", "error invalid_request", "error deadline_exceeded"} <= seen["ends"].keys(), seen
