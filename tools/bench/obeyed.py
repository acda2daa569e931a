"""Checks in the boxes' logs that all leaders and plans that they obeyed are consistent.

"leader {node, epoch}": this box obeys that leader from now on. "leading {epoch}": this box leads. "plan {version,
digest, leading}": this box uses that plan, made in that epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = dict[str, Any]


def broken(logs: Mapping[str, Sequence[Event]]) -> list[str]:
    """Returns contradictions: two leaders of an epoch, a falling epoch, two plans of a version; box -> events."""
    leaders: dict[int, tuple[str, str]] = {}  # epoch -> leader, box of the log
    plans: dict[int, tuple[str, str]] = {}  # version -> digest, box of the log
    found: list[str] = []
    for box, events in logs.items():
        highest = 0
        for event in events:
            for epoch in _epochs(event):
                if epoch < highest:
                    found.append(f"{box} obeyed epoch {epoch} after {highest}: {event}")
                highest = max(highest, epoch)
            if event["event"] in ("leader", "leading"):
                said = (event.get("node", box), box)
                found += _differs(leaders, event["epoch"], said, "epoch")
            if event["event"] == "plan":
                found += _differs(plans, event["version"], (event["digest"], box), "plan")
    return found


def _epochs(event: Event) -> Iterator[int]:
    if event["event"] in ("leader", "leading"):
        yield event["epoch"]
    if event["event"] == "plan":
        yield event["leading"]


def _differs(known: dict[int, tuple[str, str]], key: int, said: tuple[str, str], what: str) -> list[str]:
    first = known.setdefault(key, said)
    return [] if first[0] == said[0] else [f"{what} {key} is {first[0]} on {first[1]}, {said[0]} on {said[1]}"]
