"""An engine that cannot start: the front stops trying, stays, and tells every client the same reason."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from starlette.routing import Route
from support.front_kit import SCRIPTED, http_client, settings_for
from support.waiting import until

from edgemoe.api.app import build
from edgemoe.api.queries import EMBEDDINGS
from edgemoe.cli.client import Client
from edgemoe.cli.doctor.checks import daemon
from edgemoe.cli.status_command import render, take_snapshot
from edgemoe.config.settings import Settings
from edgemoe.errors import ServiceError
from edgemoe.front import engine_process as engine_handle
from edgemoe.front import engine_starts, supervisor
from edgemoe.front.engine_starts import KEPT_LINES, LINE_CHARS, FailedStarts, LastLines, ProcessDeath
from edgemoe.front.main import Front

PHASES = ("start", "verifying", "kernels", "weights", "experts", "warm-up")
WITHOUT_ENGINE = {  # paths that are answered without an engine
    "/version",
    "/tokenizer_info",
    "/metrics",
    "/health",
    "/v1/health",
    "/reach",
    "/reload",
    "/events",
    *EMBEDDINGS,
}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
ENDS = {
    "abort": ("print('LLVM ERROR: Symbol not found', file=sys.stderr); os.abort()", "SIGABRT", "Symbol not found"),
    "segfault": ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", ""),
    "oom": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", "memory.ram_bytes"),
    "illegal": ("os.kill(os.getpid(), signal.SIGILL)", "SIGILL", "another processor"),
    "raises": ("raise TypeError('eos_token: not an integer')", "exit status 1", "eos_token: not an integer"),
    "no library": ("import nothing_of_that_name", "exit status 1", "install edgemoe again"),
    "broken library": ("import ctypes; ctypes.CDLL('libnothing.so')", "exit status 1", "install edgemoe again"),
    "no thread": ('raise RuntimeError("can\'t start new thread")', "exit status 1", "ulimit -u"),
    "no allocation": ("raise OSError(12, 'Cannot allocate memory')", "exit status 1", "memory.ram_bytes"),
    "no memory": ("bytes(1) + bytearray(1 << 60)", "exit status 1", "memory.ram_bytes"),
    "exits": ("sys.exit(3)", "exit status 3", ""),
}


def engine(end: str, phase: str = "kernels") -> tuple[str, ...]:
    """Returns the command of a process that ends in a phase as a real engine would, without a message."""
    script = f"""\
