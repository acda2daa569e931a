"""Engines die, hang and fail to start; clients notice as little as possible."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from support.front_kit import SCRIPTED, http_client, openai_client, ready, running, settings_for
from support.virtual import VirtualLoop
from support.waiting import until

from edgemoe.config.settings import ServiceSettings
from edgemoe.errors import EngineUnavailable, ServiceError
from edgemoe.front import connections, engine_starts
from edgemoe.front import engine_process as engine_module
from edgemoe.front import supervisor as supervisor_module
from edgemoe.front.engine_process import EngineProcess
from edgemoe.front.listen import tcp_socket
from edgemoe.front.main import Front
from edgemoe.front.request_events import RequestEvent, TokensEmitted
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.supervisor import Supervisor
from edgemoe.ipc.engine_socket import IpcClient
from edgemoe.ipc.messages import Emissions, Failed, Loading, Stats
from edgemoe.types.request import Emission, Identity, uid_principal
from edgemoe.wire.protocol import PROTOCOL_VERSIONS


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short back-offs for tests."""
    monkeypatch.setattr(engine_starts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(engine_starts, "LONGEST_DELAY_S", 0.05)


def supervisor_of(front: Front) -> Supervisor:
    assert front.supervisor is not None
    return front.supervisor


def engine_pid(front: Front) -> int:
    return int(supervisor_of(front).describe()["engine"]["pid"])


def emitted(front: Front) -> int:
    """Counts the tokens of live requests."""
    return sum(len(live.emitted) for live in supervisor_of(front).requests.machine._live.values())


async def text_of(client: openai.AsyncOpenAI, prompt: str, **options: Any) -> str:
    stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **options)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_killing_the_engine_again_and_again_changes_no_text(tmp_path: Path, model_dir: Path, quick: None) -> None:
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 50})
    async with running(settings) as front, openai_client(settings) as client:
        prompts: list[dict[str, Any]] = [
            {"prompt": f"prompt {n}", "max_tokens": 300, "seed": n, "temperature": n % 2} for n in range(4)
        ]
        expected = await asyncio.gather(*(text_of(client, **options) for options in prompts))
        streams = asyncio.gather(*(text_of(client, **options) for options in prompts))
        for start in range(1, 4):
            await until(lambda: emitted(front) > start * 200 or streams.done())  # noqa: B023 (used at once)
            os.kill(engine_pid(front), signal.SIGKILL)
            await until(lambda: supervisor_of(front).starts > start)  # noqa: B023
        assert await streams == expected
        assert supervisor_of(front).requests.machine.resubmitted >= 3


