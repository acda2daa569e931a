"""Whether any plan had a box drop the last pinned copy of an expert, by what the engines logged of their pins.

pins           {experts}  this engine has these pinned and verified
pins dropped   {experts}  a plan had it give up these
engine started            whatever its box had pinned is gone

A copy of an engine that was killed counts until its box logs again: that a box gives up what another one had a moment
ago is no command's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

Event = dict[str, Any]


def lost_pins(logs: Mapping[str, Sequence[Event]]) -> list[tuple[float, str, list[int]]]:
    """Returns when which box gave up the last pinned copies, and of which experts; box -> events."""
    pins = dict.fromkeys(logs, 0)
    lost: list[tuple[float, str, list[int]]] = []
    merged = sorted((event["time"], box, n) for box, events in logs.items() for n, event in enumerate(events))
    for _, box, n in merged:
        event = logs[box][n]
        match event["event"]:
            case "pins":
                pins[box] = _bits(event)
            case "pins dropped":
                others = 0
                for other, held in pins.items():
                    others |= held if other != box else 0
                if last := _bits(event) & ~others:
                    experts = [at for at in range(last.bit_length()) if last >> at & 1]
                    lost.append((datetime.fromisoformat(event["time"]).timestamp(), box, experts))
                pins[box] &= ~_bits(event)
            case "engine started":
                pins[box] = 0
    return lost


def _bits(event: Event) -> int:
    return int.from_bytes(bytes.fromhex(event["experts"]), "little")
