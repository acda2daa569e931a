"""A share of the mutated messages that `tools.bench.frames` sends by the million."""

from __future__ import annotations

from tools.bench.frames import attack


def test_no_mutated_message_is_taken_for_one_and_every_one_is_accounted_for() -> None:
    found = attack(20_000, seed=7)
    assert found["alive"]
    assert found["exit"] == 0
    assert found["broken_taken"] == 0
    assert found["rejected"] + found["right_sums_possible"] == found["broken"] + found["right_sums"]
    assert found["rss_mb_late"] < found["rss_mb_early"] + 20
