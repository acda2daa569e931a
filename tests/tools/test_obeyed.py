"""The check of box logs finds forbidden leaders and plans."""

from __future__ import annotations

import pytest

from tools.bench.obeyed import Event, broken


def leader(node: str, epoch: int) -> Event:
    return {"event": "leader", "node": node, "epoch": epoch}


def leading(epoch: int) -> Event:
    return {"event": "leading", "epoch": epoch}


def plan(version: int, digest: str, leading: int) -> Event:
    return {"event": "plan", "version": version, "digest": digest, "leading": leading}


SOUND = {
    "a": [leading(1), plan(1, "x", 1), {"event": "ready"}, leader("b", 3), plan(2, "y", 3)],
    "b": [leader("a", 1), plan(1, "x", 1), leading(3), plan(2, "y", 3), leading(3)],
    "c": [leader("b", 3), plan(2, "y", 3), leader("b", 3)],
}


def test_logs_that_fit_together_are_sound() -> None:
    assert broken(SOUND) == []


@pytest.mark.parametrize(
    ("box", "event", "why"),
    [
        ("c", leader("a", 3), "epoch 3 is b on a, a on c"),  # two leaders, obeyed by others
        ("c", leading(3), "epoch 3 is b on a, c on c"),  # ... or by itself
        ("a", leader("a", 1), "a obeyed epoch 1 after 3"),  # a deposed one
        ("b", leading(1), "b obeyed epoch 1 after 3"),
        ("a", plan(2, "y", 1), "a obeyed epoch 1 after 3"),  # a plan of a deposed leader
        ("c", plan(2, "z", 3), "plan 2 is y on a, z on c"),
    ],
)
def test_a_doctored_log_is_found_out(box: str, event: Event, why: str) -> None:
    found = broken(SOUND | {box: [*SOUND[box], event]})
    assert found
    assert any(line.startswith(why) for line in found), found