import faulthandler, json, os, signal, sys
faulthandler.enable()
boot = json.load(sys.stdin)
os.pwrite(boot["place_fd"], {phase!r}.encode().ljust({engine_handle.PLACE_BYTES}, b"\\0"), 0)
print("2026-01-31T12:00:00.123 INFO engine phase={phase}", file=sys.stderr, flush=True)
{end}
"""
    return (sys.executable, "-c", script)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_starts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(engine_starts, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(supervisor, "SETTINGS_S", 0.1)
    monkeypatch.setattr(engine_handle, "LAST_WORDS_S", 0.2)


@asynccontextmanager
async def serving(settings: Settings, command: tuple[str, ...], **options: Any) -> AsyncIterator[Front]:
    front = Front(settings, command, env=options.pop("env", {}), **options)
    task = asyncio.ensure_future(front.serve())
    try:
        yield front
    finally:
        front.stop()
        front.stop()
        await task


async def failure(front: Front) -> str:
    """Returns the reason, once no further start is tried."""
    await until(lambda: front.supervisor is not None and front.supervisor.state == "failed")
    assert front.supervisor is not None
    return str(front.supervisor.describe()["cannot_start"]["reason"])


@pytest.mark.parametrize("end", ENDS)
async def test_three_deaths_alike_end_the_trying_and_say_why(tmp_path: Path, model_dir: Path, end: str) -> None:
    script, kind, words = ENDS[end]
    async with serving(settings_for(tmp_path, model_dir), engine(script)) as front:
        reason = await failure(front)
        assert kind in reason
        assert words in reason
        assert "the phase kernels" in reason
        assert "3 times" in reason
        assert "`edgemoe reload`" in reason
        assert "INFO" not in reason
        assert "^^" not in reason
        await asyncio.sleep(0.5)
        assert front.supervisor is not None
        assert front.supervisor.starts == 3


@pytest.mark.parametrize("phase", PHASES)
async def test_the_phase_is_told_however_suddenly_an_engine_dies(tmp_path: Path, model_dir: Path, phase: str) -> None:
    async with serving(settings_for(tmp_path, model_dir), engine(ENDS["oom"][0], phase)) as front:
        assert f"the phase {phase}" in await failure(front)


async def test_an_engine_that_stays_in_a_phase_is_ended_and_said_to_hang(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_handle, "LOADING_STILL_S", 0.5)
    async with serving(settings_for(tmp_path, model_dir), engine("signal.pause()", "weights")) as front:
        assert "come no further" in await failure(front)


async def test_an_engine_that_cannot_be_executed_is_told_as_such(tmp_path: Path, model_dir: Path) -> None:
    async with serving(settings_for(tmp_path, model_dir), (str(tmp_path / "nothing"),)) as front:
        assert "cannot be started" in await failure(front)


async def test_every_endpoint_gives_the_reason_in_its_own_form_and_every_command_the_same_words(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with serving(settings, engine(ENDS["abort"][0])) as front, http_client(settings) as client:
        await until(Path(settings.api.socket).exists)
        early = {path: asyncio.ensure_future(client.post(path, json=body)) for path, body in BODIES.items()}
        reason = await failure(front)
        assert front.api is not None
        asked = set[str]()
        for route in build(front.api).routes:
            assert isinstance(route, Route)
            path = route.path.replace("{name:path}", "tiny")
            if path in WITHOUT_ENGINE or not path.startswith(("/v1", "/tok", "/detok")):
                continue
            method = "POST" if "POST" in (route.methods or ()) else "GET"
            for stream in (False, True):
                body = BODIES[path] | {"stream": stream} if method == "POST" else None
                said = await client.request(method, path, json=body)
                assert said.status_code == 503, path
                assert said.headers["content-type"] == "application/json"
                assert int(said.headers["retry-after"]) >= 1
                error = said.json()["error"]
                assert error["message"] == reason
                if path.startswith("/v1/messages"):
                    assert (said.json()["type"], error["type"]) == ("error", "overloaded_error")
                else:
                    assert error["code"] == "engine_failed"
            asked.add(path)
        assert asked >= set(BODIES)
        for path, waiting in early.items():
            answer = await waiting
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, reason), path
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["cannot_start"]["last_lines"][0] == "LLVM ERROR: Symbol not found"
        socket_path = Path(settings.api.socket)
        found, _ = await asyncio.to_thread(daemon, socket_path)
        assert [(one.check, one.said) for one in found if one.state != "pass"] == [("engine", reason)]
        with Client(socket_path) as terminal:
            console = Console(width=4000, file=io.StringIO())
            console.print(render(await asyncio.to_thread(take_snapshot, terminal, socket_path)))
            with pytest.raises(ServiceError) as chat:
                await asyncio.to_thread(terminal.wait_while_loading, print, lambda: True)
        assert isinstance(console.file, io.StringIO)
        assert reason in console.file.getvalue()
        assert console.file.getvalue().startswith("edgemoe has failed at ")
        assert str(chat.value) == reason
    assert "Traceback" not in caplog.text
    assert caplog.text.count(reason) == 1


async def test_a_reload_and_a_changed_setting_have_it_tried_again(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    mended = tmp_path / "mended"
    script = f"""\
import os, runpy, sys
if not os.path.exists({str(mended)!r}):
    sys.exit(3)
