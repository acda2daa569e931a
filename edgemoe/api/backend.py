"""The protocol between the application and the front, which runs its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import Emission, Principal, Request, RequestLimits
from edgemoe.types.snapshot import ServingSnapshot

NOTHING: Mapping[str, Sequence[int]] = MappingProxyType({})
State = Literal["unloaded", "loading", "ready", "draining", "failed", "stalled"]


class BoxSnapshot(NamedTuple):
    """The latest snapshot of a box's engine. `box` is its name; "" outside a cluster.

    `model` is a further model that this box serves by name; "" of the first.
    """

    box: str
    snapshot: ServingSnapshot | None  # None while nothing is known
    model: str = ""


class Submission(Protocol):
    """The accepted requests of one HTTP request. Iterates over their emissions."""

    def __aiter__(self) -> AsyncIterator[list[Emission]]:
        """Yields lists of all emissions since the last one, in order, until each request has finished.

        Raises RequestError (DeadlineExceeded, EngineUnavailable) where a request ends so.
        """

    def cancel(self, request: str) -> None:
        """Ends one of the requests, of which no more output is needed."""


class Backend(Protocol):
    """Runs requests. Leaving the context of `open` cancels requests that still run."""

    @property
    def state(self) -> State:
        """Returns the state of the engine."""

    def metrics(self) -> Mapping[str, float]:
        """Returns the engine's metrics by final name, labels included."""

    async def model(self) -> tuple[ModelInfo, RequestLimits]:
        """Waits for an engine. Returns the served model and the limits of a request.

        Raises EngineUnavailable.
        """

    def check_room(self, principal: Principal, wanted: int) -> None:
        """Raises QueueFull where the principal cannot have `wanted` more requests now, InvalidRequest where never.

        Called before a body is decoded. `open` checks again, for the principal's users too.
        """

    def open(
        self, requests: Sequence[Request], timeout_s: float, emitted: Mapping[str, Sequence[int]] = NOTHING
    ) -> AbstractContextManager[Submission]:
        """Accepts requests, which go on behind the tokens `emitted` by request elsewhere before.

        One ends that makes no progress for `timeout_s`. Raises QueueFull, EngineUnavailable.
        """

    async def reload(self) -> str:
        """Reloads exports and settings that can change while serving. Returns a message naming those now in use.

        Raises ReloadRefused, EngineUnavailable.
        """

    def snapshots(self) -> Sequence[BoxSnapshot]:
        """Returns the latest snapshot of each box's engine, this box's first, and requests the next ones."""

    async def reach(self) -> Sequence[dict[str, Any]]:
        """Returns how this box and the others of its cluster reach each other; tries it, where it was not lately."""

    async def list_members(self) -> dict[str, Any]:
        """Returns the boxes of the cluster, with their votes. Raises MembersRefused for a box on its own."""

    async def change_members(self, verb: str, node: str, *, dead: bool, hours: float) -> str:
        """Changes the members of the cluster. Returns a message about the change. Raises MembersRefused."""

    def describe(self) -> dict[str, Any]:
        """Returns state, model and metrics for /health."""
