"""Which homes are fetched now: at once what has no other home, the rest no faster than the owner says.

What a migration moves is at home elsewhere until it has arrived here. So it can wait, and calls between boxes go first:
it comes by the expert, evenly, and takes a small part of what the links carry.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgemoe.types.arrays import BoolArray
from edgemoe.types.experts import ExpertId
from edgemoe.types.placement import PlacementPlan

TURN_S = 0.1  # between turns while something is held back
LINK_SHARE = 0.125  # of what links carry, that moves may take
LONGEST_S = 10.0  # that an expert's bytes are saved up for, however slow the links


class HomeMoves:
    """Holds back homes that others have, by bytes a second. One owner, one event loop."""

    def __init__(self, bytes_per_s: float, expert_bytes: int, now_s: float) -> None:
        """Holds nothing back where `bytes_per_s` is 0."""
        self._rate, self._bytes = bytes_per_s, expert_bytes
        self._credit, self._since_s = 0.0, now_s
        self._granted: set[ExpertId] = set()
        self._elsewhere: BoolArray | None = None  # [L, E] at home at other boxes too; None: all is fetched at once

    def follow(self, plan: PlacementPlan, node: str, *, first: bool) -> None:
        """Takes note of a plan; of the `first` one since the start all is fetched at once."""
        others = [plan.homes_of(other) for other in plan.nodes if other != node]
        self._elsewhere = np.logical_or.reduce(others) if others and not first else None

    def is_under_way(self, expert: ExpertId) -> bool:
        """Returns whether a home is being fetched that others have."""
        return expert in self._granted

    def turn(self, missing: Sequence[ExpertId], now_s: float, link_bytes_per_s: float) -> list[ExpertId]:
        """Returns those of the missing homes that are to be fetched now."""
        if self._elsewhere is None or not self._rate:
            self._granted = set()
            return list(missing)
        arrived = len(self._granted.difference(missing))
        rate = min(self._rate, max(LINK_SHARE * link_bytes_per_s, self._bytes / LONGEST_S))
        most = max(rate * TURN_S, float(self._bytes))
        gained = rate * (now_s - self._since_s)
        self._credit = min(self._credit - arrived * self._bytes + gained, most)
        self._since_s = now_s
        urgent = [one for one in missing if not self._elsewhere[one]]
        moved = [one for one in missing if self._elsewhere[one]]
        granted = moved[: max(0, int(self._credit // self._bytes))]
        self._granted = set(granted)
        return urgent + granted
