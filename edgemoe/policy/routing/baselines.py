"""What routing policies are compared with. All place every offer at once; none has anything to do with its size."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
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


class Anywhere:
    """Chooses by chance."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        return self._random.choice(open_)


class BetterOfTwo:
    """Chooses two by chance and takes the one with fewer requests: power of two choices."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        return fewest(offered, self._random.sample(open_, min(2, len(open_))), now_s)


class ByLabel:
    """Sends each request to the engines of its label, the one with fewer requests: the domain oracle.

    `engines_of` gives the places that a request's label has; where they are full, any is taken.
    """

    def __init__(self, engines_of: dict[str, frozenset[str]]) -> None:
        self._engines_of = engines_of  # request -> places

    def __call__(self, offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
        own = [view for view in open_ if view.place in self._engines_of.get(offered.request, ())]
        return fewest(offered, own or open_, now_s)


def fewest(offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
    """Returns the engine with the fewest requests for each that it runs at once: join the shortest queue."""
    return min(open_, key=lambda view: (view.requests / max(1, view.slots), view.place))


def least_requests(offered: Offered, open_: Sequence[EngineView], now_s: float) -> EngineView:
    """Returns the engine with the least score, in which a waiting request weighs four times: vLLM's own router."""
    return min(open_, key=lambda view: (WAITING_WEIGHT * view.waiting + view.running, view.place))


WAITING_WEIGHT = 4  # vllm/v1/engine/core_client.py, DPLBAsyncMPClient.get_core_engine_for_request
