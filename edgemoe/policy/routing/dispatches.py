"""Corrects what engines last said of themselves by what has been dispatched to them since.

A router that goes by reports half a second old sends everything to whoever was idle half a second ago, and loses all
that its policy gains. A dispatch counts until a report names it as taken, or FORGET_S have passed without one.
"""

from __future__ import annotations

from functools import reduce

from edgemoe.policy.routing.offers import EngineView, Offered, with_offer

FORGET_S = 5.0


class Dispatches:
    """Owns reports, and the dispatches that they do not count yet."""

    def __init__(self) -> None:
        self._reports: dict[str, EngineView] = {}
        self._since: dict[str, dict[str, tuple[float, Offered]]] = {}  # place -> request -> when, what
        self._views: dict[str, EngineView] = {}  # of engines of which nothing has changed since they were asked for

    def hear(self, view: EngineView) -> None:
        """Takes a report; its `reported_s` is when it came."""
        self._reports[view.place] = view
        self._views.pop(view.place, None)
        since = self._since.setdefault(view.place, {})
        for request, (sent_s, _) in list(since.items()):
            if request in view.taken or view.reported_s - sent_s > FORGET_S:
                del since[request]

    def dispatch(self, offered: Offered, place: str, now_s: float) -> None:
        """Counts a request that is on its way to an engine."""
        self._since.setdefault(place, {})[offered.request] = (now_s, offered)
        self._views.pop(place, None)

    def withdraw(self, request: str) -> None:
        """Counts no longer a request that was turned away, or has ended."""
        for place, since in self._since.items():
            if since.pop(request, None) is not None:
                self._views.pop(place, None)

    def forget(self, place: str) -> None:
        """Knows no longer of an engine that is gone."""
        self._reports.pop(place, None)
        self._since.pop(place, None)
        self._views.pop(place, None)

    def views(self) -> list[EngineView]:
        """Returns how every engine is thought to be now, in order of their names."""
        return [self._view(place) for place in sorted(self._reports)]

    def _view(self, place: str) -> EngineView:
        if place not in self._views:
            sent = (offered for _, offered in self._since[place].values())
            self._views[place] = reduce(with_offer, sent, self._reports[place])
        return self._views[place]
