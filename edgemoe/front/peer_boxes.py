"""The other boxes of a cluster, as the supervisor of this box's engine needs them."""

from __future__ import annotations

from typing import Any, Protocol

from edgemoe.ipc.messages import ToCluster
from edgemoe.types.request import Emission


class PeerBoxes(Protocol):
    """Receives news of the engine, and describes the cluster."""

    def on_engine_message(self, boot: str, message: ToCluster) -> None:
        """Acts on the engine's messages about itself, its links and its requests."""

    def on_engine_changed(self) -> None:
        """Announces that the engine takes requests now, or has ended."""

    def pass_on_emissions(self, items: list[Emission]) -> list[Emission]:
        """Passes on the engine's emissions for other boxes; returns this front's."""

    def metrics(self) -> dict[str, float]:
        """Returns the cluster's metrics by their final names."""

    def describe(self) -> dict[str, Any]:
        """Returns members, leader, epoch and plan, for /health."""

    async def list_members(self) -> dict[str, Any]:
        """Returns the boxes of the cluster, with their votes."""

    async def change_members(self, verb: str, node: str, *, dead: bool, hours: float) -> str:
        """Changes the members of the cluster. Returns a message about the change. Raises MembersRefused."""
