"""Streams the daemon's state as server-sent events, for the page and for `edgemoe top`; without users' text.

`hello` once: the release. `state` each second: seconds since the first, changed figures, changed /health. `box` twice a
second for each box: its `ServingSnapshot` if changed, cells in base64 unless as before. `bye` when the daemon drains.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import edgemoe
from edgemoe.api.backend import Backend, BoxSnapshot
from edgemoe.api.http import responding as http
from edgemoe.api.http.event_text import event
from edgemoe.api.metrics import Metrics
from edgemoe.errors import QueueFull
from edgemoe.policy.shares import fits
from edgemoe.types.json_object import Json
from edgemoe.types.request import Principal
from edgemoe.types.snapshot import ServingSnapshot

EVENTS = "/events"
MOST_STREAMS = 16  # at once
EVERY_S, STATE_EVERY = 0.5, 2  # seconds between rounds, and rounds between states


class EventStreams:
    """Yields events to each client that watches. One for an application."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        describe: Callable[[], Json] | None = None,
        snapshots: Callable[[], Iterable[BoxSnapshot]] | None = None,
    ) -> None:
        """Takes the ways to the body of /health and to the snapshots; without them, the backend's."""
        self._backend, self._metrics = backend, metrics
        self._describe, self._snapshots = describe or backend.describe, snapshots or backend.snapshots
        self._watchers = Counter[Principal]()

    def admit(self, principal: Principal) -> None:
        """Raises QueueFull if too many clients watch, of this principal or in all."""
        if not fits(1, self._watchers[principal], MOST_STREAMS - self._watchers.total()):
            raise QueueFull("too many clients watch already; close a page or an `edgemoe top`", retry_after_s=5.0)

    async def __call__(self, principal: Principal) -> AsyncGenerator[bytes, None]:
        """Yields events of the changes, every half second, until the daemon drains."""
        self._watchers[principal] += 1
        try:
            memory = StreamMemory(time.monotonic())
            yield event({"release": edgemoe.__version__}, "hello")
            rounds = 0
            while self._backend.state != "draining":
                some = [event(box, "box") for box in memory.boxes(self._snapshots())]
                if rounds % STATE_EVERY == 0:
                    some.append(event(memory.state(self._describe(), self._figures()), "state"))
                rounds += 1
                yield b"".join(some)
                await asyncio.sleep(EVERY_S)
            yield event({}, "bye")
        finally:
            self._watchers[principal] -= 1
            self._watchers += Counter()  # drops zeros

    def _figures(self) -> dict[str, float]:
        return self._metrics.figures() | dict(self._backend.metrics())


async def stream_events(request: Request) -> ASGIApp:
    """Answers with events until the client leaves; to HEAD with none. Raises QueueFull."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    events: EventStreams = request.app.state.api.events
    principal: Principal = request.state.principal
    events.admit(principal)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async with http.while_connected(receive), aclosing(events(principal)) as some:
            await http.stream(send, some)

    return answer


class StreamMemory:
    """Remembers the state that one stream has sent, and returns the changes since."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._figures: dict[str, float] = {}
        self._health: Json = {}
        self._snapshots: dict[tuple[str, str], ServingSnapshot] = {}  # by box and model

    def state(self, health: Json, figures: dict[str, float]) -> Json:
        """Returns the body of a state."""
        changed = {name: value for name, value in figures.items() if self._figures.get(name) != value}
        body: dict[str, Any] = {"t": round(time.monotonic() - self._began_s, 3), "figures": changed}
        if health != self._health:
            body["health"] = self._health = health
        self._figures = figures
        return body

    def boxes(self, snapshots: Iterable[BoxSnapshot]) -> Iterator[Json]:
        """Yields the bodies of boxes."""
        for box, snapshot, model in snapshots:
            told = self._snapshots.get((box, model))
            if snapshot is None or snapshot == told:
                continue
            self._snapshots[box, model] = snapshot
            body: Json = msgspec.to_builtins(snapshot, builtin_types=(bytes,))
            if told is not None and told.cells == snapshot.cells:
                del body["cells"]
            yield {"box": box, **({"model": model} if model else {}), **body}
