"""What the engines logged of their pins: whether any plan had a box drop a last copy, and when all have one again.

pins           {experts}  this engine has these pinned and verified
pins dropped   {experts}  a plan had it give up these
engine started            whatever its box had pinned is gone

A copy of an engine that was killed counts until its box logs again: that a box gives up what another one had a moment
ago is no command's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

PINS, DROPPED, STARTED = "pins", "pins dropped", "engine started"
DIED = "died"  # put in where it is known
Event = dict[str, Any]
Logs = Mapping[str, Sequence[Event]]  # box -> events


def lost_pins(logs: Logs) -> list[tuple[float, str, list[int]]]:
    """Returns when which box gave up the last pinned copies, and of which experts."""
    lost: list[tuple[float, str, list[int]]] = []
    for when, box, pins, dropped in _replayed(logs):
        if last := dropped & ~_others(pins, box):
            experts = [at for at in range(last.bit_length()) if last >> at & 1]
            lost.append((when.timestamp(), box, experts))
    return lost


def homeless(logs: Logs, at: datetime, died: str = "") -> tuple[int, float | None]:
    """Returns how many experts were pinned nowhere at that moment, when a box may have died, and for how many seconds.

    Counts those that were ever pinned. The seconds are None where the logs end before.
    """
    if died:
        logs = {**logs, died: [*logs[died], {"time": at.isoformat(), "event": DIED}]}
    held = [(when, _others(pins)) for when, _, pins, _ in _replayed(logs)]
    every = reduce(or_, (pinned for _, pinned in held), 0)
    lacking = [(when, every & ~pinned) for when, pinned in held]
    count = next((lacks for when, lacks in reversed(lacking) if when <= at), every).bit_count()
    again = [when for when, lacks in lacking if when > at and not lacks] if count else [at]
    return count, round((again[0] - at).total_seconds(), 2) if again else None


def _others(pins: Mapping[str, int], box: str = "") -> int:
    return reduce(or_, (held for other, held in pins.items() if other != box), 0)


def _replayed(logs: Logs) -> Iterator[tuple[datetime, str, dict[str, int], int]]:
    """Yields of each event its time and box, what all boxes have pinned after it, and what a plan had it give up."""
    pins = dict.fromkeys(logs, 0)
    merged = sorted(
        (datetime.fromisoformat(event["time"]), box, n)
        for box, events in logs.items()
        for n, event in enumerate(events)
        if event["event"] in (PINS, DROPPED, STARTED, DIED)
    )
    for when, box, n in merged:
        event, dropped = logs[box][n], 0
        if event["event"] == PINS:
            pins[box] = _bits(event)
        elif event["event"] == DROPPED:
            dropped = _bits(event)
            pins[box] &= ~dropped
        else:
            pins[box] = 0
        yield when, box, dict(pins), dropped


def _bits(event: Event) -> int:
    return int.from_bytes(bytes.fromhex(event["experts"]), "little")
