"""What a daemon's events add up to: figures over the last minute, their rates and quantiles, and what boxes show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgemoe.telemetry.metrics import named
from edgemoe.types.arrays import Json

KEPT_S = 62.0
BUCKET = 'le="'


@dataclass(frozen=True, slots=True)
class Reading:
    """All figures at one moment."""

    t: float
    figures: Mapping[str, float]


@dataclass(slots=True)
class Live:
    """Takes events one by one."""

    health: Json = field(default_factory=dict)
    boxes: dict[str, Json] = field(default_factory=dict)
    readings: deque[Reading] = field(default_factory=deque)

    def take(self, name: str, data: Json) -> None:
        """Adds an event."""
        if name == "hello":
            self.readings.clear()
            self.boxes.clear()
        elif name == "state":
            self.health = data.get("health", self.health)
            self.readings.append(Reading(data["t"], {**self.figures, **data["figures"]}))
            while self.readings[0].t < data["t"] - KEPT_S:
                self.readings.popleft()
        elif name == "box":
            self.boxes[data["box"]] = {**self.boxes.get(data["box"], {}), **data}

    @property
    def figures(self) -> Mapping[str, float]:
        """Returns the latest figures."""
        return self.readings[-1].figures if self.readings else {}

    @property
    def requests(self) -> list[tuple[str, Json]]:
        """Returns the requests of all engines that show themselves, each with its box."""
        cluster = self.health.get("cluster")
        here = {member["node"] for member in cluster["members"]} if cluster else {""}
        return [(box, one) for box, shown in self.boxes.items() if box in here for one in shown["requests"]]

    def get(self, family: str, **labels: str) -> float:
        """Returns a figure; 0 where there is none."""
        return self.figures.get(named(family, **labels), 0.0)

    def rate(self, family: str, seconds: float, /, **labels: str) -> float:
        """Returns by how much a counter grows in a second; 0 across a restart."""
        name = named(family, **labels)
        before, after = self._span(seconds)
        if before is None or after is None:
            return 0.0
        return max(0.0, after.figures.get(name, 0.0) - before.figures.get(name, 0.0)) / (after.t - before.t)

    def quantile(self, family: str, share: float) -> float | None:
        """Returns a quantile of what a histogram got in the last minute; None where it got nothing."""
        before, after = self._span(60.0)
        if before is None or after is None:
            return None
        buckets = sorted(
            (float(name.partition(BUCKET)[2].partition('"')[0]), value - before.figures.get(name, 0.0))
            for name, value in after.figures.items()
            if name.startswith(f"{family}_bucket{{")
        )
        if not buckets or buckets[-1][1] <= 0:
            return None
        low, below, wanted = 0.0, 0.0, share * buckets[-1][1]
        for bound, count in buckets:
            if count >= wanted:
                return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low

    def _span(self, seconds: float) -> tuple[Reading | None, Reading | None]:
        if len(self.readings) < 2:
            return None, None
        after = self.readings[-1]
        before = next(one for one in self.readings if one.t >= after.t - seconds - 0.1)
        return (before, after) if before is not after else (self.readings[-2], after)


def model_of(health: Json) -> dict[str, Any]:
    """Returns what is known of the served model."""
    return health.get("model") or {}