async def test_an_engine_that_hangs_is_replaced(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SILENCE_S", 1.0)
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, openai_client(settings) as client:
        first = engine_pid(front)
        stream = asyncio.ensure_future(text_of(client, "go", max_tokens=200, seed=1))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        os.kill(first, signal.SIGSTOP)
        text = await stream
        assert engine_pid(front) != first
        assert "silent" in supervisor_of(front).why
        assert text == await text_of(client, "go", max_tokens=200, seed=1)


async def test_requests_of_an_engine_that_cannot_even_be_killed_end_by_their_deadlines(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a thread that waits for a disk without an answer."""
    monkeypatch.setattr(engine_module, "SILENCE_S", 1.0)
    settings = settings_for(tmp_path, model_dir, api={"request_timeout_s": 3.0})
    async with running(settings) as front, http_client(settings) as client:
        first, kill = engine_pid(front), EngineProcess.kill
        asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0", "max_tokens": 9}))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        with monkeypatch.context() as patch:
            patch.setattr(EngineProcess, "kill", EngineProcess.retire)
            os.kill(first, signal.SIGSTOP)
            assert (await asked).status_code == 504
            assert not supervisor_of(front)._connection.place
            assert supervisor_of(front).starts == 1, "none beside one that is there still"
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor_of(front).starts == 2 and supervisor_of(front).state == "ready")
        assert EngineProcess.kill is kill


async def test_health_says_that_the_engine_is_stalled_while_it_is(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, http_client(settings) as client:
        monkeypatch.setattr(engine_module, "STALLED_S", 0.5)
        os.kill(engine_pid(front), signal.SIGSTOP)
        await until(lambda: supervisor_of(front).state == "stalled")
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stalled")
        os.kill(engine_pid(front), signal.SIGCONT)
        monkeypatch.setattr(engine_module, "STALLED_S", 10.0)
        await until(lambda: supervisor_of(front).state == "ready")
        assert (await client.get("/health")).status_code == 200


async def test_with_its_engine_failed_a_box_takes_requests_while_another_box_serves(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_starts, "WINDOW_S", 60.0)
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 0})
    async with running(settings) as front:
        places = set[str]()
        monkeypatch.setattr(RequestRouter, "elsewhere", property(lambda _: places))
        requests = supervisor_of(front).requests
        os.kill(engine_pid(front), signal.SIGKILL)
        await until(lambda: requests.closed is not None)
        for _ in range(2):
            places.add("a-box")
            await until(lambda: requests.closed is None)
            places.clear()
            await until(lambda: requests.closed is not None)


async def test_a_refusal_for_a_failing_engine_states_its_end(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_starts, "WINDOW_S", 60.0)
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 0})
    front = Front(settings, SCRIPTED, env={})
    serving = asyncio.ensure_future(front.serve())
    async with http_client(settings) as client:
        await until(lambda: ready(front))
        os.kill(engine_pid(front), signal.SIGKILL)
        await until(lambda: supervisor_of(front).state == "failed")
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "engine_failed"
        assert 30 <= int(refused.headers["retry-after"]) <= 60
    front.stop()
    await serving


@pytest.mark.parametrize(("step_s", "hangs"), [(0.0, False), (179.0, False), (181.0, True)])
async def test_an_engine_hangs_by_how_long_its_step_has_come_no_further_alone(step_s: float, hangs: bool) -> None:
    engine = EngineProcess(None, "boot")  # type: ignore[arg-type]
    engine.on_message(Stats(values={}, step_s=step_s))
    assert bool(engine.hang_reason()) == hangs


def test_the_time_that_the_front_was_stopped_is_no_silence_of_its_engine() -> None:
    now = 0.0
    engine = EngineProcess(None, "boot", clock=lambda: now)  # type: ignore[arg-type]
    now += 1000.0  # no message was read meanwhile, and no beat ran
    assert not engine.hang_reason()
    looks = 0
    while not engine.hang_reason():
        now, looks = now + engine_module.LOOK_S, looks + 1
    assert looks * engine_module.LOOK_S == pytest.approx(engine_module.LOADING_SILENCE_S, abs=1.0)


async def test_messages_of_an_earlier_engine_are_ignored(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, http_client(settings) as client:
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0"}))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        (live,) = supervisor_of(front).requests.machine._live.values()
        late = IpcClient(supervisor_of(front)._connection.wire.address, "earlier")
        last = Emission(request=live.request.id, attempt=live.attempt, index=0, finish="stop")
        late.post(Emissions(items=[last]))
        late.post(Failed(error="Late", message="from beyond"))
        await late.close()
        fresh = await client.post("/v1/completions", json={"prompt": "SAY{a}END"})  # by then they have been read
        assert fresh.status_code == 200
        assert not waiting.done()
        engine = supervisor_of(front)._connection.engine
        assert engine is not None
        assert engine.failed is None
        waiting.cancel()


async def test_a_message_of_the_engine_that_goes_wrong_costs_that_message_alone(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here some tokens are lost, and are then requested again."""
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, openai_client(settings) as client:
        text = await text_of(client, "go", max_tokens=100, seed=1)
        requests, taken = supervisor_of(front).requests, []
        handle = requests.handle

        def wrong(event: RequestEvent) -> None:
            taken.append(isinstance(event, TokensEmitted))
            if taken[-1] and sum(taken) == 3:
                raise KeyError("nobody has foreseen that")
            handle(event)

        monkeypatch.setattr(requests, "handle", wrong)
        assert await text_of(client, "go", max_tokens=100, seed=1) == text
        assert requests.machine.gaps
        assert supervisor_of(front).starts == 1
    assert caplog.text.count("a message of the engine failed here") == 1


async def test_a_request_that_fells_engines_ends_in_an_error_and_others_go_on(
    tmp_path: Path, model_dir: Path, quick: None
) -> None:
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 50})
    async with running(settings) as front, openai_client(settings) as client:
        bad = asyncio.ensure_future(client.completions.create(model="tiny", prompt="DIE-ALWAYS"))
        with pytest.raises(openai.InternalServerError, match="in a row") as failed:
            await bad
        assert failed.value.status_code == 500
        assert failed.value.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in failed.value.response.headers
        assert await text_of(client, "SAY{still here}END") == "still here"
        assert front.supervisor is not None


