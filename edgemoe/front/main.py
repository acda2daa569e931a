"""Composes the front: application, requests, engine supervision, signals, the service manager.

Order: runtime directory and lock, sockets, tokenizer | engine starts, HTTP serves | ready | SIGTERM: running requests
finish within `service.drain_s` | engine stops, sockets close. A second signal skips the waiting. SIGHUP reloads the
ScoutGate, or stops once the starting terminal is closed. Nothing here imports torch or numba (a test asserts it).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp

from edgemoe.api.api_keys import KeyRing, read_keys
from edgemoe.api.app import build, build_forwarded, build_ollama
from edgemoe.api.metrics import Metrics
from edgemoe.api.resources import Api
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.paths import beside
from edgemoe.config.served_models import ServedModelSettings, served_models
from edgemoe.config.settings import ModelSettings, Settings
from edgemoe.durable import remove_file
from edgemoe.errors import EngineUnavailable, RequestError, first_error
from edgemoe.front.cluster_snapshots import ClusterSnapshots
from edgemoe.front.connections import Server
from edgemoe.front.engine_process import LocalConnection
from edgemoe.front.engine_turns import ModelHost, PoolDoors, facts_of, room_of, store_facts
from edgemoe.front.listen import (
    OLLAMA_TCP,
    BoundPorts,
    Notifier,
    bound_ports,
    clear_path,
    listening,
    passed_sockets,
    sole_owner,
    unix_socket,
)
from edgemoe.front.model_pool import ModelPool
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.start_turn import StartTurn
from edgemoe.front.supervisor import Supervisor
from edgemoe.guard import refuse_pickle
from edgemoe.heap import freeze_objects, give_back, give_back_often, keep_freed
from edgemoe.ipc.engine_socket import IpcServer, engine_path, private_directory
from edgemoe.outputs import drop_unwritable
from edgemoe.store.manifest import MANIFEST, Manifest, verify_copies
from edgemoe.ticking import until_tick

if TYPE_CHECKING:
    from edgemoe.front.cluster_front import ClusterFront

log = logging.getLogger(__name__)

SWITCH_S = 0.0005  # that a thread which prepares a request may hold up the streams of others
WORKER = (sys.executable, "-m", "edgemoe.worker")
TICK_S = 1.0
StoreFinder = Callable[[ModelSettings, Callable[[int, int], None]], ModelSettings]
HAND_OVER_S = 15.0  # that other boxes have to fetch experts that only this box has
LOADING_MARGIN_S = 60  # by which each tick extends the service manager's limit for loading or draining
OPEN_FILES = 65536


def reserve(settings: Settings, env: Mapping[str, str] = os.environ) -> BoundPorts:
    """Binds the TCP addresses of the settings, if any, and reads the files that they name, before the expensive work.

    Raises ServiceError if an address is in use or unusable, or another daemon runs with these settings; ServiceError,
    ConfigError if a file cannot be used.
    """
    _check_files(settings)
    engine_path(Path(settings.service.runtime_dir))
    with sole_owner(private_directory(Path(settings.service.runtime_dir)), _elsewhere(settings)):
        if "LISTEN_FDS" not in env:  # else the service manager holds the socket
            clear_path(Path(settings.api.socket))
        return bound_ports(settings.api)


def _check_files(settings: Settings) -> None:
    """Reads the keys and the files of a cluster. Raises ServiceError, ConfigError."""
    if settings.api.needs_keys:
        read_keys(Path(settings.api.api_key_file))
    if settings.cluster.node:
        from edgemoe.cluster.control.coordination.store_factory import etcd_password, etcd_tls
        from edgemoe.cluster.rpc.keys import load_secret
        from edgemoe.front.peers_list import listed

        load_secret(Path(settings.cluster.key_file))
        listed(settings.cluster)
        if settings.cluster.coordination == "etcd":
            etcd_tls(settings.cluster)
            etcd_password(settings.cluster)


def run(
    settings: Settings,
    command: Sequence[str] = WORKER,
    on_ready: Callable[[], None] | None = None,
    ports: BoundPorts | None = None,
    reread: Callable[[], Settings] | None = None,
    find_store: StoreFinder | None = None,
) -> int:
    """Serves the packed store at `settings.model.path` until stopped. Returns the exit status.

    `settings` have their paths filled in; `reread` reads them again. `on_ready` is called once requests are answered;
    `ports` come from `reserve`; `find_store` finds or packs the store of a further model. Raises ServiceError,
    CheckpointError if the front cannot start.
    """
    refuse_pickle()
    _raise_file_limit()
    keep_freed(mmap_bytes=1 << 20, trim_bytes=8 << 20)
    sys.setswitchinterval(SWITCH_S)
    try:
        front = Front(settings, command, os.environ, on_ready, ports, reread, find_store or as_it_is)
        asyncio.run(front.serve_with_signals())
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return 0


def as_it_is(model: ModelSettings, progress: Callable[[int, int], None]) -> ModelSettings:
    """Returns the settings of a model whose path is that of its store."""
    return model


class Front:
    """One daemon; `serve` returns after `stop`."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] = WORKER,
        env: Mapping[str, str] = os.environ,
        on_ready: Callable[[], None] | None = None,
        ports: BoundPorts | None = None,
        reread: Callable[[], Settings] | None = None,
        find_store: StoreFinder = as_it_is,
    ) -> None:
        self.settings = settings
        self._reread = reread or (lambda: settings)
        self._find_store = find_store
        self.metrics = Metrics(next(iter(served_models(settings))))
        self.pool: ModelPool | None = None
        self.supervisor: Supervisor | None = None  # of the first model
        self.api: Api | None = None
        self.cluster: ClusterFront | None = None  # None unless the settings name a node
        self.integrity_errors = 0
        self._command = command
        self._env = env
        self._on_ready, self._ports = on_ready, ports
        self._notifier = Notifier(env)
        self._stops = self._hosts = 0
        self._stopped = [asyncio.Event(), asyncio.Event()]  # drain, at once
        self._hung_up = asyncio.Event()
        self._socket_path: Path | None = None  # the Unix socket, where it is ours

    def stop(self) -> None:
        """Drains and then stops; called a second time, stops at once."""
        self._stopped[min(self._stops, 1)].set()
        self._stops += 1

    async def serve_with_signals(self) -> None:
        """Serves; SIGTERM, SIGINT and the end of the terminal stop it, SIGHUP reloads the ScoutGate."""
        loop = asyncio.get_running_loop()
        ends_with_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and _has_terminal()  # else nohup

        def hung_up() -> None:
            if ends_with_terminal and not _has_terminal():
                drop_unwritable()  # log lines may still come
                self.stop()
            else:
                self._hung_up.set()

        loop.add_signal_handler(signal.SIGHUP, hung_up)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.serve()

    async def serve(self) -> None:
        """Serves until `stop`. Raises ServiceError, CheckpointError, alone or in a group."""
        settings = self.settings
        runtime = private_directory(Path(settings.service.runtime_dir))
        with contextlib.ExitStack() as held:
            held.enter_context(sole_owner(runtime, _elsewhere(settings)))
            keys = KeyRing(Path(settings.api.api_key_file)) if settings.api.needs_keys else None
            self.pool = pool = ModelPool(settings, served_models(settings), self._doors(runtime, keys))
            held.callback(pool.close_wires)
            self.supervisor = pool.first.supervisor
            self.api = api = await pool.open_first()
            held.callback(api.threads.shutdown, wait=False, cancel_futures=True)
            if self.cluster is not None:
                self.cluster.hosted_http.app = build_forwarded(api)
                self.cluster.listen()
            await self._serve(pool, Server(self._apps(api, held), settings.api.max_connections))

    def _doors(self, runtime: Path, keys: KeyRing | None) -> PoolDoors:
        return PoolDoors(
            host=partial(self._host, runtime),
            api=partial(self._open_api, keys),
            store=self._find_store,
            facts=facts_of,
            room=room_of,
            reread=self._reread,
            cluster=lambda: self.cluster,
        )

    def _host(self, runtime: Path, name: str, served: ServedModelSettings, turn: StartTurn) -> ModelHost:
        """Makes the supervisor of a model's engine, with a socket of its own."""
        settings, number = served.engine, self._hosts
        self._hosts += 1
        wire = IpcServer(runtime, name=f"engine-{number}.ipc" if number else "engine.ipc")
        requests = RequestRouter(settings.engine, LocalConnection(wire))
        snapshots = ClusterSnapshots(requests.connection)
        cluster: ClusterFront | None = None
        if settings.cluster.node:
            from edgemoe.front.cluster_front import ClusterFront  # a box on its own loads nothing of the cluster

            cluster = ClusterFront(settings, requests, snapshots)
        self.cluster = self.cluster or cluster
        wanted = served.is_pinned
        supervisor = Supervisor(settings, requests, self._command, snapshots, cluster, turn, is_wanted=wanted)
        supervisor.ends_when_fatal = not number and not self._notifier.has_manager  # else it is restarted for ever
        supervisor.reread = lambda: served_models(self._present_settings())[name].engine
        self._show_metrics(supervisor, self.metrics if not number else self.metrics.of(name))
        return ModelHost(name, served, supervisor, wire.close, time.monotonic())

    def _present_settings(self) -> Settings:
        """Returns the settings as they are now, with the first model's path and name that were found at the start."""
        fresh = self._reread()
        return msgspec.structs.replace(fresh, model=self.settings.model)

    async def _open_api(self, keys: KeyRing | None, host: ModelHost, path: Path) -> Api:
        """Reads a model's tokenizer and chat template. Raises CheckpointError, StoreError."""
        settings, first = self.settings, self.api
        prompts = BoundedText(text_command(path))
        text = await _text_model(path, prompts)
        give_back()  # reading a large tokenizer leaves as much freed memory as it keeps
        shared = (
            {} if first is None else {name: getattr(first, name) for name in ("threads", "thread_turns", "large_turns")}
        )
        return Api(
            settings.api,
            host.supervisor,
            text,
            prompts,
            self.metrics if first is None else self.metrics.of(host.name),
            keys,
            node=settings.cluster.node,
            shares_prefixes=settings.engine.share_prefixes,
            store=store_facts(path),
            choice=self.pool,
            **shared,
        )

    async def _serve(self, pool: ModelPool, server: Server) -> None:
        freeze_objects()
        async with asyncio.TaskGroup() as tasks:
            http = tasks.create_task(server.run_until_stopped(), name="http")

            async def essential(work: Coroutine[Any, Any, None]) -> None:
                """Runs work that the daemon needs. If it fails, clients get its error before the daemon ends."""
                try:
                    await work
                except Exception as error:
                    pool.stop(EngineUnavailable(f"the daemon ends: {error}"))
                    self._remove_socket()
                    server.stop()
                    await asyncio.wait([http])
                    raise

            helpers = [
                tasks.create_task(essential(pool.run()), name="engines"),
                tasks.create_task(self._heartbeat(pool), name="heartbeat"),
                tasks.create_task(self._reload_on_hangup(pool), name="reload"),
                tasks.create_task(give_back_often(), name="memory"),
            ]
            if self.cluster is not None:
                helpers.append(tasks.create_task(essential(self.cluster.run()), name="cluster"))
            await self._stopped[0].wait()
            log.info("stopping", extra={"live": pool.count_live(), "drain_s": self.settings.service.drain_s})
            self._notifier.notify_manager(STOPPING="1", STATUS="finishing running requests")
            await _either(self._wind_down(pool), self._stopped[1].wait())
            pool.stop()
            self._remove_socket()
            server.stop()
            await pool.close()
            if self.cluster is not None:
                await self.cluster.leave()
            for helper in helpers:
                helper.cancel()
        log.info("stopped")

    async def _wind_down(self, pool: ModelPool) -> None:
        """Waits for other boxes to fetch missing experts, then for running requests."""
        if self.cluster is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(HAND_OVER_S, self.settings.service.drain_s)):
                    await self.cluster.leave_experts()
        await pool.drain(self.settings.service.drain_s)

    async def _heartbeat(self, pool: ModelPool) -> None:
        """Keeps the service manager informed that this process is alive, ready, or loading."""
        notified_ready, shown_ready, status_line = False, False, ""
        while True:
            fields = {"WATCHDOG": "1"}
            state = pool.state
            is_ready = state == "ready"
            if not notified_ready and (is_ready or state == "failed"):  # errors are answers too
                fields["READY"] = "1"
            elif not notified_ready or self._stopped[0].is_set():
                fields["EXTEND_TIMEOUT_USEC"] = str(LOADING_MARGIN_S * 1_000_000)
            if (status := pool.summary()) != status_line:
                status_line = fields["STATUS"] = status
            if self._notifier.notify_manager(**fields):
                notified_ready |= "READY" in fields
                if is_ready and not shown_ready and self._on_ready is not None:
                    shown_ready = True
                    with contextlib.suppress(OSError):  # the reader of our output has gone, or its disk is full
                        self._on_ready()
            self._check(pool)
            await asyncio.sleep(until_tick(min(TICK_S, self._notifier.watchdog_s / 3 or TICK_S)))

    async def _reload_on_hangup(self, pool: ModelPool) -> None:
        while True:
            await self._hung_up.wait()
            self._hung_up.clear()
            try:
                log.info("reloaded", extra={"answer": await pool.reload()})
            except RequestError as error:
                log.warning("not reloaded", extra={"error": str(error)})

    def _check(self, pool: ModelPool) -> None:
        try:
            pool.check_integrity()
        except AssertionError as error:
            self.integrity_errors += 1
            log.error("the front contradicts itself", extra={"error": str(error)})

    def _remove_socket(self) -> None:
        """Removes our own Unix socket, so that no client connects without an answer."""
        if self._socket_path is not None:
            remove_file(self._socket_path, missing_ok=True)
            self._socket_path = None

    def _apps(self, api: Api, held: contextlib.ExitStack) -> dict[socket.socket, ASGIApp]:
        """Returns the applications by socket: the service manager's sockets, or our own, and the TCP ports."""
        settings, ports = api.settings, self._ports or bound_ports(api.settings)
        for bound in filter(None, ports):
            held.callback(bound.close)
        sockets = passed_sockets(self._env)
        if not sockets:
            path = Path(settings.socket)
            sockets.append(unix_socket(path, settings.socket_group))
            self._socket_path = path
            held.callback(self._remove_socket)
        if ports.tcp is not None:
            sockets.append(listening(ports.tcp, settings.tcp))
        apps: dict[socket.socket, ASGIApp] = dict.fromkeys(sockets, build(api))
        if ports.ollama is not None:
            apps[listening(ports.ollama, settings.ollama_address, OLLAMA_TCP)] = build_ollama(api)
        for one in apps:
            held.callback(one.close)
            log.info("listening", extra={"address": one.getsockname()})
        return apps

    def _show_metrics(self, supervisor: Supervisor, metrics: Metrics) -> None:
        requests, gauge, counter = supervisor.requests.machine, metrics.gauge, metrics.counter
        gauge("edgemoe_live_requests", "Choices accepted and not finished", lambda: len(requests))
        counter("edgemoe_engine_starts_total", "Engines started", lambda: supervisor.starts)
        counter(
            "edgemoe_replayed_requests_total",
            "Choices submitted again after an engine's end",
            lambda: requests.resubmitted,
        )
        counter("edgemoe_stale_emissions_total", "Emissions of an attempt that is over", lambda: requests.stale)
        counter("edgemoe_integrity_errors_total", "Contradictions found in the front", lambda: self.integrity_errors)


async def _either(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits for the first of these, cancels the others, and raises its error."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


def _elsewhere(settings: Settings) -> str:
    """Returns the remedy if another daemon runs already, by the setting that both share."""
    socket_path = Path(settings.api.socket)
    if Path(settings.service.runtime_dir) == beside(socket_path):
        return f"it serves {socket_path}: use that one, stop it, or give this one another with --socket (api.socket)"
    return "stop it, or set service.runtime_dir to another directory"


async def _text_model(directory: Path, prompts: BoundedText) -> TextModel:
    """Returns the store's tokenizer and chat template, after a bounded process has read them.

    Raises CheckpointError, StoreError.
    """
    if (directory / MANIFEST).is_file():  # without one the engine reports the error
        await asyncio.to_thread(lambda: verify_copies(directory, Manifest.read(directory)))
    await prompts.check()
    return await asyncio.to_thread(TextModel, directory)


def _has_terminal() -> bool:
    """Returns whether a terminal controls this process: tty(4)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _raise_file_limit() -> None:
    """Raises the soft limit of open files, since each client is one and the default is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
