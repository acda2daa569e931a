"""Holds the models that a daemon serves by name, with facts from their stores, and decides when an engine may start.

One engine starts at a time, and all share the memory of the box. Models that have no room wait in order. Idle models
make room, the least recently used first. Busy ones do so after `PATIENCE_S`: they take no further requests, and go when
their running ones have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgemoe.api.resources import Api, StoreFacts
from edgemoe.config.budgets import VRAM_HEADROOM_BYTES, devices_of
from edgemoe.config.served_models import ServedModelSettings
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.config.sizes import format_size
from edgemoe.errors import CapacityError, EdgemoeError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes, row_tables
from edgemoe.front.engine_process import LOOK_S
from edgemoe.front.start_turn import StartForgone, StartProgress, StartTurn
from edgemoe.front.supervisor import Supervisor
from edgemoe.policy.model_memory import MemoryHolder, ModelMemory, models_to_unload, total_of
from edgemoe.store.catalog import resolve
from edgemoe.store.manifest import MANIFEST, Manifest, served_info, spec_of
from edgemoe.telemetry.probes import probe_machine
from edgemoe.types.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Describes a model by its store, whether it is loaded or not."""

    path: str  # of its store, as far as that is known
    store: StoreFacts = field(default_factory=StoreFacts)
    info: ModelInfo | None = None  # None where the store cannot be read
    context_tokens: int = 0
    dense_bytes: int = 0  # of all weights except the experts
    table_bytes: int = 0  # of tables whose rows are read from disk


def facts_of(settings: Settings) -> ModelFacts:
    """Returns the facts about the model of these settings, which may name its store by a path or a name."""
    path = Path(settings.model.path).expanduser()
    try:
        if not path.exists():
            path = resolve(settings.model.path, settings.model.store_dir)
        manifest = Manifest.read(path)
        spec = replace(spec_of(manifest), kv_int8=settings.engine.kv_cache_dtype == "int8")
    except (EdgemoeError, OSError):
        return ModelFacts(str(path))
    info = served_info(settings.model.name, manifest, spec)
    context_tokens = min(settings.engine.context_tokens or spec.context_tokens, spec.context_tokens)
    return ModelFacts(str(path), store_facts(path), info, context_tokens, manifest.dense.bytes, manifest.table_bytes)


def store_facts(directory: Path) -> StoreFacts:
    """Returns the sizes of a packed store; zeros where it cannot be read, for the engine says why."""
    try:
        manifest = Manifest.read(directory)
        spec = spec_from_config(manifest.spec_config)
        modified_s = (directory / MANIFEST).stat().st_mtime
    except (EdgemoeError, OSError):
        return StoreFacts()
    dense = sum(math.prod(shape) for shape in (dense_shapes(spec) | row_tables(spec)).values())
    experts = sum(len(layer.experts) for layer in manifest.layers)
    expert = math.prod(spec.geometry.gate_up_shape) + math.prod(spec.geometry.down_shape)
    return StoreFacts(manifest.total_bytes, dense + experts * expert, modified_s)


def room_of(settings: Settings, held: ModelMemory) -> ModelMemory:
    """Returns the memory that all models together may take, where they hold `held` of it now."""
    machine = probe_machine(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))
    free_bytes = machine.ram_available_bytes - settings.memory.headroom_bytes + held.ram_bytes
    kinds = [device.kind for device in devices_of(settings, machine)]
    free = [gpu.free_bytes - VRAM_HEADROOM_BYTES for gpu in machine.gpus if f"cuda:{gpu.index}" in kinds]
    vram_bytes = max(0, min(free)) + held.vram_bytes if free else 0
    return ModelMemory(settings.memory.models_bytes or max(0, free_bytes), vram_bytes)


if TYPE_CHECKING:
    from edgemoe.front.cluster_front import ClusterFront

NEVER_S = math.inf
PATIENCE_S = 10.0  # that a model waits for memory before busy models take no further requests
ROWS_PART = 32  # bytes of tables on disk over the memory for their rows, where it is not stated
KV_PART = 3  # bytes of a store over bytes of its KV, where these are not stated
MARGIN = 1.02  # for whole slots and blocks
IN_RAM = ("cpu", "emulated")  # devices without memory of their own
replace_settings = msgspec.structs.replace


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
    def is_unloadable(self) -> bool:
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


