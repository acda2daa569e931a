"""What routing policies are compared with. All place every offer at once; none has anything to do with its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgemoe.policy.routing.offers import Assignment, EngineView, Offered, with_offer


class Chooser(Protocol):
    """Chooses one engine of those that are not full."""

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView: ...


class Push:
    """Places offers one by one, in order of arrival, each where `choose` says."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose

    def takes(self, views: Sequence[EngineView]) -> bool:
        """Returns whether an engine is not full."""
        return any(view.requests < view.capacity for view in views)

    def assign(self, offers: Sequence[Offered], views: Sequence[EngineView], now_s: float) -> list[Assignment]:
        """Returns an engine for each offer, while any has room."""
        there = {view.place: view for view in views}
        answer = []
        for offered in offers:
            open_ = [view for view in there.values() if view.requests < view.capacity]
            if not open_:
                break
            chosen = self._choose(offered, open_, now_s)
            there[chosen.place] = with_offer(chosen, offered)
            answer.append(Assignment(offered.request, chosen.place))
        return answer


class Turns:
    """Chooses engines in turn, by name: round robin."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        chosen = min(open_, key=lambda view: (view.place <= self._last, view.place))
        self._last = chosen.place
        return chosen


def fewest(offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
    """Returns the engine with the fewest requests for each that it runs at once: join the shortest queue."""
    return min(open_, key=lambda view: (view.requests / max(1, view.slots), view.place))
