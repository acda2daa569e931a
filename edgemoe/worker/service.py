"""Runs the engine on its event loop: loads it, passes messages and metrics, and ends it.

A life in order: budgets, weights, tiers, warm-up | Ready | Submit and Cancel in, Emissions and Stats out | Stop, or
the end of the step loop. Errors are sent as Failed before the exit, as far as that is possible.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgemoe.config.settings import Settings
from edgemoe.engine.loop import StepLoop
from edgemoe.engine.stage_host import StageHost
from edgemoe.errors import ConfigError, EdgemoeError, MissingExpert, ServiceError, WireError, first_error
from edgemoe.guard import refuse_pickle
from edgemoe.heap import freeze_objects
from edgemoe.ipc.engine_socket import IpcClient, end_of
from edgemoe.ipc.messages import (
    PLACE_BYTES,
    Boot,
    Cancel,
    Drain,
    Emissions,
    Failed,
    FetchPrefixKV,
    Limits,
    Loading,
    MessageRefused,
    PeerList,
    Ping,
    Plan,
    PrefixSignatureRequest,
    Ready,
    Reload,
    Reloaded,
    SnapshotRequest,
    Stats,
    Stop,
    Submit,
    ToEngine,
)
from edgemoe.store.row_table import RowTable
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.ticking import until_tick
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS
from edgemoe.worker.assemble import Assembly, assemble
from edgemoe.worker.disk_prefixes import DiskPrefixes
from edgemoe.worker.prefix_files import PrefixFiles
from edgemoe.worker.snapshot_feed import SnapshotFeed

if TYPE_CHECKING:
    from edgemoe.worker.cluster_member import ClusterMember

log = logging.getLogger(__name__)

STATS_S = 0.5
JOIN_S = 3.0  # that the step in progress has to end when the engine is stopped
READY = "ready"  # the phase that ends loading
KV_FOLDER = ".kv"  # beside the stores
WARM_UP = "\0warm-up"  # no front's request has such a name
WARM_UP_TOKENS = 80  # of prompt: more than a decode-sized batch
MESSAGE_CHARS = 4000


class Worker:
    """Runs one engine process from Boot to exit, on the event loop except for `_emit` on the compute thread."""

    def __init__(self, boot: Boot, settings: Settings, parent: int) -> None:
        self._boot, self._settings, self._parent = boot, settings, parent
        self._loop = asyncio.get_running_loop()
        self._wire = IpcClient(boot.address, boot.boot_id, boot.speaks)
        self._loading, self._log = Loading(phase="start"), RateLimitedLog(log)
        self._warm: asyncio.Future[Emission] = self._loop.create_future()
        self._stop_asked = asyncio.Event()
        self._reload_asked = asyncio.Event()
        self._side: ClusterMember | None = None  # towards other boxes
        self._disk: DiskPrefixes | None = None  # with memory.kv_disk_bytes
        self._snapshots: SnapshotFeed | None = None  # from when there is something to see

    async def run(self) -> int:
        """Serves until stopped. Returns the exit status."""
        error: BaseException | None = None
        try:
            await self._serve()
        except BaseExceptionGroup as group:
            error = first_error(group)
        if error is not None:
            known = isinstance(error, EdgemoeError)
            log.error(f"engine failed: {error}", exc_info=None if known else error)
            fatal = known and self._loading.phase != READY
            self._wire.post(Failed(error=type(error).__name__, message=str(error)[:MESSAGE_CHARS], fatal=fatal))
        await self._wire.close()
        return 0 if error is None else 1

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._tell_loading(), name="loading"),
                tasks.create_task(self._watch_parent(), name="parent"),
            ]
            # Loads on a thread that ends, so that its OpenMP threads end too. With more of them than cores, all sleep
            # between any two products of a prompt.
            with ThreadPoolExecutor(1) as once:
                loading = partial(assemble, self._settings, self._emit, self._report_phase)
                assembly = await self._loop.run_in_executor(once, loading)
            computing = tasks.create_task(self._compute(assembly), name="compute")
            helpers.append(tasks.create_task(assembly.tiers.run(), name="tiers"))
            if self._settings.cluster.node:
                self._side = self._cluster_member(assembly)
                self._side.listen()
                helpers.append(tasks.create_task(self._side.run(), name="cluster"))
            if self._settings.memory.kv_disk_bytes and self._settings.engine.prefix_cache:
                files = await asyncio.to_thread(_open_files, assembly)
                self._disk = DiskPrefixes(assembly.engine, files, partial(_submit, assembly.engine.loop))
                helpers.append(tasks.create_task(self._disk.run(), name="disk prefixes"))
                if self._side is not None:
                    forget_all = self._disk.forget_all
                    self._side.forget_saved = lambda: helpers.append(tasks.create_task(forget_all()))
            if assembly.scrubber is not None:
                helpers.append(tasks.create_task(assembly.scrubber.run(), name="scrubber"))
                if self._side is not None:
                    self._side.checker.mend = assembly.scrubber.check_all
            self._snapshots = SnapshotFeed(assembly.engine, assembly.tiers, self._wire.post)
            helpers.append(tasks.create_task(self._snapshots.run(), name="snapshots"))
            helpers.append(tasks.create_task(self._listen(assembly), name="listen"))
            await self._warm_up(assembly)
            refuse_pickle()
            freeze_objects()
            self._report_phase(READY)
            self._wire.post(self._ready(assembly))
            helpers.append(tasks.create_task(self._report(assembly), name="stats"))
            helpers.append(tasks.create_task(self._reload_when_asked(assembly), name="reload"))
            await self._stop_asked.wait()
            assembly.engine.loop.stop()
            if (await asyncio.wait([computing], timeout=JOIN_S))[0]:
                assembly.engine.check_integrity()
                assembly.tiers.check_integrity()
            for helper in (*helpers, computing):
                helper.cancel()
        if self._side is not None:
            self._side.close()
        assembly.close()

    # --- coming up

    def _cluster_member(self, assembly: Assembly) -> ClusterMember:
        """Returns this engine as a member of the cluster. Raises ConfigError."""
        from edgemoe.worker.cluster_member import ClusterMember  # a box on its own loads nothing of the cluster

        assert assembly.sharing is not None
        cluster, boot = self._settings.cluster, self._boot.boot_id
        own = assembly.model, assembly.engine, assembly.tiers, assembly.sharing
        member = ClusterMember(cluster, boot, *own, self._wire.post)
        if assembly.stages is not None:
            member.join_stages(assembly.stages)
        return member

    def _report_phase(self, phase: str, fraction: float = 0.0, detail: str = "", /) -> None:
        if phase != self._loading.phase:
            log.info("engine", extra={"phase": phase})
        self._loading = Loading(phase=phase, fraction=fraction, detail=detail)
        if self._boot.place_fd >= 0:
            written = f"{phase}: {detail}" if detail else phase
            os.pwrite(self._boot.place_fd, written.encode()[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0"), 0)

    async def _tell_loading(self) -> None:
        while self._loading.phase != READY:
            self._wire.post(self._loading)
            await asyncio.sleep(until_tick(STATS_S))

    async def _warm_up(self, assembly: Assembly) -> None:
        """Runs a request through prefill and decode, so that everything made at first use exists before Ready.

        It has all the time that it takes, while it comes to further layers: from a slow disk, that is minutes.
        """
        self._report_phase("warm-up")
        if assembly.stages is not None and assembly.stages.host is not None:
            await self._warm_up_stage(assembly.stages.host)
            return
        prompt = (0,) * min(WARM_UP_TOKENS, assembly.engine.limits.context_tokens - 4)
        request = Request(id=WARM_UP, prompt=prompt, sampling=Sampling(temperature=0.0, max_tokens=4), seed=0)
        assembly.engine.loop.submit(request, (), 1, math.inf)
        runner, layers = assembly.engine.runner, assembly.model.layers
        while not (await asyncio.wait([self._warm], timeout=STATS_S))[0]:
            begun = runner.layers_begun
            self._report_phase("warm-up", begun / layers, f"layer {begun} of {layers}")
        end = self._warm.result()
        if self._side is not None and end.error_code in ("missing_expert", "stage_unavailable"):
            log.warning("not warmed up: the boxes that have the model's other parts are not here yet")
        elif end.finish == "error":
            raise ServiceError(f"the model does not run: {end.error}")
        if assembly.activity is not None:
            assembly.activity.clear()  # nobody asked for it

    async def _warm_up_stage(self, host: StageHost) -> None:
        """Computes rows that belong to nobody, as `_warm_up` does a request."""
        try:
            await asyncio.wrap_future(host.warm_up(WARM_UP_TOKENS))
        except MissingExpert as error:
            log.warning("not warmed up: the boxes that have the other experts are not here yet", extra={"why": error})

    def _ready(self, assembly: Assembly) -> Ready:
        engine, settings = assembly.engine, self._settings.engine
        limits = Limits(
            context_tokens=engine.limits.context_tokens,
            kv_tokens=engine.blocks.count * BLOCK_TOKENS,
            max_sequences=engine.max_sequences,
            max_queue=settings.max_queue,
        )
        takes = assembly.stages is None or assembly.stages.takes_requests
        return Ready(boot_id=self._boot.boot_id, model=assembly.model, limits=limits, takes_requests=takes)

    # --- running

    async def _compute(self, assembly: Assembly) -> None:
        """Runs the compute thread until it ends. Raises its error."""
        ended: asyncio.Future[None] = self._loop.create_future()

        def started(error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(_resolve, ended, error)

        assembly.engine.start(assembly.budgets.threads, started)
        await ended

    def _emit(self, items: list[Emission]) -> None:
        if self._disk is not None:
            self._disk.on_emissions(items)
        if self._warm.done() or items[-1].request != WARM_UP:
            self._wire.post(Emissions(items=items))
        elif items[-1].finish:
            self._loop.call_soon_threadsafe(self._warm.set_result, items[-1])

    async def _listen(self, assembly: Assembly) -> None:
        async for message in self._wire.messages():
            try:
                self._on_message(message, assembly)
            except WireError:  # there is no front any more
                raise
            except Exception as error:  # of this message alone
                self._fail(message, error)

    def _fail(self, message: ToEngine, error: Exception) -> None:
        """Logs a message that could not be handled, and ends the request of a Submit."""
        self._log(logging.ERROR, "a message of the front failed here", what=type(message).__name__, exc_info=True)
        if isinstance(message, Submit):
            why = f"the engine cannot begin with this request: {type(error).__name__}; see its log"
            ended = end_of(message, why, "request_failed")
            self._wire.post(Emissions(items=[ended]))

    def _on_message(self, message: ToEngine, assembly: Assembly) -> None:
        loop = assembly.engine.loop
        match message:
            case Submit():
                if assembly.sharing is not None:
                    assembly.sharing.last_chunks.register(message)
                if self._side is not None:
                    self._side.demand.register(message)
                if self._disk is not None:
                    self._disk.accept(message)
                else:
                    _submit(loop, message)
            case Cancel():
                if assembly.sharing is not None:
                    assembly.sharing.last_chunks.forget(message.request, message.attempt)
                if self._side is not None:
                    self._side.on_message(message)
                if self._disk is not None:
                    self._disk.cancel(message.request, message.attempt)
                loop.cancel(message.request, message.attempt)
            case Drain():
                loop.drain()
            case Ping():
                self._wire.post(self._stats(assembly))
            case SnapshotRequest():
                if self._snapshots is not None:
                    self._snapshots.extend()
            case Reload():
                self._reload_asked.set()
            case PeerList() | Plan() | FetchPrefixKV() | PrefixSignatureRequest():
                if self._side is not None:
                    self._side.on_message(message)
            case Stop():
                self._stop_asked.set()
            case MessageRefused():
                log.warning("the front cannot read what was sent", extra={"what": message.what, "why": message.why})

    async def _report(self, assembly: Assembly) -> None:
        while True:
            self._wire.post(self._stats(assembly))
            await asyncio.sleep(until_tick(STATS_S))

    async def _reload_when_asked(self, assembly: Assembly) -> None:
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            reloaded = await asyncio.to_thread(_reload, assembly)
            log.log(logging.WARNING if reloaded.refused else logging.INFO, reloaded.message)
            self._wire.post(reloaded)

    async def _watch_parent(self) -> None:
        """Ends the process when the front has gone, in case the kernel does not."""
        while True:
            await asyncio.sleep(until_tick(STATS_S))
            if os.getppid() != self._parent:
                os._exit(1)

    def _stats(self, assembly: Assembly) -> Stats:
        values = dict[str, float]()
        try:
            values = self._figures(assembly)
        except Exception:  # figures cost no engine
            self._log(logging.ERROR, "the engine's figures cannot be told", exc_info=True)
        return Stats(values=values, step_s=assembly.engine.runner.standstill_s())

    def _figures(self, assembly: Assembly) -> dict[str, float]:
        """Returns the numbers for /metrics by their final names."""
        metrics = assembly.engine.metrics() | assembly.tiers.metrics()
        for folder, size_bytes in assembly.store.read_bytes.items():
            metrics[names.named(names.STORE_READ_BYTES, folder=folder)] = size_bytes
        for part in (assembly.scoutgate, assembly.controller, assembly.scrubber, self._side, self._disk):
            if part is not None:
                metrics |= part.metrics()
        return metrics if assembly.table is None else metrics | row_metrics(assembly.table)


def _open_files(assembly: Assembly) -> PrefixFiles:
    """Opens the files of KV blocks. Raises ConfigError where their folder cannot be used."""
    prefixes, settings = assembly.engine.prefixes, assembly.settings
    root, most_bytes = Path(settings.model.store_dir).expanduser() / KV_FOLDER, settings.memory.kv_disk_bytes
    encoding = prefixes.encoding(assembly.model.digest)
    files = PrefixFiles(root, encoding, most_bytes, prefixes.entry_bytes)
    try:
        files.open()
    except OSError as error:
        why = f"memory.kv_disk_bytes: {root} cannot be used: {error.strerror}; set it to 0, or model.store_dir"
        raise ConfigError(why) from error
    return files


def _submit(loop: StepLoop, message: Submit) -> None:
    left_s, waited_s = message.remaining_ms / 1e3, message.waited_ms / 1e3
    loop.submit(message.request, message.emitted, message.attempt, left_s, waited_s)


def _reload(assembly: Assembly) -> Reloaded:
    """Reads the ScoutGate export again, on one core, because the others compute."""
    settings = assembly.settings
    if assembly.scoutgate is None:
        return Reloaded(message="there is nothing to load again: cache.scoutgate is not set")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assembly.scoutgate.load(Path(settings.cache.scoutgate))
    except ConfigError as error:
        return Reloaded(message=f"nothing was loaded, all stays as it was: {error}"[:MESSAGE_CHARS], refused=True)
    finally:
        torch.set_num_threads(threads)
    return Reloaded(message=f"the ScoutGate in {settings.cache.scoutgate} is in use")


def _resolve(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


def row_metrics(table: RowTable) -> dict[str, float]:
    """Returns the numbers for /metrics by their final names. May be called from any thread."""
    metrics: dict[str, float] = {named(names.ROWS_FOUND, where=where): n for where, n in table.found.items()}
    return metrics | {
        names.ROW_TABLE_BYTES: table.table_bytes,
        names.ROW_CACHE_BYTES: table.slots * table.row_bytes,
        names.ROW_SLOTS: table.slots,
        names.ROWS_HELD: table.held,
        names.ROW_READ_BYTES: table.read_bytes,
        names.ROW_WAIT_SECONDS: table.wait_s,
    }