class EngineTurns:
    """Owns the memory of the models, and the turn to start."""

    def __init__(
        self,
        settings: Settings,
        doors: PoolDoors,
        hosts: Mapping[str, ModelHost],
        leaving: Sequence[ModelHost],
    ) -> None:
        """Takes the served models, and the ones that are being ended; both may change."""
        self._settings, self._doors = settings, doors
        self._hosts, self._leaving = hosts, leaving
        self._room: ModelMemory | None = None  # of all models; None until it is needed
        self._waiting: list[ModelHost] = []  # for memory, in order
        self._starting: ModelHost | None = None
        self._start_lock = asyncio.Lock()
        self._changed = asyncio.Event()  # pulsed when memory or uses change
        self.moved_s = time.monotonic()  # when they last did
        self.tasks: asyncio.TaskGroup | None = None  # of the pool, while it runs

    async def begin(self, host: ModelHost, settings: Settings) -> Settings:
        """Waits until an engine may start. Returns its settings, with the store's path and the limits of memory.

        Raises CapacityError, StoreError, CheckpointError.
        """
        host.began_s = time.monotonic()
        model = await self._store(host, settings.model)
        settings, host.path = replace_settings(settings, model=model), model.path
        if not self.has_several:
            return settings
        await self._claim(host, settings)
        assert host.memory is not None
        await self._start_lock.acquire()
        self._starting = host
        return limited(settings, host.memory)

    async def _store(self, host: ModelHost, model: ModelSettings) -> ModelSettings:
        def progress(done_bytes: int, total_bytes: int) -> None:
            host.packed = (done_bytes / max(1, total_bytes), time.monotonic())

        try:
            return await asyncio.to_thread(self._doors.store, model, progress)
        finally:
            host.packed = None

    async def _claim(self, host: ModelHost, settings: Settings) -> None:
        """Waits until the model's memory is free, and holds it. Raises CapacityError where it never will be."""
        facts = await asyncio.to_thread(self._doors.facts, settings)
        host.memory = self._memory_of(host, settings, facts)
        self._waiting.append(host)
        try:
            while not self._takes(host, host.memory):
                self._make_room(host, host.memory)
                await self.wait(LOOK_S)
                if not (host.uses or host.served.is_pinned or len(host.supervisor.requests)):
                    raise StartForgone(f"nobody waits for {host.name!r} any more")
        finally:
            self._waiting.remove(host)
            if not self._waiting:
                for other in self._hosts.values():
                    other.yields = False
            self.pulse()
        host.is_held = True

    def _takes(self, host: ModelHost, memory: ModelMemory) -> bool:
        is_next = self._waiting[0] is host or host.served.is_pinned
        return is_next and self._of_all().holds(total_of(self._holders(host)).plus(memory))

    def _make_room(self, host: ModelHost, memory: ModelMemory) -> None:
        """Unloads idle models for one that waits, and has busy ones take no further requests after a while."""
        if self._waiting[0] is not host and not host.served.is_pinned:
            return
        holders = self._holders(host)
        gone = models_to_unload(memory, self._of_all(), holders)
        for name in gone or ():
            if name in self._hosts:  # else it is being ended
                self.spawn(self._hosts[name].supervisor.unload())
        if gone is None and time.monotonic() - host.began_s > PATIENCE_S:
            unpinned = [replace(one, is_unloadable=not one.is_pinned and one.name in self._hosts) for one in holders]
            for name in models_to_unload(memory, self._of_all(), unpinned) or ():
                self._hosts[name].yields = True

    def _holders(self, wanting: ModelHost) -> list[MemoryHolder]:
        """Returns the other models that hold memory; the pinned ones hold theirs also between two engines."""
        return [
            MemoryHolder(
                host.name,
                host.memory,
                -math.inf if host.supervisor.is_unloading else host.used_s,
                is_unloadable=host.is_unloadable or host.supervisor.is_unloading,
                is_pinned=host.served.is_pinned and host not in self._leaving,
            )
            for host in (*self._hosts.values(), *self._leaving)
            if host is not wanting and host.memory is not None and self._keeps_memory(host)
        ]

    def _keeps_memory(self, host: ModelHost) -> bool:
        return host.is_held or (host.served.is_pinned and host not in self._leaving)

    def _memory_of(self, host: ModelHost, settings: Settings, facts: ModelFacts) -> ModelMemory:
        """Returns the memory for a model: as stated, else as it needs, at most the pinned models' rest.

        Raises CapacityError.
        """
        pinned = [holder for holder in self._holders(host) if holder.is_pinned]
        room, taken = self._of_all(), total_of(pinned)
        left = ModelMemory(room.ram_bytes - taken.ram_bytes, room.vram_bytes - taken.vram_bytes)
        stated, needed = stated_memory(settings), needed_memory(settings, facts)
        memory = ModelMemory(
            stated.ram_bytes or min(needed.ram_bytes, left.ram_bytes),
            (stated.vram_bytes or min(needed.vram_bytes, left.vram_bytes)) if room.vram_bytes else 0,
        )
        if not left.holds(memory) or (facts.info is not None and memory.ram_bytes <= 0):
            raise CapacityError(
                f"the model {host.name!r} needs {format_size(max(0, memory.ram_bytes))} of RAM; pinned models "
                f"leave {format_size(max(0, left.ram_bytes))} of {format_size(room.ram_bytes)}: set lower "
                "memory_bytes or memory.limit_bytes, or unpin one"
            )
        return memory

    def _of_all(self) -> ModelMemory:
        """Returns the memory of all models: the free memory when it is first needed, and the memory held then."""
        if self._room is None:
            self._room = self._doors.room(self._settings, self._held())
        return self._room

    def _held(self) -> ModelMemory:
        held = ModelMemory(0)
        for host in (*self._hosts.values(), *self._leaving):
            if host.is_held and host.memory is not None:
                held = held.plus(host.memory)
        return held

    def on_started(self, host: ModelHost) -> None:
        """Lets the next engine start: this one is ready, or has ended."""
        if self._starting is host:
            self._starting = None
            self._start_lock.release()
        host.used_s = time.monotonic()
        self.pulse()

    def on_ended(self, host: ModelHost) -> None:
        """Frees the memory of an engine that has ended."""
        self.on_started(host)
        host.is_held = False
        self.pulse()

    def progress(self, host: ModelHost) -> StartProgress | None:
        """Returns the reason why a model's start waits; None while it does not wait."""
        now = time.monotonic()
        if host.packed is not None:
            share, moved_s = host.packed
            return StartProgress(f"packing its checkpoint, {share:.0%}", now - moved_s, now - host.began_s)
        if host in self._waiting:
            users = ", ".join(repr(holder.name) for holder in self._holders(host)) or "other programs"
            return StartProgress(f"for memory in use by {users}", now - self.moved_s, now - host.began_s)
        if host.is_held and self._starting not in (None, host):
            assert self._starting is not None
            detail, still_s = f"for {self._starting.name!r} to load", self._starting.supervisor.still_s
            return StartProgress(detail, still_s, now - host.began_s)
        return None

    async def hold_running(self, host: ModelHost) -> None:
        """Counts the memory of an engine that started while its model was the only one."""
        if host.memory is not None or host.supervisor.state not in ("loading", "ready", "stalled"):
            return
        settings = host.served.engine
        facts = await asyncio.to_thread(self._doors.facts, settings)
        stated, needed = stated_memory(settings), needed_memory(settings, facts)
        host.memory = ModelMemory(stated.ram_bytes or needed.ram_bytes, stated.vram_bytes or needed.vram_bytes)
        host.is_held = True
        if not self._of_all().vram_bytes:  # there is no GPU
            host.memory = ModelMemory(host.memory.ram_bytes)

    @property
    def has_several(self) -> bool:
        """Returns whether several models share the memory."""
        return len(self._hosts) > 1 or bool(self._settings.models)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts work beside the pool's; drops it where the pool does not run."""
        if self.tasks is not None:
            self.tasks.create_task(work)
        else:
            work.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if models hold more memory than there is."""
        assert self._room is None or self._room.holds(self._held()), "models hold more memory than there is for them"

    def pulse(self) -> None:
        """Tells waiting models that memory or uses have changed."""
        self.moved_s = time.monotonic()
        self._changed.set()
        self._changed.clear()

    async def wait(self, timeout_s: float) -> None:
        """Waits for a change of memory or uses, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