async def test_too_many_deaths_end_in_errors_and_a_later_start_makes_good(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = [0.0]  # of the time between deaths
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(supervisor_module, "time", clock)
    monkeypatch.setattr(engine_starts, "WINDOW_S", 600.0)
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 1})
    async with running(settings) as front, http_client(settings) as client:
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0"}))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        for _ in range(2):
            await until(lambda: ready(front))
            os.kill(engine_pid(front), signal.SIGKILL)
            await until(lambda: not ready(front))
        await until(lambda: supervisor_of(front).state == "failed")
        assert (await waiting).status_code == 503
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "SIGKILL" in health.json()["engine"]["last_end"]
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert "is started again in" in refused.json()["error"]["message"]
        ahead_s[0] = 400.0
        log = supervisor_of(front).requests
        await until(lambda: isinstance(log.closed, EngineUnavailable) and log.closed.retry_after_s <= 200.0)
        ahead_s[0] = 600.0
        await until(lambda: ready(front))
        assert (await client.post("/v1/completions", json={"prompt": "SAY{a}END"})).status_code == 200


async def test_requests_that_fell_engines_one_after_the_other_never_put_the_service_out_of_order(
    tmp_path: Path, model_dir: Path, quick: None
) -> None:
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 4})
    async with running(settings) as front, openai_client(settings, max_retries=2) as client:
        for number in range(2):
            with pytest.raises(openai.InternalServerError, match="in a row"):
                await client.completions.create(model="tiny", prompt=f"DIE-ALWAYS {number}")
        with pytest.raises(openai.RateLimitError, match="engines ended with this prompt before"):
            await client.with_options(max_retries=0).completions.create(model="tiny", prompt="DIE-ALWAYS 0")
        assert supervisor_of(front).starts == 5  # two a request: none was tried again by the client
        assert await text_of(client, "SAY{still here}END") == "still here"


async def test_deaths_count_for_as_long_as_the_window_lasts(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_starts, "WINDOW_S", 0.2)
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 1})
    async with running(settings) as front:
        for start in range(1, 5):
            await until(lambda: ready(front))
            died = asyncio.get_running_loop().time()
            os.kill(engine_pid(front), signal.SIGKILL)
            await until(lambda: supervisor_of(front).starts > start)  # noqa: B023 (used at once)
            assert supervisor_of(front).state != "failed"
            await until(lambda: asyncio.get_running_loop().time() > died + 0.5)  # noqa: B023


