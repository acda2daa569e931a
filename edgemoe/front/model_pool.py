"""Owns the models that a daemon serves by name: finds a request's model, loads it, and unloads idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgemoe.api.backend import BoxSnapshot, State
from edgemoe.api.generate.generation import ANY_MODEL
from edgemoe.api.http.distant_answer import DistantAnswer
from edgemoe.api.model_wish import ModelWish
from edgemoe.api.resources import Api, ListedModel
from edgemoe.config.served_models import ServedModelSettings, served_models
from edgemoe.config.settings import Settings
from edgemoe.errors import (
    CheckpointError,
    ConfigError,
    EngineUnavailable,
    ModelNotFound,
    ReloadRefused,
    RequestError,
    StoreError,
    first_error,
)
from edgemoe.front.engine_process import LOOK_S
from edgemoe.front.engine_turns import NEVER_S, EngineTurns, ModelFacts, ModelHost, ModelTurn, PoolDoors
from edgemoe.front.supervisor import SHUTTING_DOWN
from edgemoe.telemetry import metrics as names
from edgemoe.ticking import until_tick
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import asked_names, loading_text, plain_name

if TYPE_CHECKING:
    from edgemoe.front.distant_models import DistantModel

log = logging.getLogger(__name__)
replace_settings = msgspec.structs.replace

MOST_KEEP_S = 86400.0  # that a request may keep a model loaded after it
TICK_S = 1.0
SUMMARY_CHARS = 1000


class ModelPool:
    """The models by name; the first is for requests that name none."""

    def __init__(
        self,
        settings: Settings,
        models: dict[str, ServedModelSettings],
        doors: PoolDoors,
    ) -> None:
        self._settings, self._doors = settings, doors
        self.hosts: dict[str, ModelHost] = {}
        self._leaving: list[ModelHost] = []  # no longer served, with requests or an engine
        self._turns = EngineTurns(settings, doors, self.hosts, self._leaving)
        for name, served in models.items():
            self._add(name, served)
        self._announced: dict[str, State] = {}

    @property
    def first(self) -> ModelHost:
        """Returns the model for requests that name none."""
        return next(iter(self.hosts.values()))

    @property
    def has_several(self) -> bool:
        """Returns whether requests may choose among models of this box, or of others in its cluster."""
        return self._turns.has_several or bool(self._settings.cluster.node)

    def _add(self, name: str, served: ServedModelSettings) -> None:
        turn = ModelTurn(self._turns)
        turn.host = self.hosts[name] = self._doors.host(name, served, turn)
        if self._turns.tasks is not None:
            self._run_host(self._turns.tasks, turn.host)

    async def _announce_changes(self) -> None:
        """Describes the models beside the first to the cluster, where one has come, gone or changed its state."""
        further = [host for host in self.hosts.values() if host is not self.first]
        states = {host.name: host.supervisor.state for host in further}
        if (cluster := self._doors.cluster()) is not None and states != self._announced:
            self._announced = states
            cluster.announce_models([await self._listed(host) for host in further])

    async def open_first(self) -> Api:
        """Opens the first model's resources, loaded or not. Raises CheckpointError, StoreError."""
        host = self.first
        host.api = await self._doors.api(host, Path((await self._facts(host)).path))
        host.capabilities = tuple(host.api.text.capabilities)
        return host.api

    @property
    def state(self) -> State:
        """Returns the daemon's state: it is ready also while the first model, if that is not pinned, is not loaded."""
        state = self.first.supervisor.state
        is_on_request = not self.first.served.is_pinned
        return "ready" if is_on_request and state in ("unloaded", "loading", "failed") else state

    def summary(self) -> str:
        """Returns the state in one line, for the service manager."""
        if len(self.hosts) == 1:
            return self.first.supervisor.summary()
        return "; ".join(f"{host.name} {host.supervisor.summary()}" for host in self.hosts.values())[:SUMMARY_CHARS]

    def count_live(self) -> int:
        """Counts the running requests of all models."""
        return sum(len(host.supervisor.requests) for host in self.hosts.values())

    # --- requests ---

    def find(self, name: str | None) -> ModelHost:
        """Returns the model that a request names, in any case. Raises ModelNotFound, which lists the names."""
        if not name:
            return self.first
        hosts = {plain_name(host.name): host for host in self.hosts.values()}
        known = dict.fromkeys(map(plain_name, self._settings.api.aliases), self.first) | hosts
        host = next((known[plain] for plain in asked_names(name) if plain in known), known.get(ANY_MODEL))
        if host is not None:
            return host
        served = [*self.hosts, *(model.name for model in self._distant())]
        raise ModelNotFound(
            f"the model {name!r} is not served here; these are: {', '.join(map(repr, served))}", param="model"
        )

    def _distant(self) -> list[DistantModel]:
        """Returns the models that only other boxes of the cluster serve."""
        cluster = self._doors.cluster()
        own = set(map(plain_name, (*self.hosts, *self._settings.api.aliases)))
        found = cluster.distant.models() if cluster is not None else {}
        return [model for name, model in found.items() if name not in own]

    def _distant_one(self, *asked: str | None) -> DistantModel | None:
        """Returns the model of other boxes that the first known name stands for; None where it is one of this box."""
        own = set(map(plain_name, (*self.hosts, *self._settings.api.aliases)))
        distant = {plain_name(one.name): one for one in self._distant()}
        plain = chain.from_iterable(map(asked_names, filter(None, asked)))
        return distant.get(next((name for name in plain if name in own or name in distant), ""))

    def elsewhere(self, wish: ModelWish) -> DistantAnswer | None:
        """Returns the way to an answer by other boxes; None where the wish is for this one."""
        model, cluster = self._distant_one(wish.name, *wish.others), self._doors.cluster()
        return None if model is None or cluster is None else partial(cluster.distant.answer, model)

    def find_any(self, wish: ModelWish) -> ModelHost:
        """Returns the model that a request names, or the first of the others that is served. Raises ModelNotFound."""
        try:
            return self.find(wish.name or next(iter(wish.others), None))
        except ModelNotFound:
            for name in wish.others:
                with contextlib.suppress(ModelNotFound):
                    return self.find(name)
            raise

    @contextlib.asynccontextmanager
    async def using(self, wish: ModelWish) -> AsyncIterator[Api]:
        """Holds a model for a request, and has it loaded. Yields its resources.

        Raises ModelNotFound, EngineUnavailable.
        """
        host, keep_s = self.find_any(wish), wish.keep_s
        await self._until_taken(host)
        host.uses += 1
        try:
            await host.supervisor.model()
            yield await self._open(host)
            if keep_s is not None:
                host.keep_s = NEVER_S if keep_s < 0 else min(keep_s, MOST_KEEP_S)
        finally:
            host.uses -= 1
            host.used_s = time.monotonic()
            self._turns.pulse()

    async def _until_taken(self, host: ModelHost) -> None:
        """Waits while the model takes no requests, because another one waits for its memory."""
        while host.yields:
            if time.monotonic() - self._turns.moved_s > self._settings.api.request_timeout_s:
                raise EngineUnavailable(f"the model {host.name!r} makes room for another one; try again")
            await self._turns.wait(LOOK_S)

    async def _open(self, host: ModelHost) -> Api:
        async with host.opening:
            if host.api is None:
                path = host.path or (await self._facts(host)).path
                try:
                    host.api = await self._doors.api(host, Path(path))
                except (CheckpointError, StoreError) as error:
                    why = f"the model {host.name!r} cannot be served: {error}"
                    raise EngineUnavailable(why, code="engine_failed") from error
                host.capabilities = tuple(host.api.text.capabilities)
            return host.api

    async def release(self, name: str | None) -> str:
        """Unloads a model as soon as no request uses it. Returns its name. Raises ModelNotFound."""
        host = self.find(name)
        host.keep_s, host.used_s = 0.0, time.monotonic()
        await self._unload_stale()
        return host.name

    async def listed(self) -> Sequence[ListedModel]:
        """Returns all models, loaded or not, the ones of other boxes last."""
        own = [await self._listed(host) for host in list(self.hosts.values())]
        return [*own, *(model.listed() for model in self._distant())]

    async def find_listed(self, name: str | None) -> ListedModel:
        """Returns a model as `listed` does. Raises ModelNotFound."""
        distant = self._distant_one(name)
        return distant.listed() if distant is not None else await self._listed(self.find(name))

    async def text_of(self, name: str | None) -> Api:
        """Returns the resources of a model, which need not be loaded. Raises ModelNotFound, CheckpointError."""
        return await self._open(self.find(name))

    async def _listed(self, host: ModelHost) -> ListedModel:
        facts, served = await self._facts(host), host.supervisor.served
        if host.capabilities is None and facts.info is not None:
            with contextlib.suppress(EngineUnavailable):
                await self._open(host)
        return ListedModel(
            name=host.name,
            state=host.supervisor.state,
            info=served[0] if served is not None else facts.info,
            context_tokens=served[1].context_tokens if served is not None else facts.context_tokens,
            capabilities=host.capabilities or (),
            store=facts.store,
            boxes=self._boxes(host),
            **self._use(host),
        )

    def _boxes(self, host: ModelHost) -> list[str]:
        """Returns the boxes that serve the model by its name, this one first; none outside a cluster."""
        if (cluster := self._doors.cluster()) is None:
            return []
        node = self._settings.cluster.node
        if host is self.first:
            return [node, *cluster.distant.boxes_of_cluster()]
        other = cluster.distant.models().get(plain_name(host.name))
        return [node, *(other.boxes if other is not None else ())]

    def _use(self, host: ModelHost) -> dict[str, Any]:
        figures = host.supervisor.engine_metrics()
        idle_s = time.monotonic() - host.used_s if host.is_unloadable else 0.0
        return {
            "ram_bytes": int(figures.get(names.named(names.TIER_BYTES, tier="ram"), 0)),
            "vram_bytes": int(figures.get(names.named(names.TIER_BYTES, tier="vram"), 0)),
            "is_pinned": host.served.is_pinned,
            "idle_s": round(idle_s, 1),
            "expires_s": None if host.idle_s == NEVER_S else max(0.0, round(host.idle_s - idle_s, 1)),
        }

    def loading(self, wish: ModelWish) -> str:
        """Returns how far the loading of a model is; "" of a loaded one. Raises ModelNotFound."""
        supervisor = self.find_any(wish).supervisor
        if supervisor.served is not None:
            return ""
        at = supervisor.describe_loading()
        return f"loading: {loading_text(at)}" if at else "loading"

    def snapshots(self) -> list[BoxSnapshot]:
        """Returns the latest snapshots of the first model's engines on all boxes, and of this box's other models."""
        loaded = [host for host in self.hosts.values() if host is not self.first and host.supervisor.served is not None]
        node = self._settings.cluster.node
        further = [BoxSnapshot(node, one.snapshot, host.name) for host in loaded for one in host.supervisor.snapshots()]
        return [*self.first.supervisor.snapshots(), *further]

    def metrics(self) -> dict[str, Mapping[str, float]]:
        """Returns the metrics of the engines and of the cluster, by model."""
        return {name: host.supervisor.metrics() for name, host in self.hosts.items()}

    def describe(self) -> list[Json]:
        """Returns the models' states for /health; none of a daemon with one model."""
        distant = self._distant()
        if not self._turns.has_several and not distant:
            return []
        own: list[Json] = [
            {
                "name": host.name,
                "state": host.supervisor.state,
                "loading": host.supervisor.describe_loading(),
                "reason": host.supervisor.reason,
                "requests": len(host.supervisor.requests),
                "memory_bytes": host.memory.ram_bytes if host.memory is not None and host.is_held else 0,
                "boxes": self._boxes(host),
                **self._use(host),
            }
            for host in self.hosts.values()
        ]
        return [*own, *(model.described() for model in distant)]

    async def _facts(self, host: ModelHost) -> ModelFacts:
        if host.facts is None:
            settings = host.served.engine
            if host.path:
                settings = replace_settings(settings, model=replace_settings(settings.model, path=host.path))
            facts = await asyncio.to_thread(self._doors.facts, settings)
            host.facts = facts if facts.info is not None else None  # a store may come later
            return facts
        return host.facts

    # --- running ---

    async def run(self) -> None:
        """Runs the models' engines until cancelled. Raises ServiceError where the first can never start."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._turns.tasks = tasks
                for host in self.hosts.values():
                    self._run_host(tasks, host)
                while True:
                    await self._announce_changes()
                    await asyncio.sleep(until_tick(TICK_S))
                    await self._unload_stale()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    def _run_host(self, tasks: asyncio.TaskGroup, host: ModelHost) -> None:
        host.tasks = [
            tasks.create_task(host.supervisor.run(), name=f"engine of {host.name}"),
            tasks.create_task(host.supervisor.listen(), name=f"messages of {host.name}"),
        ]

    async def _unload_stale(self) -> None:
        """Unloads models that were idle for too long, and closes the resources of models that are not loaded."""
        for host in list(self.hosts.values()):
            if host.is_unloadable and time.monotonic() - host.used_s >= host.idle_s:
                host.keep_s = None
                self._turns.spawn(host.supervisor.unload())
            elif (
                host.supervisor.state == "unloaded"
                and host.api is not None
                and not host.uses
                and host is not self.first
            ):
                api, host.api = host.api, None
                await api.close()

    # --- settings ---

    async def reload(self) -> str:
        """Serves the models of the settings as they are now, and reloads the first one's exports.

        Returns a message. Raises ReloadRefused, EngineUnavailable.
        """
        try:
            changes = await self._follow(await asyncio.to_thread(self._doors.reread))
        except (ConfigError, OSError) as error:
            raise ReloadRefused(f"all stays as it was: {error}") from error
        for host in list(self.hosts.values())[1:]:
            if host.supervisor.state == "failed":
                changes.append(f"{host.name}: {await host.supervisor.reload()}")
        if self.first.supervisor.state != "unloaded":
            changes.append(await self.first.supervisor.reload())
        return "; ".join(changes) or "nothing has changed"

    async def _follow(self, fresh: Settings) -> list[str]:
        """Serves the models of these settings from now on. Returns the changes; other models are not touched."""
        was, now = self._settings.models, fresh.models
        changes = [
            *(f"{name} is served no longer" for name in was if name not in now),
            *(f"{name} is served, too" for name in now if name not in was),
            *(f"{name} has other settings" for name in now if name in was and was[name] != now[name]),
        ]
        settings = replace_settings(self._settings, models=now)
        models, first = served_models(settings), self.first
        name, served = next(iter(models.items()))
        if name != first.name or (served.engine != first.served.engine and not self._settings.model.path):
            raise ReloadRefused(f"{first.name!r} is for requests that name no model: restart to change that")
        self._settings = settings
        await self._turns.hold_running(first)
        for name in [name for name in was if was[name] != now.get(name)]:
            self._remove(name, models.get(name))
        for name, served in models.items():
            if name not in self.hosts:
                self._add(name, served)
        return changes

    def _remove(self, name: str, served: ServedModelSettings | None) -> None:
        """Ends a model's service; its running requests may finish. One that only idles otherwise goes on."""
        host = self.hosts[name]
        if served is not None and served.engine == host.served.engine:
            host.served = served
            if served.is_pinned:
                host.supervisor.request_load()
            return
        del self.hosts[name]
        self._leaving.append(host)
        self._turns.spawn(self._end(host))

    async def _end(self, host: ModelHost) -> None:
        await host.supervisor.drain(self._settings.service.drain_s)
        for task in host.tasks:
            task.cancel()
        await asyncio.wait(host.tasks)
        self._leaving.remove(host)
        if host.api is not None:
            await host.api.close()
        host.close()
        self._turns.pulse()

    async def drain(self, drain_s: float) -> None:
        """Lets running requests of all models finish for `drain_s`, then stops the engines."""
        await asyncio.gather(*(host.supervisor.drain(drain_s) for host in self.hosts.values()))

    def stop(self, why: RequestError = SHUTTING_DOWN) -> None:
        """Ends every request with an error and starts no further engine."""
        for host in (*self.hosts.values(), *self._leaving):
            host.supervisor.stop(why)

    def check_integrity(self) -> None:
        """Raises AssertionError if requests, engines and memory contradict each other."""
        for host in self.hosts.values():
            host.supervisor.check_integrity()
            assert host.uses >= 0
        self._turns.check_integrity()

    async def close(self) -> None:
        """Closes the resources of requests."""
        for host in self.hosts.values():
            if host.api is not None:
                await host.api.close()

    def close_wires(self) -> None:
        """Closes the sockets of the engines."""
        for host in (*self.hosts.values(), *self._leaving):
            host.close()
