"""A short run of `tools/fuzz engine` at a real engine."""

from __future__ import annotations

import pytest

from edgemoe.ipc.messages import TO_ENGINE
from tools.fuzzing.fuzz_engine import LARGEST_TIMES, Messages, frame_of, fuzz


def test_the_same_seed_draws_the_same_messages_of_every_kind() -> None:
    one, two = Messages(5), Messages(5)
    drawn = [one.draw() for _ in range(1000)]
    assert repr(drawn) == repr([two.draw() for _ in range(1000)])
    assert TO_ENGINE.messages.keys() - {"Drain", "Stop"} <= {str(body.get("type")) for body in drawn}


def test_the_largest_message_is_found_ahead_of_all() -> None:
    one, two = Messages(5), Messages(5)
    found, coming = one.largest(2000), [two.draw() for _ in range(2000)]
    assert repr([one.draw() for _ in range(2000)]) == repr(coming)
    assert len(frame_of(found)) == max(len(frame_of(body)) for body in coming)


SEEN = {"length", "error invalid_request", "error deadline_exceeded"}


def test_no_message_ends_an_engine_or_changes_others_tokens() -> None:
    seen = fuzz("", 200, seed=1, warm=2 * LARGEST_TIMES)
    assert seen["right"], seen
    assert seen["ends"].keys() >= SEEN, seen


@pytest.mark.slow
def test_no_messages_make_an_engine_grow() -> None:
    seen = fuzz("", 300, seed=1)
    assert seen["ok"], seen
    assert seen["ends"].keys() >= SEEN, seen
