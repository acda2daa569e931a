"""What is known of a request that is offered to the leader, and what its front does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RouteChoice(NamedTuple):
    """Where a request is to go: NODE:BOOT, or "" where others must say; and why there. Or it `waits`."""

    place: str
    why: str
    waits: bool = False


@dataclass(slots=True, eq=False)
class OpenOffer:
    """What has become of an offer."""

    request: str
    number: int
    reign: tuple[str, int]  # of the leader that has it
    until_s: float
    here: bool = False  # our engine could start at once
    place: str = ""  # that was granted
    why: str = ""  # that place
    over: str = ""  # why it does not stand any more
    used: bool = False  # the request went where it was granted
