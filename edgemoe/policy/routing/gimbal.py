"""Chooses an engine by KV usage, load and user affinity, at once.

Source: [Gimbal, Algorithm 1], "DP Engine Selection Algorithm", in the order of its text, which looks at load whenever
KV usage is not badly uneven. Load counts the prompt tokens that are not computed yet; the source counts resident tokens
too, which made that order worse than round robin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.policy.routing.offers import RoundRobin, RoutingTarget, WaitingRequest

MAX_USERS = 4096  # remembered; of more, the longest absent is forgotten


@dataclass(frozen=True, slots=True)
class GimbalThresholds:
    """States when engines count as uneven [Gimbal, V-A2], and for how long a user's engine is remembered."""

    kv_usage: float = 0.9
    kv_difference: float = 0.1
    load_tokens: int = 3000
    affinity_s: float = 600.0


DEFAULTS = GimbalThresholds()


class UserPlaces:
    """Owns which engine each user's requests went to last, for so long."""

    def __init__(self, affinity_s: float) -> None:
        self._affinity_s = affinity_s
        self._known = OrderedDict[str, tuple[str, float]]()  # user -> place, and when

    def place(self, user: str, now_s: float) -> str:
        """Returns the engine; "" where none is remembered, or nobody's request is asked about."""
        place, when_s = self._known.get(user, ("", now_s))
        return place if now_s - when_s <= self._affinity_s else ""

    def note(self, user: str, place: str, now_s: float) -> None:
        """Remembers the engine to which a request of the user goes."""
        if not user:
            return
        self._known[user] = place, now_s
        self._known.move_to_end(user)
        if len(self._known) > MAX_USERS:
            self._known.popitem(last=False)


class GimbalChooser:
    """Evens out KV usage and load, and keeps users at their engine."""

    def __init__(self, thresholds: GimbalThresholds = DEFAULTS) -> None:
        self._thresholds = thresholds
        self._turns = RoundRobin()  # line 1
        self._users = UserPlaces(thresholds.affinity_s)

    def __call__(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget:
        chosen = self._by_need(open_) or self._by_user(offered, open_, now_s) or self._turns(offered, open_, now_s)
        self._users.note(offered.user, chosen.place, now_s)  # line 21
        return chosen

    def _by_need(self, open_: Sequence[RoutingTarget]) -> RoutingTarget | None:
        """Returns the engine that evens out KV usage, or load (lines 3 to 14)."""
        least = min(open_, key=lambda view: view.kv_usage)
        most = max(view.kv_usage for view in open_)
        over = most >= self._thresholds.kv_usage  # line 5
        if over and most - least.kv_usage >= self._thresholds.kv_difference:  # line 6
            return least
        idlest = min(open_, key=self._load)
        if max(map(self._load, open_)) - self._load(idlest) > self._thresholds.load_tokens:  # line 10
            return idlest
        return None

    def _by_user(self, offered: WaitingRequest, open_: Sequence[RoutingTarget], now_s: float) -> RoutingTarget | None:
        """Returns the user's engine, if it is remembered and no KV usage is high (lines 15 to 19)."""
        place = self._users.place(offered.user, now_s)
        if not place or max(view.kv_usage for view in open_) >= self._thresholds.kv_usage:
            return None
        return next((view for view in open_ if view.place == place), None)

    def _load(self, view: RoutingTarget) -> int:
        return view.prefill_tokens
