"""Which engine a request goes to, ours or another box's: between the request log and whoever takes its requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from edgemoe.config.settings import EngineSettings
from edgemoe.front.own_engine import EngineDoor
from edgemoe.front.request_log import RequestLog
from edgemoe.ipc.messages import Cancel, Limits, Submit


class OtherEngines(Protocol):
    """Engines of other boxes, and the choice between ours and them."""

    def places(self) -> Collection[str]:
        """Returns those that take requests."""

    def room(self) -> int:
        """Returns how many requests of this front they have, and have room for."""

    def submit(self, message: Submit) -> str:
        """Hands a request to the engine of choice, ours or another box's, and names it; "" where none takes it."""

    def cancel(self, place: str, message: Cancel) -> None:
        """Has another box's engine forget a request."""

    def ended(self, request: str) -> None:
        """Takes note of a request of this front that has ended."""


class RequestRouter:
    """Owns the request log. On a box of its own there is one place; `join` adds those of other boxes."""

    def __init__(self, settings: EngineSettings, door: EngineDoor) -> None:
        self.door, self.slots = door, settings.max_sequences  # slots: requests that our engine runs at once
        self.log = RequestLog(settings.max_sequences + settings.max_queue, self._submit, self._cancel)
        self.draining = False  # nothing more is taken here
        self._others: OtherEngines | None = None

    def fit(self, limits: Limits) -> None:
        """Takes what our engine says of itself: one may have room for fewer states than the settings allow."""
        self.slots, self.log.capacity = limits.max_sequences, limits.max_sequences + limits.max_queue

    def join(self, others: OtherEngines) -> None:
        """Hands requests to these engines too from now on."""
        self._others = others
        self.log.room_elsewhere, self.log.ended = others.room, others.ended

    @property
    def elsewhere(self) -> Collection[str]:
        """Returns engines of other boxes that take requests."""
        return () if self._others is None else self._others.places()

    @property
    def anywhere(self) -> bool:
        """Returns whether requests may find an engine, perhaps another box's."""
        return self._others is not None or bool(self.door.place)

    def submit_here(self, message: Submit) -> str:
        """Hands a request to our own engine and names it; "" where it takes none."""
        return self.door.place if self.door.send(message) else ""

    def replay(self) -> None:
        """Submits what no engine has that takes requests."""
        self.log.replay([place for place in (self.door.place, *self.elsewhere) if place])

    def _submit(self, message: Submit) -> str:
        return self.submit_here(message) if self._others is None else self._others.submit(message)

    def _cancel(self, place: str, message: Cancel) -> None:
        if place == self.door.place:
            self.door.send(message)
        elif self._others is not None:
            self._others.cancel(place, message)
