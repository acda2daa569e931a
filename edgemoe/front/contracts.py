"""What the two sides of the front, its engine's and the cluster's, ask of each other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from edgemoe.api.backend import State
from edgemoe.cluster.rpc.engine_messages import Activity, Cancel, Holds, Listening, PeerSeen, Submit, ToEngine
from edgemoe.config.settings import Settings
from edgemoe.front.request_log import RequestLog
from edgemoe.types.request import Emission


class Supervised(Protocol):
    """Our own engine and the request log, as the cluster's side of the front uses them."""

    settings: Settings
    request_log: RequestLog

    @property
    def place(self) -> str:
        """Returns the engine's name as a place for requests; "" while it takes none."""

    @property
    def state(self) -> State:
        """Returns how the front is."""

    def tell(self, message: ToEngine) -> bool:
        """Hands a message to the engine, ready or not; false where there is none."""

    def send(self, message: ToEngine) -> bool:
        """Hands a message to the engine; false where none takes requests."""

    def submit_here(self, message: Submit) -> str:
        """Hands a request to our own engine and names it; "" where it takes none."""

    def replay(self) -> None:
        """Submits what no engine has that takes requests."""


class Neighbours(Protocol):
    """The other boxes, as far as our engine and our requests are concerned."""

    def hear(self, boot: str, message: Listening | Holds | PeerSeen | Activity) -> None:
        """Takes what our engine says of itself and its links."""

    def engine_changed(self) -> None:
        """Our engine takes requests now, or no longer, or is no more."""

    def places(self) -> Collection[str]:
        """Engines of other boxes that take requests."""

    def submit(self, message: Submit) -> str:
        """Hands a request to the engine of choice, ours or another box's, and names it; "" where none takes it."""

    def cancel(self, place: str, message: Cancel) -> None:
        """Has another box's engine forget a request."""

    def take(self, items: list[Emission]) -> list[Emission]:
        """Passes on what our engine emits for other boxes; returns the rest."""

    def metrics(self) -> dict[str, float]:
        """Numbers for /metrics by their final names."""

    def describe(self) -> dict[str, Any]:
        """Members, leader, epoch and plan, for /health."""
