"""The turn of a model's engine to start, where a daemon serves one model or several."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edgemoe.config.settings import Settings
from edgemoe.errors import EdgemoeError


class StartForgone(EdgemoeError):
    """Nobody waits any longer for the model."""


class StartProgress(NamedTuple):
    """The reason why an engine's start waits, and the seconds since the last progress."""

    detail: str
    still_s: float
    seconds: float  # of waiting


class StartTurn(Protocol):
    """Decides when a model's engine may start."""

    async def begin(self, settings: Settings) -> Settings:
        """Waits until an engine may start. Returns the settings that it starts with. Raises EdgemoeError."""

    def on_started(self) -> None:
        """Lets the next engine start: this one is ready."""

    def on_ended(self) -> None:
        """Gives back all that the engine held."""

    def progress(self) -> StartProgress | None:
        """Returns the reason why the start waits; None while it does not wait."""


class StartAtOnce:
    """The turn of the only model of a daemon."""

    async def begin(self, settings: Settings) -> Settings:
        return settings

    def on_started(self) -> None:
        pass

    def on_ended(self) -> None:
        pass

    def progress(self) -> StartProgress | None:
        return None
