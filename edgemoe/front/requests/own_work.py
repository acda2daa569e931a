"""What our engine has: this front's requests and other boxes'."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgemoe.front.hosted_requests import HostedRequests
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.requests.engine_use import EngineFacts, HeldRequest
from edgemoe.policy.route import EngineLoad


class OwnWork:
    """Counts and lists; changes nothing."""

    def __init__(
        self, requests: RequestRouter, hosted_requests: HostedRequests, is_leaving: Callable[[], bool]
    ) -> None:
        self._requests, self._hosted_requests, self._is_leaving = requests, hosted_requests, is_leaving

    @property
    def is_going(self) -> bool:
        """Returns whether this box takes nothing more, because it is about to go."""
        return self._requests.draining or self._is_leaving()

    def load(self) -> EngineLoad | None:
        """Returns how many requests our engine has; None while it takes none."""
        place, request_log = self._requests.door.place, self._requests.log
        if not place:
            return None
        requests = request_log.count_at(place) + len(self._hosted_requests)
        return EngineLoad(place, True, requests, self._requests.slots, request_log.capacity)

    def held(self) -> Iterator[HeldRequest]:
        """Returns the requests that our engine has."""
        yield from self._requests.log.held_at(self._requests.door.place)
        yield from self._hosted_requests.held()

    def facts(self) -> EngineFacts | None:
        """Returns what is known of our engine; None while it takes no requests, or this box goes."""
        engine, request_log = self._requests.door.engine, self._requests.log
        if engine is None or engine.ready is None or not engine.serving or self.is_going:
            return None
        return EngineFacts(
            engine.boot_id,
            self._requests.slots,
            request_log.capacity,
            engine.ready.limits.kv_tokens,
            engine.stats.values,
            request_log.expected_tokens,
        )
