"""The daemon as a process: its imports, signals, systemd sockets, and memory."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.front_kit import http_client, settings_for
from support.waiting import until

from edgemoe.config.settings import Settings

SCRIPT = str(Path(__file__).parents[1] / "support" / "daemon_process.py")


@asynccontextmanager
async def daemon(settings: Settings, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a daemon, and kills it at the end if it has not ended by then."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, SCRIPT, msgspec.json.encode(settings).decode(), stderr=pipe, **options
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def healthy(settings: Settings) -> None:
    async with http_client(settings) as client:

        async def answers() -> bool:
            with suppress(httpx.ConnectError):
                return (await client.get("/health")).status_code == 200
            return False

        await until(answers)


async def live(client: httpx.AsyncClient) -> int:
    """Returns the number of requests that it has accepted and not ended."""
    return int((await client.get("/health")).json()["requests"]["live"])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def test_the_front_imports_neither_torch_nor_numba() -> None:
    code = (
        "import sys, edgemoe.front.main; print(*sorted({'torch', 'numba', 'scipy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_unpickling_is_refused() -> None:
    payload = pickle.dumps(Path("x"))
    code = (
        f"from edgemoe.guard import refuse_pickle; import pickle, pathlib; refuse_pickle(); pickle.loads({payload!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "unpickling is refused" in done.stderr


async def test_sigterm_drains_and_leaves_nothing(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with daemon(settings) as process, http_client(settings) as client:
        await healthy(settings)
        engine = (await client.get("/health")).json()["engine"]["pid"]
        body = {"prompt": "go", "max_tokens": 200, "seed": 1}
        answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: live(client))
        process.send_signal(signal.SIGTERM)
        assert (await answer).json()["usage"]["completion_tokens"] == 200
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert not os.path.exists(settings.api.socket)
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


async def test_sighup_loads_again_and_drops_nothing(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with daemon(settings) as process, http_client(settings) as client:
        await healthy(settings)
        answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "go", "max_tokens": 200}))
        await until(lambda: live(client))
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"edgemoe.front.main:reloaded" not in await process.stderr.readline():
                pass
        assert (await answer).json()["usage"]["completion_tokens"] == 200
        assert (await client.post("/reload")).json() == {"message": "loaded again"}


@pytest.mark.parametrize("nohup", [False, True])
async def test_the_end_of_its_terminal_ends_it(tmp_path: Path, model_dir: Path, nohup: bool) -> None:
    settings = settings_for(tmp_path, model_dir)
    ours, its = os.openpty()

    def on_terminal() -> None:
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL
        )  # independent of the shell that started these tests
        os.login_tty(its)

    async with daemon(settings, preexec_fn=on_terminal) as process, http_client(settings) as client:
        os.close(its)
        await healthy(settings)
        process.send_signal(signal.SIGHUP)  # of an owner, while the terminal exists
        answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "go", "max_tokens": 200}))
        await until(lambda: live(client))
        os.close(ours)
        assert (await answer).json()["usage"]["completion_tokens"] == 200
        if nohup:
            await healthy(settings)
            return
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not os.path.exists(settings.api.socket)


async def test_a_second_signal_does_not_wait(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, service={"drain_s": 60.0})
    async with daemon(settings) as process, http_client(settings) as client:
        await healthy(settings)
        answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0"}))
        await until(lambda: live(client))
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"edgemoe.front.main:stopping" not in await process.stderr.readline():
                pass
        assert not answer.done()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0  # long before drain_s
        await asyncio.wait([answer])
        assert answer.result().json()["error"]["code"] == "draining"


async def test_a_second_daemon_on_the_same_socket_refuses_to_start(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with daemon(settings):
        await healthy(settings)
        async with daemon(settings) as same_runtime:
            _, said = await same_runtime.communicate()
            assert b"ServiceError" in said
        other = msgspec.structs.replace(settings.service, runtime_dir=str(tmp_path / "run2"))
        async with daemon(msgspec.structs.replace(settings, service=other)) as same_socket:
            _, said = await same_socket.communicate()
            assert b"another daemon listens here" in said
            assert same_socket.returncode == 1
        await healthy(settings)


async def test_a_killed_daemon_can_be_started_again(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with daemon(settings) as process:
        await healthy(settings)
        process.kill()
        await process.wait()
    assert os.path.exists(settings.api.socket)
    async with daemon(settings):
        await healthy(settings)


async def test_the_service_manager_hears_ready_watchdog_and_stopping(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        heard = ""

        def was_notified(word: str) -> bool:
            nonlocal heard
            with suppress(BlockingIOError):
                heard += manager.recv(4096).decode() + "\n"
            return word in heard

        env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
        async with daemon(settings, env=env) as process, http_client(settings) as client:
            await until(lambda: was_notified("READY=1"))
            await until(lambda: was_notified("WATCHDOG=1") and heard.count("WATCHDOG=1") > 3)
            answer = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0"}))
            await until(lambda: live(client))
            process.send_signal(signal.SIGTERM)
            await until(lambda: was_notified("STOPPING=1"))
            assert "EXTEND_TIMEOUT_USEC" in heard
            assert "STATUS=ready" in heard
            heard = ""
            await until(lambda: was_notified("EXTEND_TIMEOUT_USEC"))  # else draining would be cut short
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            await answer


async def test_a_socket_passed_by_the_service_manager_is_used(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as passed:
        passed.bind(settings.api.socket)
        passed.listen(8)
        passed.set_inheritable(True)
        # LISTEN_PID is the pid of the process that execs, which only that process knows
        shell = f'exec env LISTEN_PID=$$ LISTEN_FDS=1 "$0" "$@" 3<&{passed.fileno()}'
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            shell,
            sys.executable,
            SCRIPT,
            msgspec.json.encode(settings).decode(),
            pass_fds=(passed.fileno(),),
            stderr=asyncio.subprocess.PIPE,
        )
        await healthy(settings)
        process.terminate()
        await process.communicate()
        assert process.returncode == 0
        assert os.path.exists(settings.api.socket)


async def test_the_front_stays_small(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with daemon(settings) as process, http_client(settings) as client:
        await healthy(settings)
        schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
        bodies = [
            {"messages": [{"role": "user", "content": "x" * length}], "max_tokens": 1, "response_format": schema}
            for length in [3_000, 20_000] * 10
        ]
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200, 400] * 10  # the long ones do not fit
        assert resident_bytes(process.pid) < 150e6
