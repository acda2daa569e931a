"""Checks the engines' logs of their pins: no plan drops a last copy, and a dead box's experts are pinned again.

Events: pins {experts}, pinned and verified; pins dropped {experts}, by a plan; engine started, without any pins. A
killed engine's copies count until its box logs again, for another box may drop its own in that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

PINS, DROPPED, STARTED = "pins", "pins dropped", "engine started"
DIED = "died"  # put in at the time of a known death
Event = dict[str, Any]
Logs = Mapping[str, Sequence[Event]]  # box -> events


def lost_pins(logs: Logs) -> list[tuple[float, str, list[int]]]:
    """Returns the time, box and experts of dropped last copies."""
    lost: list[tuple[float, str, list[int]]] = []
    for when, box, pins, dropped in _replayed(logs):
        if last := dropped & ~_others(pins, box):
            experts = [at for at in range(last.bit_length()) if last >> at & 1]
            lost.append((when.timestamp(), box, experts))
    return lost


def homeless(logs: Logs, at: datetime, died: str = "") -> tuple[int, float | None]:
    """Returns the number of experts pinned nowhere at that moment, after a death, and the seconds until all are
    again.

    Only experts that were pinned before count. The seconds are None if the logs end before.
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
    """Yields each event's time and box, all boxes' pins after it, and the pins that a plan made the box drop."""
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
