"""A short run of `tools/fuzz http` at the real application and engine."""

from __future__ import annotations

from tools.fuzzing.http import WHATS, Bodies, fuzz


def test_the_same_seed_draws_the_same_bodies_for_every_endpoint() -> None:
    one, two = Bodies(5), Bodies(5)
    drawn = [one.draw() for _ in range(200)]
    assert drawn == [two.draw() for _ in range(200)]
    assert len({path for path, _ in drawn}) == len(WHATS)


def test_no_body_ends_a_daemon_or_is_answered_otherwise_than_documented() -> None:
    seen = fuzz("", 600, seed=3)
    assert not seen["complaints"], seen["complaints"]
    assert (seen["alive"], seen["answered_after"]) == (True, True)
    answered = {path_status.split()[0] for path_status in seen["statuses"] if path_status.endswith(" 200")}
    assert "/infill" not in answered  # the demo's tokenizer has no marks for it
    assert len(answered) == len(WHATS) - 1, seen["statuses"]
