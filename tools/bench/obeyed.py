"""Whether what the boxes obeyed fits together, by what each of them logged when it obeyed.

leader   {node, epoch}               this box obeys that one, from now on, in that epoch
leading  {epoch}                     this box leads
plan     {version, digest, leading}  this box goes by that plan, in the name of that epoch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = dict[str, Any]


def broken(logs: Mapping[str, Sequence[Event]]) -> list[str]:
    """What contradicts one leader per epoch, epochs that never fall on any box, one plan per version; box -> events."""
    leaders: dict[int, tuple[str, str]] = {}  # epoch -> who, by whose log
    plans: dict[int, tuple[str, str]] = {}  # version -> digest, by whose log
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
