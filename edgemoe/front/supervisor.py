"""Keeps an engine running, and the front's requests on it.

* loading --Ready--> ready --death or hang--> loading (after a back-off; live requests are submitted again)
* ready --unload--> unloaded --a request--> loading (models that a daemon serves beside others)
* any --too many deaths--> failed (typed errors; another start when the window has passed, or at a reload)
* any --drain--> draining (nothing new is accepted; an engine that dies is still replaced)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from edgemoe.api.backend import NOTHING, BoxSnapshot, State
from edgemoe.config.settings import Settings
from edgemoe.errors import (
    ConfigError,
    EdgemoeError,
    EngineUnavailable,
    MembersRefused,
    ReloadRefused,
    RequestError,
    ServiceError,
)
from edgemoe.front.cluster_snapshots import ClusterSnapshots
from edgemoe.front.engine_process import LOOK_S, STOP_S, EngineProcess
from edgemoe.front.engine_starts import FailedStarts, ProcessDeath, RestartBackoff, keeps_failing
from edgemoe.front.peer_boxes import PeerBoxes
from edgemoe.front.request_events import EnginesChanged, TimePassed, TokensEmitted
from edgemoe.front.request_router import ClientSubmission, RequestRouter
from edgemoe.front.start_turn import StartAtOnce, StartForgone, StartTurn
from edgemoe.ipc.messages import Emissions, FromEngine, Ready, Reload, SnapshotReply, Stop
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.ticking import until_tick
from edgemoe.types.model_info import ModelInfo, loading_text
from edgemoe.types.request import Principal, Request, RequestLimits

log = logging.getLogger(__name__)

RELOAD_S = 60.0  # that an engine has to reload its ScoutGate
SETTINGS_S = 2.0  # between checks of the settings of an engine that cannot start
SHUTTING_DOWN = EngineUnavailable("the server is shutting down", code="draining")
ENGINES_OWN = ("memory", "device", "engine", "cache", "record", "log")  # settings that a new engine may get
CANNOT_START_S = 30.0  # after which a client may ask again


class Supervisor:
    """Runs one engine after the other. Implements the API's `Backend`."""

    def __init__(
        self,
        settings: Settings,
        requests: RequestRouter,
        command: Sequence[str],
        snapshots: ClusterSnapshots,
        cluster: PeerBoxes | None = None,
        turn: StartTurn | None = None,
        *,
        is_wanted: bool = True,
    ) -> None:
        """Starts the first engine at once with `is_wanted`, else when the model is asked for."""
        self.settings, self.requests = settings, requests
        self._connection = requests.connection
        self._state: State = "loading" if is_wanted else "unloaded"
        self._turn = turn or StartAtOnce()
        self._wanted = asyncio.Event()  # there are requests for the model, or it is pinned
        self._unloading = False  # its engine is stopped on purpose
        if is_wanted:
            self._wanted.set()
        self.starts = 0
        self.why = ""  # the reason for the last engine's end
        self._command, self._snapshots, self._cluster = command, snapshots, cluster
        self._backoff, self._say = RestartBackoff(settings.service), RateLimitedLog(log)
        self._failed_starts = FailedStarts(settings.service.max_restarts)
        self._cannot_start: FailedStarts | None = None  # while no start is tried
        self._try_again = asyncio.Event()
        self.reread: Callable[[], Settings] = lambda: self.settings  # the settings as they are now
        self.ends_when_fatal = True
        self._served: tuple[ModelInfo, RequestLimits] | None = None
        self._stopping = False
        self._changed = asyncio.Event()  # pulsed at each change of state
        self._reloading = asyncio.Lock()

    # --- the api's Backend ---

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics of the engine's last Stats and of the cluster."""
        metrics = self.engine_metrics()
        return metrics if self._cluster is None else {**metrics, **self._cluster.metrics()}

    @property
    def state(self) -> State:
        """Returns the server's state; `stalled` if a ready engine is silent for longer than usual."""
        stalls = self._connection.engine is not None and self._connection.engine.stalls
        return "stalled" if self._state == "ready" and stalls else self._state

    async def model(self) -> tuple[ModelInfo, RequestLimits]:
        """Returns the model and the limits of a request.

        Waits for the first engine. Raises EngineUnavailable if its start makes no progress for `api.request_timeout_s`.
        """
        self.request_load()
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while self._served is None:
            if self.requests.closed is not None:
                raise self.requests.closed.with_traceback(None)  # as RequestRouter raises it
            still_s = min(clock() - began_s, self.still_s)
            if still_s >= self.settings.api.request_timeout_s:
                raise EngineUnavailable(f"the model is still loading{self._how_far()}; try again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.api.request_timeout_s - still_s):
                    await self._changed.wait()
        return self._served

    @property
    def still_s(self) -> float:
        """Returns the seconds since the start last made progress; endless where nothing is known."""
        if (waits := self._turn.progress()) is not None:
            return waits.still_s
        return math.inf if self._connection.engine is None else self._connection.engine.still_s

    def request_load(self) -> None:
        """Loads the model where it is not loaded."""
        if not self._wanted.is_set():
            self._wanted.set()
            if self._state == "unloaded":
                self._change("loading")

    @property
    def served(self) -> tuple[ModelInfo, RequestLimits] | None:
        """Returns the model and the limits of a request; None before the first engine is ready."""
        return self._served

    @property
    def is_idle(self) -> bool:
        """Returns whether the model is loaded, and no request is alive."""
        return self._state == "ready" and not len(self.requests)

    @property
    def is_unloading(self) -> bool:
        """Returns whether the engine is being stopped on purpose."""
        return self._unloading

    @property
    def reason(self) -> str:
        """Returns the reason why the model cannot be loaded; "" where it can."""
        return self._cannot_start.reason if self._cannot_start is not None else ""

    def engine_metrics(self) -> Mapping[str, float]:
        """Returns the metrics of the engine's last Stats."""
        return self._connection.engine.stats.values if self._connection.engine else {}

    async def unload(self) -> None:
        """Stops the engine. The next request for the model starts another one."""
        engine = self._connection.engine
        if self._state != "ready" or engine is None or self._unloading:
            return
        log.info("model unloaded", extra={"model": self.settings.model.name})
        self._unloading, self._served = True, None
        self._wanted.clear()
        self._change("unloaded")
        is_asked = self._connection.send(Stop())
        engine.retire()
        self._engine_changed()
        await engine.exits(STOP_S if is_asked else 0.0)

    def check_room(self, principal: Principal, wanted: int) -> None:
        """Raises QueueFull or InvalidRequest where the principal can have no `wanted` requests."""
        self.requests.machine.check_room(principal, wanted)

    def open(
        self, requests: Sequence[Request], timeout_s: float, emitted: Mapping[str, Sequence[int]] = NOTHING
    ) -> AbstractContextManager[ClientSubmission]:
        """Accepts requests as RequestRouter.open does."""
        self.request_load()
        return self.requests.open(requests, timeout_s, emitted)

    def snapshots(self) -> Sequence[BoxSnapshot]:
        """Returns the latest snapshots of all engines, and asks for new ones."""
        return self._snapshots.latest()

    async def reach(self) -> list[dict[str, Any]]:
        """Returns how this box and the others reach each other."""
        return await self._snapshots.reach()

    async def list_members(self) -> dict[str, Any]:
        """Returns the boxes of the cluster, with their votes. Raises MembersRefused for a box on its own."""
        return await self._in_cluster().list_members()

    async def change_members(self, verb: str, node: str, *, dead: bool, hours: float) -> str:
        """Changes the members of the cluster. Returns a message about the change. Raises MembersRefused."""
        return await self._in_cluster().change_members(verb, node, dead=dead, hours=hours)

    def _in_cluster(self) -> PeerBoxes:
        if self._cluster is None:
            raise MembersRefused("this daemon is a box on its own; `edgemoe cluster init` begins a cluster")
        return self._cluster

    def summary(self) -> str:
        """Returns the server's state in one line, for the service manager."""
        if self._cannot_start is not None:
            return f"{self.state}: {self._cannot_start.reason}"
        return f"{self.state}{self._how_far() if self.state == 'loading' else ''}, {len(self.requests)} requests"

    def describe(self) -> dict[str, Any]:
        """Returns the body of /health."""
        engine, served = self._connection.engine, self._served
        about = {} if self._cluster is None else {"cluster": self._cluster.describe()}
        return about | {
            "status": self.state,
            "model": msgspec.to_builtins(served[0]) if served else None,
            "loading": self.describe_loading(),
            "cannot_start": self._cannot_start.describe() if self._cannot_start else None,
            "engine": {"pid": engine.process.pid if engine else None, "starts": self.starts, "last_end": self.why},
            "requests": self.requests.describe(),
            "quarantine": self.requests.machine.quarantine.describe(),
        }

    def describe_loading(self) -> dict[str, Any] | None:
        """Returns the progress of loading, for /health; None while nothing is loaded."""
        if self._state not in ("loading", "draining"):
            return None
        if (waits := self._turn.progress()) is not None:
            seconds = round(waits.seconds, 1)
            return {"phase": "waiting", "fraction": 0.0, "detail": waits.detail, "phase_s": seconds, "seconds": seconds}
        engine = self._connection.engine
        return engine.describe_loading() if engine is not None else None

    async def reload(self) -> str:
        """Has the engine load its ScoutGate again while requests go on. Returns a message about the one in use.

        After a failure, starts an engine with the present settings instead. Raises ReloadRefused if the old ScoutGate
        stays, EngineUnavailable if no engine answers in time.
        """
        async with self._reloading:
            if self._state == "failed":
                return await self._start_again()
            engine = self._connection.engine
            if engine is None or not self._connection.send(Reload()):
                raise EngineUnavailable("no engine is ready to load ScoutGate again; one that starts loads the new one")
            try:
                async with asyncio.timeout(RELOAD_S):
                    answer = await engine.next_reloaded()
            except TimeoutError:
                raise EngineUnavailable(f"the engine has not answered for {RELOAD_S:.0f} s; see the log") from None
        if answer.refused:
            raise ReloadRefused(answer.message)
        return answer.message

    # --- running ---

    async def run(self) -> None:
        """Keeps an engine alive until drained or cancelled. Raises ServiceError if none can ever start."""
        while True:
            await self._wanted.wait()
            if self._stopping:
                return
            death = await self._incarnation()
            if self._unloading:
                self._forget_engine()
                continue
            self.why = death.cause
            if not self._stopping:
                log.error("engine ended", extra={"why": self.why, "live": len(self.requests)})
                await self._after(death)

    def _forget_engine(self) -> None:
        """Forgets the engine that was unloaded, and its failures."""
        self._unloading, self._connection.engine, self.why = False, None, ""
        self._failed_starts = FailedStarts(self.settings.service.max_restarts)
        self._backoff = RestartBackoff(self.settings.service)

    async def listen(self) -> None:
        """Acts on the engine's messages until cancelled."""
        async for boot_id, message in self._connection.wire.messages():
            engine = self._connection.engine
            if engine is None or boot_id != engine.boot_id:
                continue  # an earlier incarnation's last words
            try:
                self._on_message(engine, message)
            except Exception:  # of this message alone
                self._say(logging.ERROR, "a message of the engine failed here", exc_info=True)

    def _on_message(self, engine: EngineProcess, message: FromEngine | None) -> None:
        match engine.on_message(message):
            case Ready() as ready:
                if engine.is_up:  # it has not died meanwhile
                    self._on_ready(ready)
            case Emissions(items=items):
                self.requests.handle(
                    TokensEmitted("", items if self._cluster is None else self._cluster.pass_on_emissions(items))
                )
            case SnapshotReply() as seen:
                self._snapshots.on_own_snapshot(seen)
            case None:
                pass
            case news:
                if self._cluster is not None:
                    self._cluster.on_engine_message(engine.boot_id, news)

    async def drain(self, drain_s: float) -> None:
        """Lets running requests finish for `drain_s`, ends the rest with an error, and stops the engine."""
        self.requests.closed = SHUTTING_DOWN
        self.requests.draining = True
        self._change("draining")
        try:
            async with asyncio.timeout(drain_s):
                await self.requests.empty()
        except TimeoutError:
            log.warning("requests were cut off by the drain deadline", extra={"live": len(self.requests)})
            self.requests.fail_all(SHUTTING_DOWN)
        self._stopping = True
        self._wanted.set()
        if self._connection.engine is not None:
            await self._connection.engine.exits(STOP_S if self._connection.send(Stop()) else 0.0)

    def stop(self, why: RequestError = SHUTTING_DOWN) -> None:
        """Ends every request with an error and starts no further engine. The caller cancels `run`."""
        self._stopping, self.requests.closed = True, why
        self._wanted.set()
        self.requests.fail_all(why)
        self._pulse()  # wakes requests that wait for the first engine

    def check_integrity(self) -> None:
        """Raises AssertionError if requests and engine contradict each other."""
        self.requests.check_integrity()
        assert self.state != "ready" or (
            self._connection.engine is not None and self._connection.engine.ready is not None
        )

    async def _incarnation(self) -> ProcessDeath:
        """Waits for the turn to start, and runs one engine from start to end. Returns its death."""
        beginning = asyncio.ensure_future(self._turn.begin(self.settings))
        try:
            while not (await asyncio.wait([beginning], timeout=until_tick(LOOK_S)))[0]:
                self.requests.handle(TimePassed())
            return await self._run_engine(beginning.result())
        except StartForgone as error:
            self._wanted.clear()
            self._unloading, self._served = True, None
            self._change("unloaded")
            return ProcessDeath("forgone", str(error))
        except EdgemoeError as error:  # it may not start
            return ProcessDeath(type(error).__name__, str(error), "start", fatal=True)
        finally:
            beginning.cancel()
            self._turn.on_ended()

    async def _run_engine(self, settings: Settings) -> ProcessDeath:
        self.starts += 1
        try:
            engine = self._connection.engine = await EngineProcess.start(
                self._command, settings, self._connection.wire.address
            )
        except OSError as error:  # no memory for another process, say
            self._connection.engine = None
            return ProcessDeath("spawn", f"it cannot be started: {error}", "start")
        log.info("engine started", extra={"pid": engine.process.pid, "start": self.starts})
        ended = asyncio.ensure_future(engine.wait_for_end())
        try:
            while not (await asyncio.wait([ended], timeout=until_tick(LOOK_S)))[0]:
                why = engine.hang_reason()
                self.requests.handle(TimePassed())
                engine.log_loading()
                if why:
                    log.error("engine hangs", extra={"why": why})
                    return await engine.death_by_hanging(why)
            return ended.result()
        finally:
            ended.cancel()
            engine.kill()  # with its child processes
            if self._state == "ready":
                self._change("loading")
            self._engine_changed()
            while not await engine.wait_killed(LOOK_S):
                self.requests.handle(TimePassed())

    async def _after(self, death: ProcessDeath) -> None:
        """Waits until the next start is due."""
        if self._served is None and self._failed_starts.count_death(death):
            await self._until_tried_again(death)
        else:
            await self._pause()

    async def _pause(self) -> None:
        """Waits for the back-off before the next start."""
        now = time.monotonic()
        delay_s, gives_up = self._backoff.after_death(now, self.requests.machine.blamed)
        if gives_up:
            self._give_up(delay_s)
        until = now + delay_s
        while not self._stopping and not self._try_again.is_set() and time.monotonic() < until:
            self.requests.handle(TimePassed())
            if self.state == "failed":
                error = keeps_failing(self.why, until - time.monotonic())
                self.requests.closed = None if self.requests.elsewhere else error
            await asyncio.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
        self._go_on()

    async def _until_tried_again(self, death: ProcessDeath) -> None:
        """Fails every request with the reason until a reload or a changed setting.

        Raises ServiceError if the death is fatal and the daemon runs by hand.
        """
        if death.fatal and self.ends_when_fatal:
            raise ServiceError(f"the engine cannot start: {death.cause}")
        self._cannot_start, reason = self._failed_starts, self._failed_starts.reason
        log.error(reason)
        error = EngineUnavailable(reason, code="engine_failed", retry_after_s=CANNOT_START_S)
        if self._state != "draining":
            self.requests.closed = error
            self._change("failed")
        while not self._stopping and not self._try_again.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTINGS_S):
                    await self._try_again.wait()
            with contextlib.suppress(ConfigError, OSError):  # a file that is being written
                if await self._reread_settings():
                    break
        self._failed_starts, self._cannot_start = FailedStarts(self.settings.service.max_restarts), None
        self._backoff = RestartBackoff(self.settings.service)
        self._go_on()

    def _go_on(self) -> None:
        """Accepts requests again that were refused because of a failure."""
        if self._try_again.is_set() or self._served is None:
            self._try_again.clear()
            if self._state == "failed":
                self.requests.closed = None
                self._change("loading")

    async def _start_again(self) -> str:
        """Starts an engine with the present settings. Raises ReloadRefused if these are wrong."""
        try:
            changed = await self._reread_settings()
        except (ConfigError, OSError) as error:
            raise ReloadRefused(f"no engine is started: {error}") from error
        self._try_again.set()
        told = f", with what has changed in {', '.join(changed)}" if changed else ""
        return f"the engine is started again{told}; `edgemoe status` shows how far it is"

    async def _reread_settings(self) -> list[str]:
        """Reads the engine's own settings again. Returns the names of changed sections."""
        fresh = await asyncio.to_thread(self.reread)
        changed = [name for name in ENGINES_OWN if getattr(fresh, name) != getattr(self.settings, name)]
        self.settings = msgspec.structs.replace(self.settings, **{name: getattr(fresh, name) for name in changed})
        return changed

    def _how_far(self) -> str:
        at = self.describe_loading()
        last = f"the engine before it ended: {self.why}" if self.why else ""
        told = [loading_text(at)] if at is not None else []
        return f" ({'; '.join([*told, *([last] if last else [])])})" if told or last else ""

    def _give_up(self, delay_s: float) -> None:
        error = keeps_failing(self.why, delay_s)
        elsewhere = self.requests.elsewhere
        if not elsewhere:
            self.requests.fail_all(error)
        if self.state != "draining":
            self.requests.closed = None if elsewhere else error
            self._change("failed")

    def _on_ready(self, ready: Ready) -> None:
        self._turn.on_started()
        context_tokens = min(ready.limits.context_tokens, ready.limits.kv_tokens)
        self._served = (ready.model, RequestLimits(context_tokens, ready.model.vocab))
        self.requests.fit(ready.limits)
        fields = {"model": ready.model.id, "context_tokens": context_tokens, "replayed": len(self.requests)}
        log.info("engine ready", extra=fields)
        if self.state != "draining":
            self.requests.closed = None
            self._change("ready")
        self._engine_changed()

    def _engine_changed(self) -> None:
        if self._cluster is not None:
            self._cluster.on_engine_changed()
        if self._cluster is not None or self._connection.place:  # else no engine can take any
            self.requests.handle(EnginesChanged())

    def _change(self, state: State) -> None:
        self._state = state
        self._pulse()

    def _pulse(self) -> None:
        self._changed.set()
        self._changed.clear()