sys.path.insert(0, {str(Path(SCRIPTED[1]).parents[1])!r})
runpy.run_path({SCRIPTED[1]!r}, run_name="__main__")
"""
    now = [settings]
    async with (
        serving(settings, (sys.executable, "-c", script), reread=lambda: now[0]) as front,
        http_client(settings) as client,
    ):
        await failure(front)
        sup = front.supervisor
        assert sup is not None
        now[0] = msgspec.structs.replace(settings, memory=msgspec.structs.replace(settings.memory, kv_bytes=1 << 20))
        await until(lambda: sup.starts == 6 and sup.state == "failed")
        assert sup.settings.memory.kv_bytes == 1 << 20
        mended.touch()
        said = await client.post("/reload")
        assert "started again" in said.json()["message"]
        await until(lambda: sup.state == "ready")
        assert (await client.get("/health")).json()["cannot_start"] is None
        assert (await client.post("/v1/completions", json={"prompt": "SAY{a}END"})).status_code == 200


async def test_a_fatal_error_ends_a_daemon_run_by_hand_only_after_its_clients_have_the_reason(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SCRIPTED_FATAL", "1")
    settings = settings_for(tmp_path, model_dir)
    front = Front(settings, SCRIPTED, env={})
    task = asyncio.ensure_future(front.serve())
    async with http_client(settings) as client:
        await until(Path(settings.api.socket).exists)
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body in BODIES.items()))
    with pytest.raises(BaseExceptionGroup) as group:
        await task
    assert group.group_contains(ServiceError, match="no room for the experts")
    for answer in answers:
        assert answer.status_code == 503
        assert "no room for the experts" in answer.json()["error"]["message"]
    assert "Traceback" not in caplog.text


async def test_the_service_manager_is_told_and_keeps_the_daemon(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_FATAL", "1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        heard = ""

        def was_notified(word: str) -> bool:
            nonlocal heard
            with suppress(BlockingIOError):
                heard += manager.recv(1 << 16).decode() + "\n"
            return word in heard

        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        async with serving(settings_for(tmp_path, model_dir), SCRIPTED, env=env) as front:
            reason = await failure(front)
            assert "no room for the experts" in reason
            await until(lambda: was_notified("READY=1") and was_notified(reason))


async def test_a_request_that_is_cut_off_ends_in_its_own_form(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As for requests that take too long after the daemon was asked to stop."""
    settings = settings_for(tmp_path, model_dir)
    async with serving(settings, engine("signal.pause()")), http_client(settings) as client:
        await until(Path(settings.api.socket).exists)
        before = asyncio.all_tasks()
        asked = asyncio.ensure_future(client.post("/v1/messages", json=BODIES["/v1/messages"]))
        await until(lambda: [t for t in asyncio.all_tasks() - before if "HttpExchange.run" in repr(t)])
        for task in asyncio.all_tasks() - before:
            if "HttpExchange.run" in repr(task):
                task.cancel()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("deaths", "ends"),
    [
        ([("SIGABRT", "kernels")] * 3, [False, False, True]),
        ([("SIGABRT", "kernels"), ("SIGSEGV", "kernels"), ("TypeError", "kernels")], [False, False, True]),
        ([("SIGABRT", "kernels"), ("SIGABRT", "weights"), ("SIGABRT", "experts")], [False, False, True]),
        ([(kind, f"phase {n}") for n, kind in enumerate("AABBB")], [False] * 4 + [True]),
        ([(f"kind {n}", f"phase {n}") for n in range(6)], [False] * 5 + [True]),
    ],
)
def test_deaths_are_alike_by_kind_or_phase_and_bounded_in_all(deaths: list[tuple[str, str]], ends: list[bool]) -> None:
    starts = FailedStarts(5)
    assert [starts.count_death(ProcessDeath(kind, kind, phase)) for kind, phase in deaths] == ends


def test_the_kept_stderr_is_bounded_and_excludes_the_log_and_other_threads() -> None:
    lines = LastLines()
    for number in range(10 * KEPT_LINES):
        lines.add(b"%d %s\n" % (number, b"x" * 10 * LINE_CHARS))
    assert len(lines._lines) == KEPT_LINES
    assert max(map(len, lines._lines)) == LINE_CHARS
    assert lines.add(b"y" * (1 << 20))
    dump = b'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a.py", line 1 in other\n'
    dump += b'Current thread 0x2 (most recent call first):\n  File "b.py", line 2 in compiled\n  File "c.py"\n'
    told = LastLines()
    for byte in b"2026-01-31T12:00:00.123 INFO engine\n<6>engine\nLLVM ERROR: no symbol\n" + dump:
        told.add(bytes([byte]))  # as faulthandler writes
    frame = 'File "b.py", line 2 in compiled'
    assert told.last_errors() == ("LLVM ERROR: no symbol", "Fatal Python error: Aborted", frame)


async def test_the_engines_stderr_still_reaches_ours(
    tmp_path: Path, model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serving(settings_for(tmp_path, model_dir), engine(ENDS["abort"][0])) as front:
        await failure(front)
    assert "LLVM ERROR: Symbol not found" in capfd.readouterr().err
