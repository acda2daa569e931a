"""One daemon that serves several models by name: loaded on request, unloaded when idle, within one memory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from support.front_kit import http_client, settings_for, started
from support.waiting import until

from edgemoe.api.http import responding
from edgemoe.cli import main
from edgemoe.cli.client import Client
from edgemoe.cli.doctor.checks import CheckResult, daemon
from edgemoe.cli.status_command import render, take_snapshot
from edgemoe.config.settings import MemorySettings, ModelSettings, NamedModelSettings, Settings
from edgemoe.front import engine_starts, engine_turns, model_pool, supervisor
from edgemoe.front.engine_turns import NEVER_S, ModelHost
from edgemoe.front.main import Front

GB = 1 << 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "TICK_S", 0.05)
    monkeypatch.setattr(engine_starts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(engine_starts, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(supervisor, "SETTINGS_S", 0.1)


def several(
    folder: Path,
    model: Path,
    models: dict[str, dict[str, Any]],
    room: int = 2 * GB,
    *,
    has_main: bool = False,
    **more: Any,
) -> Settings:
    """Returns settings of a daemon with these models, each with 1 GB if it says nothing else."""
    base = settings_for(folder, model, memory=MemorySettings(models_bytes=room, limit_bytes=GB), **more)
    named = {
        name: NamedModelSettings(**{"path": str(model), "memory_bytes": GB, "idle_s": 0, **fields})
        for name, fields in models.items()
    }
    main = base.model if has_main else ModelSettings(store_dir=base.model.store_dir)
    return msgspec.structs.replace(base, model=main, models=named)


@asynccontextmanager
async def serving(settings: Settings, **options: Any) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    """Runs a front in this process, and opens a client; checks its consistency at the end."""
    up = Path(settings.api.socket).exists
    async with started(settings, lambda _: up(), **options) as front, http_client(settings) as client:
        yield front, client


def host(front: Front, name: str) -> ModelHost:
    assert front.pool is not None
    return front.pool.hosts[name]


def states(front: Front) -> dict[str, str]:
    assert front.pool is not None
    return {name: one.supervisor.state for name, one in front.pool.hosts.items()}


async def ask(client: httpx.AsyncClient, model: str, prompt: str = "x", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "seed": 1, **fields}
    return await client.post("/v1/completions", json=body)


async def hold(client: httpx.AsyncClient, model: str) -> asyncio.Task[httpx.Response]:
    """Starts a request that runs until it is cancelled."""
    return asyncio.ensure_future(ask(client, model, "HANG@1", max_tokens=9))


async def end(*tasks: asyncio.Task[httpx.Response]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_model_is_loaded_when_it_is_asked_for_and_by_none_that_is_not(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}, "c": {}})) as (front, client):
        assert states(front) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        answer = await ask(client, "b")
        assert answer.json()["model"] == "b"
        assert states(front) == {"a": "unloaded", "b": "ready", "c": "unloaded"}
        assert (await client.post("/v1/completions", json={"prompt": "x"})).json()["model"] == "a"


async def test_a_name_is_found_in_any_case_and_an_unknown_one_is_told_the_names(
    tmp_path: Path, model_dir: Path
) -> None:
    async with serving(several(tmp_path, model_dir, {"one:7b": {}, "two": {}})) as (front, client):
        assert (await ask(client, "TWO")).status_code == 200
        answer = await client.post("/api/generate", json={"model": "Two:latest", "prompt": "x", "stream": False})
        assert answer.json()["model"] == "Two:latest"
        for path in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/api/chat",
            "/tokenize",
        ):
            refused = await client.post(path, json={"model": "three", "prompt": "x", "messages": [], "input": "x"})
            assert refused.status_code == 404, path
            assert "'one:7b', 'two'" in refused.text, path
        for path in ("/v1/models/three",):
            assert (await client.get(path)).status_code == 404
        for path in ("/api/show", "/api/pull"):
            assert (await client.post(path, json={"model": "three"})).status_code == 404
        assert states(front)["one:7b"] == "unloaded"
        assert (await ask(client, "openai/one:7b")).json()["model"] == "one:7b"


async def test_a_whole_name_comes_before_one_without_its_first_part(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"big": {}, "acme/big": {}})) as (_, client):
        for name in ("acme/big", "ACME/Big:latest", "openai/acme/big"):
            assert (await ask(client, name)).json()["model"] == "acme/big"
        for name in ("big", "openai/big", "acme/other/big"):
            assert (await ask(client, name)).json()["model"] == "big"


async def test_a_model_is_unloaded_once_it_idles_for_so_long(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {"idle_s": 0.2}, "b": {}})) as (front, client):
        await ask(client, "a")
        pid = host(front, "a").supervisor.describe()["engine"]["pid"]
        await until(lambda: states(front)["a"] == "unloaded")
        await until(lambda: not Path(f"/proc/{pid}").exists())
        await until(lambda: not host(front, "a").is_held)
        assert (await ask(client, "a")).status_code == 200
        assert host(front, "a").supervisor.starts == 2


async def test_a_pinned_model_and_the_one_of_model_are_loaded_at_start_and_stay(
    tmp_path: Path, model_dir: Path
) -> None:
    models = {"a": {"pin": True, "idle_s": 0.1}, "b": {"idle_s": 0.1}}
    async with serving(several(tmp_path, model_dir, models, 3 * GB, has_main=True)) as (front, client):
        await until(lambda: states(front) == {"tiny": "ready", "a": "ready", "b": "unloaded"})
        await ask(client, "b")
        await until(lambda: states(front)["b"] == "unloaded")
        assert states(front) == {"tiny": "ready", "a": "ready", "b": "unloaded"}
        assert host(front, "a").supervisor.starts == 1


async def test_two_models_stream_at_once_within_the_memory(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}})) as (front, client):
        first, second = await hold(client, "a"), await hold(client, "b")
        await until(lambda: all(len(host(front, name).supervisor.requests) for name in ("a", "b")))
        assert states(front) == {"a": "ready", "b": "ready"}
        await end(first, second)


async def test_of_three_with_room_for_two_the_least_recently_used_goes(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}, "c": {}})) as (front, client):
        for name in ("a", "b", "a", "c"):
            assert (await ask(client, name)).status_code == 200
        assert states(front) == {"a": "ready", "b": "unloaded", "c": "ready"}
        assert (await ask(client, "b")).status_code == 200
        assert states(front) == {"a": "unloaded", "b": "ready", "c": "ready"}


async def test_no_model_with_a_running_request_is_unloaded_for_another(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}}, GB)) as (front, client):
        running = await hold(client, "a")
        await until(lambda: len(host(front, "a").supervisor.requests))
        waiting = asyncio.ensure_future(ask(client, "b"))
        await until(lambda: "memory in use by 'a'" in str(host(front, "b").supervisor.describe_loading()))
        assert states(front)["a"] == "ready"
        await end(running)
        assert (await waiting).status_code == 200
        assert states(front) == {"a": "unloaded", "b": "ready"}


async def test_a_busy_model_takes_no_more_requests_while_another_has_waited_for_long(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_turns, "PATIENCE_S", 0.0)
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}}, GB)) as (front, client):
        running = await hold(client, "a")
        await until(lambda: len(host(front, "a").supervisor.requests))
        waiting = asyncio.ensure_future(ask(client, "b"))
        await until(lambda: host(front, "a").yields)
        later = asyncio.ensure_future(ask(client, "a"))
        await end(running)
        assert (await waiting).status_code == 200
        assert (await later).status_code == 200
        assert not host(front, "a").yields
        assert states(front) == {"a": "ready", "b": "unloaded"}


async def test_a_model_that_nobody_waits_for_any_more_takes_no_memory(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}}, GB)) as (front, client):
        running = await hold(client, "a")
        await until(lambda: len(host(front, "a").supervisor.requests))
        waiting = asyncio.ensure_future(ask(client, "b"))
        await until(lambda: host(front, "b").supervisor.describe_loading())
        await end(waiting)
        await until(lambda: states(front)["b"] == "unloaded")
        await end(running)
        assert states(front) == {"a": "ready", "b": "unloaded"}
        assert (await ask(client, "b")).status_code == 200


async def test_a_model_too_large_beside_the_pinned_ones_is_refused_with_the_remedy(
    tmp_path: Path, model_dir: Path
) -> None:
    models = {"a": {"pin": True}, "b": {"memory_bytes": 2 * GB}, "c": {}}
    async with serving(several(tmp_path, model_dir, models)) as (_front, client):
        refused = await ask(client, "b")
        assert refused.status_code == 503
        assert "memory_bytes" in refused.text
        assert "unpin" in refused.text
        assert (await ask(client, "c")).status_code == 200
        assert (await ask(client, "a")).status_code == 200


async def test_one_engine_starts_at_a_time(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}, "c": {}}, 3 * GB)) as (front, client):
        assert front.pool is not None
        seen = set()

        async def watch() -> None:
            while True:
                loading = [name for name, one in front.pool.hosts.items() if is_starting(one)]  # type: ignore[union-attr]
                seen.add(len(loading))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        answers = await asyncio.gather(*(ask(client, name) for name in ("a", "b", "c")))
        watching.cancel()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert max(seen) == 1


def is_starting(one: ModelHost) -> bool:
    engine = one.supervisor.describe()["engine"]
    return bool(one.supervisor.state == "loading" and engine["pid"])


MESSAGES = [{"role": "user", "content": "SAY{hello}END"}]
STREAMS: dict[str, dict[str, Any]] = {  # of each endpoint that generates: the fields of a body
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "SAY{hello}END"},
    "/v1/responses": {"input": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "SAY{hello}END"},
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("fits", [True, False])
async def test_a_stream_of_a_model_that_is_loaded_begins_before_that(
    path: str, fits: bool, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.05)
    body = {"model": "b", "stream": True, **STREAMS[path]}
    if not fits:  # which the engine's limits alone tell
        long = "x " * 70_000
        body |= {name: long if isinstance(body[name], str) else ask_long(long) for name in ASKED if name in body}
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}}, GB)) as (front, client):
        held = await hold(client, "a")
        await until(lambda: len(host(front, "a").supervisor.requests) == 1)
        async with asyncio.timeout(60), client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            said = await anext(lines)
            while "loading: waiting" not in said and not path.startswith("/api"):
                said = await anext(lines)
            assert path.startswith("/v1") or not json.loads(said)["done"]
            await end(held)
            rest = [line async for line in lines if line]
        if fits:
            assert "hello" in "".join(PIECE.findall("\n".join(rest)))
            assert '"error":{' not in rest[-1]
        else:
            (last,) = (json.loads(line.removeprefix("data: ")) for line in rest if '"error"' in line and "{" in line)
            assert "prompt is too long" in json.dumps(last)
        assert (await client.get("/health")).json()["requests"]["live"] == 0


PIECE = re.compile(r'"(?:content|text|delta|response)":"([^"]*)"')
ASKED = ("messages", "prompt", "input")


def ask_long(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("path", STREAMS)
async def test_no_model_is_loaded_for_a_body_that_is_wrong_in_itself(
    path: str, tmp_path: Path, model_dir: Path
) -> None:
    wrong = dict.fromkeys(STREAMS[path], 7)
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}})) as (front, client):
        assert (await client.post(path, json={"model": "b", "stream": True, **wrong})).status_code == 400
        assert states(front)["b"] == "unloaded"


async def test_a_killed_engine_costs_the_other_model_nothing(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {}})) as (front, client):
        await asyncio.gather(ask(client, "a"), ask(client, "b"))
        streams = [
            asyncio.ensure_future(ask(client, name, "SAY{" + "word " * 200 + "}END", max_tokens=2000))
            for name in ("a", "b")
        ]
        await until(lambda: all(len(host(front, name).supervisor.requests) for name in ("a", "b")))
        os.kill(host(front, "a").supervisor.describe()["engine"]["pid"], signal.SIGKILL)
        for answer in await asyncio.gather(*streams):
            assert answer.json()["choices"][0]["text"] == "word " * 200
        assert (host(front, "a").supervisor.starts, host(front, "b").supervisor.starts) == (2, 1)


async def test_a_model_that_cannot_start_is_refused_with_the_reason_and_others_go_on(
    tmp_path: Path, model_dir: Path
) -> None:
    models = {"a": {}, "bad": {"path": str(tmp_path / "missing")}}
    async with serving(several(tmp_path, model_dir, models)) as (_front, client):
        refused = await ask(client, "bad")
        assert refused.status_code == 503
        assert "cannot start" in refused.text
        assert (await ask(client, "a")).status_code == 200
        (health,) = (one for one in (await client.get("/health")).json()["models"] if one["name"] == "bad")
        assert (health["state"], health["memory_bytes"]) == ("failed", 0)
        assert "cannot start" in health["reason"]


async def test_keep_alive_is_honoured_within_bounds(tmp_path: Path, model_dir: Path) -> None:
    models: dict[str, dict[str, Any]] = {"a": {"idle_s": 300}, "p": {"pin": True}}
    async with serving(several(tmp_path, model_dir, models)) as (front, client):
        one, most = host(front, "a"), model_pool.MOST_KEEP_S

        async def generate(model: str = "a", **fields: Any) -> httpx.Response:
            body = {"model": model, "prompt": "x", "stream": False, "options": {"num_predict": 2}, **fields}
            return await client.post("/api/generate", json=body)

        await until(lambda: states(front)["p"] == "ready")
        for keep, idle_s in (("5m", 300), ("1h30m", 5400), (7, 7), ("10", 10), (-1, NEVER_S)):
            assert (await generate(keep_alive=keep)).status_code == 200
            assert one.idle_s == idle_s
        await generate(keep_alive="9999h")
        assert one.idle_s == most
        for wrong in ("soon", "5 minutes", "m", "1h-3m"):
            assert (await generate(keep_alive=wrong)).status_code == 400
        loaded = await client.post("/api/generate", json={"model": "a", "keep_alive": "3m"})
        assert (loaded.json()["done_reason"], one.idle_s) == ("load", 180)
        (entry,) = (each for each in (await client.get("/api/ps")).json()["models"] if each["name"] == "a:latest")
        assert not entry["expires_at"].startswith("9999")
        gone = await client.post("/api/chat", json={"model": "a", "messages": [], "keep_alive": 0})
        assert gone.json()["done_reason"] == "unload"
        await until(lambda: states(front)["a"] == "unloaded")
        assert one.supervisor.starts == 1
        await generate(keep_alive=0)
        await until(lambda: states(front)["a"] == "unloaded")
        assert (await client.post("/api/chat", json={"model": "p", "keep_alive": 0})).json()["done_reason"] == "unload"
        assert states(front)["p"] == "ready"


async def test_lists_show_every_model_and_its_state(tmp_path: Path, model_dir: Path) -> None:
    async with serving(several(tmp_path, model_dir, {"a": {}, "b": {"pin": True}}, has_main=True, room=3 * GB)) as (
        front,
        client,
    ):
        await until(lambda: states(front) == {"tiny": "ready", "a": "unloaded", "b": "ready"})
        cards = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert {name: card["state"] for name, card in cards.items()} == {
            "tiny": "loaded",
            "a": "not-loaded",
            "b": "loaded",
        }
        assert (await client.get("/v1/models/a")).json()["pinned"] is False
        tags = [one["name"] for one in (await client.get("/api/tags")).json()["models"]]
        assert tags == ["tiny:latest", "a:latest", "b:latest"]
        assert {one["name"] for one in (await client.get("/api/ps")).json()["models"]} == {"tiny:latest", "b:latest"}
        shown = await client.post("/api/show", json={"model": "a"})
        assert "tools" in shown.json()["capabilities"]
        assert states(front)["a"] == "unloaded"
        page = (await client.get("/metrics")).text
        assert 'edgemoe_live_requests{model_name="b"} 0.0' in page
        assert page.count("# TYPE edgemoe_num_requests_running ") == 1


async def test_status_doctor_and_the_list_of_models_show_them(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"a": {}, "bad": {"path": str(tmp_path / "missing")}}
    settings = several(tmp_path, model_dir, models, has_main=True)
    async with serving(settings) as (front, client):
        await ask(client, "bad")
        await until(lambda: states(front)["tiny"] == "ready")

        def read_views() -> tuple[str, list[CheckResult]]:
            with Client(Path(settings.api.socket)) as own:
                screen = Console(file=io.StringIO(), width=200)
                screen.print(render(take_snapshot(own, Path(settings.api.socket))))
                assert isinstance(screen.file, io.StringIO)
                return screen.file.getvalue(), daemon(Path(settings.api.socket))[0]

        shown, checked = await asyncio.to_thread(read_views)
        sets = [f"api.socket={settings.api.socket}", f"model.store_dir={tmp_path / 'stores'}"]
        await asyncio.to_thread(main, ["models", "list", *(word for each in sets for word in ("--set", each))])
        for text in (shown, capsys.readouterr().out):
            assert "tiny   ready, pinned" in text
            assert "a      unloaded" in text
            assert "bad    failed" in text
        assert ("a: unloaded", "pass") in [(each.said, each.state) for each in checked]
        (failed,) = (each for each in checked if each.said.startswith("bad: "))
        assert failed.state == "failure"


async def test_a_reload_adds_changes_and_removes_models_and_touches_no_other(tmp_path: Path, model_dir: Path) -> None:
    before = several(tmp_path, model_dir, {"a": {}, "b": {}, "old": {}}, 3 * GB, has_main=True)
    now = {"is": before}
    async with serving(before, reread=lambda: now["is"]) as (front, client):
        for name in ("b", "old"):
            await ask(client, name)
        stream = await hold(client, "tiny")
        pids = {name: host(front, name).supervisor.describe()["engine"]["pid"] for name in ("tiny", "b", "old")}
        models = dict(before.models) | {"new": before.models["a"]}
        del models["old"]
        models["a"] = msgspec.structs.replace(models["a"], memory_bytes=GB // 2)
        models["b"] = msgspec.structs.replace(models["b"], pin=True)
        now["is"] = msgspec.structs.replace(before, models=models)
        said = (await client.post("/reload")).json()["message"]
        assert "old is served no longer" in said
        assert "new is served, too" in said
        assert (await ask(client, "old")).status_code == 404
        assert (await ask(client, "new")).status_code == 200
        assert host(front, "b").served.is_pinned
        for name in ("tiny", "b"):
            assert host(front, name).supervisor.describe()["engine"]["pid"] == pids[name]
        await until(lambda: not Path(f"/proc/{pids['old']}").exists())
        assert not stream.done()
        await end(stream)


async def test_a_reload_that_cannot_be_followed_leaves_all_as_it_was(tmp_path: Path, model_dir: Path) -> None:
    before = several(tmp_path, model_dir, {"a": {}, "b": {}})
    now = {"is": before}
    async with serving(before, reread=lambda: now["is"]) as (front, client):
        other_first = {"c": before.models["a"], **before.models}
        changed_first = before.models | {"a": msgspec.structs.replace(before.models["a"], memory_bytes=GB // 2)}
        for models in (other_first, {"b": before.models["b"]}, changed_first, {}):
            now["is"] = msgspec.structs.replace(before, models=models)
            refused = await client.post("/reload")
            assert refused.status_code == 409, models
        assert states(front) == {"a": "unloaded", "b": "unloaded"}
        assert (await ask(client, "b")).status_code == 200


async def test_a_daemon_of_one_model_takes_further_ones_at_a_reload(tmp_path: Path, model_dir: Path) -> None:
    before = several(tmp_path, model_dir, {}, has_main=True)
    now = {"is": before}
    async with serving(before, reread=lambda: now["is"]) as (front, client):
        await ask(client, "tiny")
        now["is"] = several(tmp_path, model_dir, {"b": {}}, has_main=True)
        await client.post("/reload")
        assert (await ask(client, "b")).json()["model"] == "b"
        assert (await ask(client, "tiny")).json()["model"] == "tiny"
        assert host(front, "tiny").supervisor.starts == 1
