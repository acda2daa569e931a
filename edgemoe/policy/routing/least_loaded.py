"""Which engine a request goes to: a pure choice from a table of loads. Finer rules take the place of these two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Rule = Literal["local", "least"]


class TargetLoad(NamedTuple):
    """An engine that takes requests."""

    place: str
    here: bool  # on the box that asks
    requests: int  # running and waiting
    slots: int  # that run at once
    capacity: int  # that may be there, waiting ones included
    step_s: float = 0.0  # that a decode step takes there; 0 while it is not known


def node_of(place: str) -> str:
    """Returns the box whose engine NODE:BOOT names; "" of our own, which BOOT names. A boot may have colons in it."""
    node, colon, _ = place.partition(":")
    return node if colon else ""


def route(loads: Sequence[TargetLoad], rule: Rule) -> str:
    """Returns the place of an engine for a request; "" if no engine has room.

    "local" takes this box's engine while that has room. Otherwise, and for "least", the engine with the fewest requests
    per slot is taken; among equals, this box's.
    """
    free = [load for load in loads if load.requests < load.capacity]
    if rule == "local" and (own := [load for load in free if load.here]):
        return own[0].place
    best = min(free, key=lambda load: (load.requests / max(1, load.slots), not load.here, load.place), default=None)
    return best.place if best is not None else ""
