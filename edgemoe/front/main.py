"""Composes the front: application, requests, engine supervision, signals, the service manager.

Order: runtime directory and lock, sockets, tokenizer | engine starts, HTTP serves | ready | SIGTERM: running requests
finish within `service.drain_s` | engine stops, sockets close. A second signal skips the waiting. SIGHUP reloads the
ScoutGate, or stops once the starting terminal is closed. Nothing here imports torch or numba (a test asserts it).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.app import build, build_ollama
from edgemoe.api.metrics import Metrics
from edgemoe.api.resources import Api, StoreFacts
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.paths import beside
from edgemoe.config.settings import Settings
from edgemoe.durable import remove_file
from edgemoe.errors import EdgemoeError, EngineUnavailable, RequestError, first_error
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import dense_shapes
from edgemoe.front.cluster_front import ClusterFront
from edgemoe.front.cluster_snapshots import ClusterSnapshots
from edgemoe.front.connections import Server
from edgemoe.front.engine_process import LocalConnection
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
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.supervisor import Supervisor
from edgemoe.guard import refuse_pickle
from edgemoe.heap import freeze_objects, give_back, give_back_often, keep_freed
from edgemoe.ipc.engine_socket import IpcServer, private_directory
from edgemoe.store.manifest import MANIFEST, Manifest, verify_copies
from edgemoe.ticking import until_tick

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "edgemoe.worker")
TICK_S = 1.0
HAND_OVER_S = 15.0  # that other boxes have to fetch experts that only this box has
LOADING_MARGIN_S = 60  # by which each tick extends the service manager's limit for loading or draining
OPEN_FILES = 65536


def reserve(settings: Settings, env: Mapping[str, str] = os.environ) -> BoundPorts:
    """Binds the TCP addresses of the settings, if any, before the expensive work.

    Raises ServiceError if an address is in use, or another daemon runs with these settings.
    """
    with sole_owner(private_directory(Path(settings.service.runtime_dir)), _elsewhere(settings)):
        if "LISTEN_FDS" not in env:  # else the service manager holds the socket
            clear_path(Path(settings.api.socket))
        return bound_ports(settings.api)


def run(
    settings: Settings,
    command: Sequence[str] = WORKER,
    on_ready: Callable[[], None] | None = None,
    ports: BoundPorts | None = None,
    reread: Callable[[], Settings] | None = None,
) -> int:
    """Serves the packed store at `settings.model.path` until stopped. Returns the exit status.

    `settings` have their paths filled in; `reread` reads them again. `on_ready` is called once requests are answered;
    `ports` come from `reserve`. Raises ServiceError, CheckpointError if the front cannot start.
    """
    refuse_pickle()
    _raise_file_limit()
    keep_freed(mmap_bytes=1 << 20, trim_bytes=8 << 20)
    try:
        asyncio.run(Front(settings, command, on_ready=on_ready, ports=ports, reread=reread).serve_with_signals())
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return 0


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
    ) -> None:
        self.settings = settings
        self._reread = reread
        self.metrics = Metrics(settings.model.name)
        self.supervisor: Supervisor | None = None
        self.api: Api | None = None
        self.cluster: ClusterFront | None = None  # None unless the settings name a node
        self.integrity_errors = 0
        self._command = command
        self._env = env
        self._on_ready, self._ports = on_ready, ports
        self._notifier = Notifier(env)
        self._stops = 0
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
            prompts = BoundedText(text_command(Path(settings.model.path)))
            text = await _text_model(Path(settings.model.path), prompts)
            give_back()  # reading a large tokenizer leaves as much freed memory as it keeps
            wire = IpcServer(runtime)
            held.callback(wire.close)
            requests = RequestRouter(settings.engine, LocalConnection(wire))
            snapshots = ClusterSnapshots(requests.connection)
            self.cluster = ClusterFront(settings, requests, snapshots) if settings.cluster.node else None
            self.supervisor = supervisor = Supervisor(settings, requests, self._command, snapshots, self.cluster)
            supervisor.ends_when_fatal = not self._notifier.has_manager  # else it would be restarted again and again
            supervisor.reread = self._reread or supervisor.reread
            self.api = api = Api(
                settings.api,
                supervisor,
                text,
                prompts,
                self.metrics,
                keys,
                node=settings.cluster.node,
                shares_prefixes=settings.engine.share_prefixes,
                store=_store_facts(Path(settings.model.path)),
            )
            held.callback(api.threads.shutdown, wait=False, cancel_futures=True)
            self._show_metrics(supervisor)
            if self.cluster is not None:
                self.cluster.listen()
            await self._serve(supervisor, Server(self._apps(api, held), settings.api.max_connections))

    async def _serve(self, supervisor: Supervisor, server: Server) -> None:
        freeze_objects()
        async with asyncio.TaskGroup() as tasks:
            http = tasks.create_task(server.run_until_stopped(), name="http")

            async def essential(work: Coroutine[Any, Any, None]) -> None:
                """Runs work that the daemon needs. If it fails, clients get its error before the daemon ends."""
                try:
                    await work
                except Exception as error:
                    supervisor.stop(EngineUnavailable(f"the daemon ends: {error}"))
                    self._remove_socket()
                    server.stop()
                    await asyncio.wait([http])
                    raise

            helpers = [
                tasks.create_task(essential(supervisor.listen()), name="listen"),
                tasks.create_task(essential(supervisor.run()), name="engine"),
                tasks.create_task(self._heartbeat(supervisor), name="heartbeat"),
                tasks.create_task(self._reload_on_hangup(supervisor), name="reload"),
                tasks.create_task(give_back_often(), name="memory"),
            ]
            if self.cluster is not None:
                helpers.append(tasks.create_task(essential(self.cluster.run()), name="cluster"))
            await self._stopped[0].wait()
            log.info("stopping", extra={"live": len(supervisor.requests), "drain_s": self.settings.service.drain_s})
            self._notifier.notify_manager(STOPPING="1", STATUS="finishing running requests")
            await _either(self._wind_down(supervisor), self._stopped[1].wait())
            supervisor.stop()
            self._remove_socket()
            server.stop()
            if self.api is not None:
                await self.api.close()
            if self.cluster is not None:
                await self.cluster.leave()
            for helper in helpers:
                helper.cancel()
        log.info("stopped")

    async def _wind_down(self, supervisor: Supervisor) -> None:
        """Waits for other boxes to fetch missing experts, then for running requests."""
        if self.cluster is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(HAND_OVER_S, self.settings.service.drain_s)):
                    await self.cluster.leave_experts()
        await supervisor.drain(self.settings.service.drain_s)

    async def _heartbeat(self, supervisor: Supervisor) -> None:
        """Keeps the service manager informed that this process is alive, ready, or loading."""
        notified_ready, shown_ready, status_line = False, False, ""
        while True:
            fields = {"WATCHDOG": "1"}
            is_ready = supervisor.state == "ready"
            if not notified_ready and (is_ready or supervisor.state == "failed"):  # errors are answers too
                fields["READY"] = "1"
            elif not notified_ready or self._stopped[0].is_set():
                fields["EXTEND_TIMEOUT_USEC"] = str(LOADING_MARGIN_S * 1_000_000)
            if (status := supervisor.summary()) != status_line:
                status_line = fields["STATUS"] = status
            if self._notifier.notify_manager(**fields):
                notified_ready |= "READY" in fields
                if is_ready and not shown_ready and self._on_ready is not None:
                    shown_ready = True
                    with contextlib.suppress(OSError):  # the reader of our output has gone, or its disk is full
                        self._on_ready()
            self._check(supervisor)
            await asyncio.sleep(until_tick(min(TICK_S, self._notifier.watchdog_s / 3 or TICK_S)))

    async def _reload_on_hangup(self, supervisor: Supervisor) -> None:
        while True:
            await self._hung_up.wait()
            self._hung_up.clear()
            try:
                log.info("reloaded", extra={"answer": await supervisor.reload()})
            except RequestError as error:
                log.warning("not reloaded", extra={"error": str(error)})

    def _check(self, supervisor: Supervisor) -> None:
        try:
            supervisor.check_integrity()
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

    def _show_metrics(self, supervisor: Supervisor) -> None:
        requests, gauge, counter = supervisor.requests.machine, self.metrics.gauge, self.metrics.counter
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


def _store_facts(directory: Path) -> StoreFacts:
    """Returns the sizes of a packed store; zeros where it cannot be read, for the engine says why."""
    try:
        manifest = Manifest.read(directory)
        spec = spec_from_config(manifest.spec_config)
        modified_s = (directory / MANIFEST).stat().st_mtime
    except (EdgemoeError, OSError):
        return StoreFacts()
    dense = sum(math.prod(shape) for shape in dense_shapes(spec).values())
    experts = sum(len(layer.experts) for layer in manifest.layers)
    expert = 3 * spec.geometry.hidden * spec.geometry.width
    return StoreFacts(manifest.total_bytes, dense + experts * expert, modified_s)


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