class ModelTurn:
    """The turn of one model's engine to start."""

    def __init__(self, turns: EngineTurns) -> None:
        self._turns = turns
        self.host: ModelHost | None = None  # set once it is made

    async def begin(self, settings: Settings) -> Settings:
        """Waits for memory, and until no other engine starts. Raises CapacityError, StoreError, StartForgone."""
        assert self.host is not None
        return await self._turns.begin(self.host, settings)

    def on_started(self) -> None:
        """Lets the next engine start."""
        assert self.host is not None
        self._turns.on_started(self.host)

    def on_ended(self) -> None:
        """Gives the memory back."""
        assert self.host is not None
        self._turns.on_ended(self.host)

    def progress(self) -> StartProgress | None:
        """Returns the reason why the start waits."""
        return self._turns.progress(self.host) if self.host is not None else None


def limited(settings: Settings, memory: ModelMemory) -> Settings:
    """Returns the settings of an engine that may take this memory."""
    return replace_settings(
        settings,
        memory=replace_settings(settings.memory, limit_bytes=memory.ram_bytes),
        device=tuple(
            device if device.kind in IN_RAM else replace_settings(device, limit_bytes=memory.vram_bytes)
            for device in settings.device
        ),
    )


def stated_memory(settings: Settings) -> ModelMemory:
    """Returns the memory that the settings state for a model; 0 is not stated."""
    return ModelMemory(settings.memory.limit_bytes, max(device.limit_bytes for device in settings.device))


def needed_memory(settings: Settings, facts: ModelFacts) -> ModelMemory:
    """Returns the memory for all of a model, or its stated budgets, with KV and emulated devices."""
    dense_bytes, stated = facts.dense_bytes, settings.memory
    all_experts_bytes = max(0, facts.store.disk_bytes - dense_bytes - facts.table_bytes)
    row_cache_bytes = min(facts.table_bytes, stated.row_cache_bytes or facts.table_bytes // ROWS_PART)
    kv_bytes = stated.kv_bytes or (facts.store.disk_bytes - facts.table_bytes) // KV_PART
    emulated_bytes = sum(device.expert_bytes for device in settings.device if device.kind == "emulated")
    stated_slabs = (device.expert_bytes for device in settings.device if device.kind != "emulated")
    on_device_bytes = max(stated_slabs, default=0) or all_experts_bytes
    ram_bytes = dense_bytes + kv_bytes + row_cache_bytes + (stated.ram_bytes or all_experts_bytes) + emulated_bytes
    vram_bytes = dense_bytes + kv_bytes + on_device_bytes
    return ModelMemory(int(ram_bytes * MARGIN), int(vram_bytes * MARGIN))