async def test_a_fatal_error_ends_the_daemon_at_once_with_its_reason(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_FATAL", "1")
    with pytest.raises(BaseExceptionGroup) as group:
        async with running(settings_for(tmp_path, model_dir)):
            raise AssertionError("it started")
    assert group.group_contains(ServiceError, match="no room for the experts")


async def test_an_engine_that_cannot_start_for_a_while_is_waited_for_once_one_has_served(
    tmp_path: Path, model_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, model_dir, service={"max_restarts": 50})
    async with running(settings) as front, openai_client(settings) as client:
        monkeypatch.setenv("SCRIPTED_FATAL", "1")
        waiting = asyncio.ensure_future(text_of(client, "go", max_tokens=200, seed=1))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        os.kill(engine_pid(front), signal.SIGKILL)
        await until(lambda: supervisor_of(front).starts >= 3)
        assert supervisor_of(front).state == "loading"
        monkeypatch.delenv("SCRIPTED_FATAL")
        assert await waiting


async def test_an_engine_says_how_many_it_runs_and_keeps(tmp_path: Path, model_dir: Path) -> None:
    async with running(settings_for(tmp_path, model_dir)) as front:
        supervisor = supervisor_of(front)
        engine = supervisor._connection.engine
        assert engine is not None
        assert engine.ready is not None
        limits = msgspec.structs.replace(engine.ready.limits, max_sequences=7, max_queue=5)
        supervisor._on_message(engine, msgspec.structs.replace(engine.ready, limits=limits))
        assert (supervisor.requests.machine.slots, supervisor.requests.machine.capacity) == (7, 12)


async def test_an_engine_that_has_died_is_not_ready_despite_its_messages(tmp_path: Path, model_dir: Path) -> None:
    async with running(settings_for(tmp_path, model_dir)) as front:
        supervisor = supervisor_of(front)
        engine = supervisor._connection.engine
        assert engine is not None
        last_words = engine.ready
        engine.kill()
        await until(lambda: supervisor.state != "ready")
        engine.ready = None
        supervisor._on_message(engine, last_words)
        assert supervisor.state != "ready"
        supervisor.check_integrity()
        await until(lambda: ready(front))


async def test_an_unreadable_message_of_an_engine_is_a_sign_of_life(tmp_path: Path, model_dir: Path) -> None:
    async with running(settings_for(tmp_path, model_dir)) as front:
        engine, wire = supervisor_of(front)._connection.engine, supervisor_of(front)._connection.wire
        assert engine is not None
        os.kill(engine.process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # its messages so far are read
        end, refused = IpcClient(wire.address, engine.boot_id + "x", PROTOCOL_VERSIONS), wire.undecodable
        engine.boot_id, first = engine.boot_id + "x", engine.heard
        end.post(msgspec.structs.replace(Stats(values={}), values={"edgemoe_x": float("nan")}))
        await until(lambda: wire.undecodable > refused)
        await until(lambda: engine.heard > first)
        await end.close()
        engine.kill()


async def test_output_that_nobody_reads_or_keeps_ends_no_daemon(tmp_path: Path, model_dir: Path) -> None:
    said = asyncio.Event()

    def say() -> None:
        said.set()
        raise OSError(28, "No space left on device")

    front = Front(settings_for(tmp_path, model_dir), SCRIPTED, env={}, on_ready=say)
    serving = asyncio.ensure_future(front.serve())
    async with asyncio.timeout(60):
        await said.wait()
        await asyncio.sleep(0.1)
        assert not serving.done()
        assert ready(front)
        front.stop()
        await serving


@pytest.mark.parametrize(("tells", "logs"), [(0.0, False), (0.01, True)])
async def test_only_an_engine_that_was_told_to_stop_is_blamed_for_not_stopping(
    tells: float, logs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)", process_group=0)
    await EngineProcess(process, "boot").exits(tells)
    assert ("did not stop in time" in caplog.text) == logs


def test_a_pause_has_an_end_however_many_deaths_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_starts, "WINDOW_S", 1e6)
    backoff = engine_starts.RestartBackoff(ServiceSettings(max_restarts=5000))
    for death in range(1100):
        assert backoff.after_death(float(death), 0).delay_s <= engine_starts.LONGEST_DELAY_S


async def test_requests_wait_for_an_engine_that_is_still_loading(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    front = Front(settings, env={}, command=(sys.executable, "-c", "import time; time.sleep(60)"))
    serving = asyncio.ensure_future(front.serve())
    async with http_client(settings) as client:
        await until(Path(settings.api.socket).exists)
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert not waiting.done()
        front.stop()
        assert (await waiting).status_code == 503
    await serving


async def test_clients_waiting_for_an_absent_engine_get_an_error(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, api={"request_timeout_s": 0.3})
    front = Front(settings, env={}, command=(sys.executable, "-c", "import time; time.sleep(60)"))
    serving = asyncio.ensure_future(front.serve())
    async with http_client(settings) as client:
        await until(Path(settings.api.socket).exists)
        said = await client.post("/v1/completions", json={"prompt": "x"})
        assert said.status_code == 503
        assert "still loading" in said.json()["error"]["message"]
        front.stop()
    await serving


def test_clients_wait_as_long_as_the_first_start_makes_progress(tmp_path: Path, model_dir: Path) -> None:
    loop = VirtualLoop()
    engine = EngineProcess(SimpleNamespace(returncode=None), "boot", clock=loop.time)  # type: ignore[arg-type]
    router: Any = SimpleNamespace(connection=SimpleNamespace(engine=engine), closed=None)
    settings = settings_for(tmp_path, model_dir, api={"request_timeout_s": 10.0})
    supervisor = Supervisor(settings, router, (), None)  # type: ignore[arg-type]

    async def ask() -> float:
        asked = asyncio.ensure_future(supervisor.model())
        for percent in range(1, 20):
            for _ in range(2):  # the second says nothing new
                engine.on_message(Loading(phase="weights", fraction=percent / 100))
                await asyncio.sleep(4.9)
                assert not asked.done()
        began_s = loop.time()
        with pytest.raises(EngineUnavailable, match=r"still loading \(weights 19%, for 186 s"):
            await asyncio.wait_for(asked, 60)
        return loop.time() - began_s

    assert loop.run_until_complete(ask()) == pytest.approx(10 - 2 * 4.9)
    loop.close()


async def test_deadlines_end_requests_with_504(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, api={"request_timeout_s": 0.5})
    async with running(settings), http_client(settings) as client:
        late = await client.post("/v1/completions", json={"prompt": "HANG@0"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_tokens_before_a_deadline_are_the_answer(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, api={"request_timeout_s": 0.5})
    async with running(settings), http_client(settings) as client:
        stream = await client.post("/v1/completions", json={"prompt": "HANG@2", "seed": 1, "stream": True})
        whole = await client.post("/v1/completions", json={"prompt": "HANG@2", "seed": 1})
    assert (stream.status_code, whole.status_code) == (200, 200)
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert whole.json()["usage"]["completion_tokens"] == 2
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_full_queue_is_a_429(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, engine={"max_sequences": 1, "max_queue": 1})
    async with running(settings) as front, http_client(settings) as client:
        body = {"prompt": "HANG@0"}
        waiting = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: len(supervisor_of(front).requests) == 2)
        full = await client.post("/v1/completions", json=body)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        for one in waiting:
            one.cancel()
        await until(lambda: not supervisor_of(front).requests)


async def test_draining_finishes_running_requests_and_refuses_others(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, http_client(settings) as client:
        body = {"prompt": "go", "max_tokens": 300, "seed": 1}
        running_one = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        front.stop()
        await until(lambda: supervisor_of(front).state == "draining")
        assert (await client.get("/health")).json()["status"] == "draining"
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        os.kill(engine_pid(front), signal.SIGKILL)  # even now
        answer = await running_one
        assert answer.json()["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize("end_s", [30.0, 0.0], ids=["", "before the request is read"])
async def test_clients_connected_before_the_end_are_told_of_it(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, end_s: float
) -> None:
    monkeypatch.setattr(connections, "LATE_S", 30.0)
    monkeypatch.setattr(connections, "END_S", end_s)
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front:
        reader, writer = await asyncio.open_unix_connection(settings.api.socket)
        front.stop()
        await until(lambda: not Path(settings.api.socket).exists())
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"x"}')
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"draining" in answer


async def test_a_drain_that_takes_too_long_ends_in_errors(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir, service={"drain_s": 0.2})
    async with running(settings) as front, http_client(settings) as client:
        stuck = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "HANG@0"}))
        await until(lambda: len(supervisor_of(front).requests) == 1)
        front.stop()
        assert (await stuck).status_code == 503


async def test_a_hundred_requests_with_rude_clients_leave_nothing_behind(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, http_client(settings) as client:
        tasks_before = len(asyncio.all_tasks())

        async def one(number: int) -> int:
            body = {"prompt": f"p{number}", "max_tokens": 40, "seed": number, "stream": number % 2 == 0}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    if number % 3 == 0:
                        return 0  # hangs up midway
            return answer.status_code

        statuses = await asyncio.gather(*map(one, range(100)))
        assert set(statuses) <= {0, 200}
        await until(lambda: not supervisor_of(front).requests)
        await until(lambda: supervisor_of(front).metrics().get("edgemoe_num_requests_running") == 0)
        supervisor_of(front).check_integrity()
    assert len(asyncio.all_tasks()) <= tasks_before


async def test_tcp_asks_for_the_key_and_the_socket_does_not(tmp_path: Path, model_dir: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    keys.chmod(0o600)
    with tcp_socket("127.0.0.1:0") as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    api = {"tcp": address, "api_key_file": str(keys)}
    settings = settings_for(tmp_path, model_dir, api=api)
    async with running(settings), httpx.AsyncClient(base_url=f"http://{address}") as tcp:
        for header in (None, "Bearer wrong-key-0123456", "Basic 0123456789abcdef", "0123456789abcdef"):
            headers = {"authorization": header} if header else {}
            refused = await tcp.get("/v1/models", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="0123456789abcdef") as client:
            assert (await client.models.retrieve("tiny")).id == "tiny"
        async with http_client(settings) as local:
            assert (await local.get("/v1/models")).status_code == 200


async def test_the_peer_on_the_socket_is_the_user(tmp_path: Path, model_dir: Path) -> None:
    settings = settings_for(tmp_path, model_dir)
    async with running(settings) as front, http_client(settings) as client:
        peer = uid_principal(os.getuid())
        for user in (None, "anna"):
            body = {"prompt": "HANG@0", "user": user}
            waiting = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await until(lambda: len(supervisor_of(front).requests) == 1)
            (live,) = supervisor_of(front).requests.machine._live.values()
            assert live.identity == Identity.of(peer, user)
            assert live.request.user.startswith(f"uid:{os.getuid()}")
            waiting.cancel()
            await until(lambda: not supervisor_of(front).requests)


async def test_the_router_s_refusals_reach_the_client(tmp_path: Path, model_dir: Path) -> None:
    async with running(settings_for(tmp_path, model_dir)) as front:
        supervisor_of(front).requests.closed = EngineUnavailable("closed for today", code="holiday")
        async with http_client(front.settings) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.json()["error"] == {
            "message": "closed for today",
            "type": "server_error",
            "param": None,
            "code": "holiday",
        }
