"""What the application needs of whoever runs requests: the request book, or another box one day."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import Emission, Request

State = Literal["loading", "ready", "draining", "failed", "stalled"]


class Submission(Protocol):
    """The accepted requests of one HTTP request, and what they emit."""

    def __aiter__(self) -> AsyncIterator[list[Emission]]:
        """Everything emitted since the last look, in order, until each request has finished.

        Raises RequestError (DeadlineExceeded, EngineUnavailable) where that is how it ends.
        """

    def cancel(self, request: str) -> None:
        """Ends one of the requests: the app has all it wants."""


class Backend(Protocol):
    """Runs requests. Leaving `open`'s context cancels what still runs."""

    @property
    def state(self) -> State:
        """How the server is."""

    @property
    def values(self) -> Mapping[str, float]:
        """The engine's metrics: final names with labels -> numbers."""

    async def model(self) -> tuple[ModelInfo, int]:
        """The served model and the tokens that one request may span, as soon as an engine has said.

        Raises EngineUnavailable.
        """

    def open(self, requests: Sequence[Request], timeout_s: float) -> AbstractContextManager[Submission]:
        """Accepts requests that all end within `timeout_s`. Raises QueueFull, EngineUnavailable."""

    async def reload(self) -> str:
        """Loads again what can be changed while serving; what is in use then.

        Raises ReloadRefused, EngineUnavailable.
        """

    def describe(self) -> dict[str, Any]:
        """State, model and figures, for /health."""
