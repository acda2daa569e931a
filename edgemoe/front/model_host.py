"""Holds one model that a daemon serves by name: its engine's supervisor, its use, and the resources of its requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.api.resources import Api
from edgemoe.config.served_models import ServedModelSettings
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.front.cluster_front import ClusterFront
from edgemoe.front.model_facts import ModelFacts
from edgemoe.front.start_turn import StartTurn
from edgemoe.front.supervisor import Supervisor
from edgemoe.policy.model_memory import ModelMemory

NEVER_S = math.inf


@dataclass(slots=True, eq=False)
class ModelHost:
    """One model: its engine's supervisor, the resources of its requests, and its use."""

    name: str
    served: ServedModelSettings
    supervisor: Supervisor
    close: Callable[[], None]
    used_s: float
    uses: int = 0  # HTTP requests that it is held for
    keep_s: float | None = None  # that the last request asked to keep it loaded
    memory: ModelMemory | None = None  # that its engine may take; None: not known yet
    is_held: bool = False  # an engine has the memory, or is about to start with it
    yields: bool = False  # takes no further requests: another model waits for its memory
    api: Api | None = None
    path: str = ""  # of the store that its engine reads
    facts: ModelFacts | None = None
    capabilities: tuple[str, ...] | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    began_s: float = 0.0  # when it began to wait for its start
    packed: tuple[float, float] | None = None  # share of the checkpoint that is packed, and when that was
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def can_go(self) -> bool:
        """Returns whether it may be unloaded now."""
        return not self.served.is_pinned and self.supervisor.is_idle and not self.uses

    @property
    def idle_s(self) -> float:
        """Returns the seconds without a request after which it is unloaded; NEVER_S where only memory matters."""
        if self.served.is_pinned:
            return NEVER_S
        return self.keep_s if self.keep_s is not None else (self.served.idle_s or NEVER_S)


@dataclass(frozen=True, slots=True)
class PoolDoors:
    """The pool's ways to processes and files, which the front opens."""

    host: Callable[[str, ServedModelSettings, StartTurn], ModelHost]
    api: Callable[[ModelHost, Path], Awaitable[Api]]
    store: Callable[[ModelSettings, Callable[[int, int], None]], ModelSettings]  # finds it, or packs it now
    facts: Callable[[Settings], ModelFacts]
    room: Callable[[Settings, ModelMemory], ModelMemory]  # of all models; takes the memory that they hold now
    reread: Callable[[], Settings]  # the settings as they are now
    cluster: Callable[[], ClusterFront | None]  # None of a box on its own
