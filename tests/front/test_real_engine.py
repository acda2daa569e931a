"""The front with the real engine behind it: a tiny random Qwen3-MoE in float32, in tiers smaller than its experts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from support.checkpoints import tiny_checkpoint
from support.front_kit import (
    byte_level_tokenizer,
    http_client,
    openai_client,
    ready,
    running,
    settings_for,
    write_model,
)
from support.waiting import until

from edgemoe.config.settings import CacheSettings, DeviceSettings, MemorySettings
from edgemoe.demo import model_path
from edgemoe.experts.predict.scoutgate_model import WEIGHTS, ScoutGate, ScoutGateShape, write_export
from edgemoe.front import engine_process as engine
from edgemoe.front.main import WORKER, Front
from edgemoe.front.supervisor import Supervisor
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names
from scoutgate.embedding import load_embedding

pytestmark = pytest.mark.asyncio(loop_scope="session")
HANGING = (sys.executable, str(Path(__file__).parents[1] / "support" / "hanging_worker.py"))
FREE = {"ignore_eos": True}  # a random model ends its texts at random


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed store of a random model with the tests' tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab = byte_level_tokenizer().get_vocab_size()
    checkpoint = tiny_checkpoint("qwen3_moe", folder / "hf", vocab_size=vocab, max_position_embeddings=512)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    config = (checkpoint / "config.json").read_text()
    write_model(checkpoint)
    (checkpoint / "config.json").write_text(config)
    return ensure_store(checkpoint, folder / "stores")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def front(store: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """VRAM for a quarter of the experts, RAM for half of them."""
    experts = sum(Manifest.load(store).entry(layer, expert).bytes for layer in range(3) for expert in range(6))
    device = DeviceSettings(kind="emulated", expert_bytes=experts // 4, link_bytes_per_s=1e9)
    settings = settings_for(
        tmp_path_factory.mktemp("f"),
        store,
        memory=MemorySettings(ram_bytes=experts // 2, kv_bytes=4 << 20),
        cache=CacheSettings(scoutgate=str(tmp_path_factory.mktemp("forecaster"))),
        device=(device,),
        service={"max_restarts": 50},
    )
    async with running(settings, WORKER) as front:
        yield front


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(front.settings) as client:
        yield client


def supervisor_of(front: Front) -> Supervisor:
    assert front.supervisor is not None
    return front.supervisor


def total(front: Front) -> int:
    """Counts the tokens emitted by live requests."""
    return sum(len(live.emitted) for live in supervisor_of(front).requests.machine._live.values())


async def texts(front: Front, count: int, max_tokens: int) -> list[str]:
    """Streams `count` completions at once, every other one greedy."""
    async with openai_client(front.settings) as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model="tiny",
                prompt=f"number {number}",
                seed=number,
                temperature=number % 2,
                max_tokens=max_tokens,
                stream=True,
                extra_body=FREE,
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return list(await asyncio.gather(*map(one, range(count))))


async def test_a_kill_midstream_leaves_every_text_as_it_would_have_been(front: Front) -> None:
    expected = await texts(front, 6, 120)
    requests = supervisor_of(front).requests
    dying = asyncio.ensure_future(texts(front, 6, 120))
    await until(lambda: total(front) > 100)
    os.kill(supervisor_of(front).describe()["engine"]["pid"], signal.SIGKILL)
    assert await dying == expected
    assert requests.machine.resubmitted


async def test_a_compute_thread_that_hangs_is_noticed_and_every_text_goes_on_as_it_would_have(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "hang"
    monkeypatch.setenv("HANG", str(told))
    monkeypatch.setattr(engine, "STEP_S", 1.0)
    settings = settings_for(tmp_path, store, service={"max_restarts": 50})
    async with running(settings, HANGING) as front:
        expected = await texts(front, 6, 120)
        for place in ("forward", "sample"):
            first = supervisor_of(front).describe()["engine"]["pid"]
            streams = asyncio.ensure_future(texts(front, 6, 120))
            await until(lambda: total(front) > 100)
            told.write_text(place)
            assert await streams == expected
            assert "has come no further" in supervisor_of(front).why
            assert supervisor_of(front).describe()["engine"]["pid"] != first
            assert not Path(f"/proc/{first}").exists()


async def test_a_forecaster_is_loaded_midstream_and_a_bad_one_refused(
    front: Front, http: httpx.AsyncClient, store: Path
) -> None:
    folder = Path(front.settings.cache.scoutgate)
    shape = ScoutGateShape((6, 6, 6), 2, load_embedding(store).shape[1])
    calibration = torch.ones(shape.horizons * shape.layers), torch.zeros(shape.horizons * shape.layers)
    expected = await texts(front, 6, 120)
    refused = await http.post("/reload")
    assert refused.status_code == 409
    assert "not a ScoutGate export" in refused.json()["error"]["message"]
    before = total(front)
    streaming = asyncio.ensure_future(texts(front, 6, 120))
    await until(lambda: total(front) > before + 60)
    write_export(folder, ScoutGate(shape), calibration, {"id": "tiny"}, {})
    assert (await http.post("/reload")).json() == {"message": f"the ScoutGate in {folder} is in use"}
    assert supervisor_of(front).requests.machine._live
    write_export(folder, ScoutGate(shape), calibration, {"id": "another", "digest": "another"}, {})
    assert "for another" in (await http.post("/reload")).json()["error"]["message"]
    (folder / WEIGHTS).write_bytes(b"torn")
    assert "damaged" in (await http.post("/reload")).json()["error"]["message"]
    assert await streaming == expected
    values = supervisor_of(front).metrics()
    await until(lambda: supervisor_of(front).metrics() is not values)
    metrics = names.parse((await http.get("/metrics")).text)
    assert names.select(metrics, names.SCOUTGATE_LOADS) == 1
    assert names.select(metrics, names.SCOUTGATE_REFUSED) == 4  # one at the start, before any statistics
    assert names.select(metrics, names.SCOUTGATE_SECONDS) > 0


async def test_a_hundred_requests_with_rude_clients_leave_nothing_behind(front: Front, http: httpx.AsyncClient) -> None:
    async def one(number: int) -> int:
        body = {"prompt": f"p{number}" * 9, "max_tokens": 20, "seed": number, "stream": number % 2 == 0, **FREE}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                if number % 3 == 0:
                    return 0  # hangs up midway
        return answer.status_code

    assert set(await asyncio.gather(*map(one, range(100)))) <= {0, 200}
    supervisor = supervisor_of(front)
    await until(lambda: not supervisor.requests)
    for figure in (names.REQUESTS_RUNNING, names.QUEUE_DEPTH, names.KV_BLOCKS_REFERENCED):
        await until(lambda figure=figure: supervisor.metrics()[figure] == 0)  # type: ignore[misc]
    assert not [name for name, value in supervisor.metrics().items() if "integrity" in name and value]


async def test_the_same_prompt_again_comes_from_the_prefix_cache_and_says_the_same(http: httpx.AsyncClient) -> None:
    body = {"prompt": "a prompt of several blocks " * 4, "max_tokens": 8, "temperature": 0, **FREE}
    first, second = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def test_a_schema_is_followed(http: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 300,
        "seed": 3,
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert value.keys() == {"ok", "n"}


async def test_a_required_call_is_made(http: httpx.AsyncClient) -> None:
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "lamp", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "lamp"}},
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 300,
        "seed": 5,
    }
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "lamp"
    assert set(json.loads(call["function"]["arguments"])) == {"on"}
    assert choice["finish_reason"] == "tool_calls"


async def test_logprobs_belong_to_the_likeliest_tokens(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 5, "temperature": 0, "logprobs": 3, **FREE}
    logprobs = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen == max(top.values())
        assert sum(2.718281828**value for value in top.values()) <= 1.001


async def test_the_metrics_name_the_tiers(front: Front, http: httpx.AsyncClient) -> None:
    await until(lambda: ready(front))
    metrics = names.parse((await http.get("/metrics")).text)
    assert names.select(metrics, names.TIER_HITS) > 0
    assert names.select(metrics, names.TIER_SLOTS, tier="vram") > 0


@pytest.mark.slow
async def test_the_demo_model_answers_on_through_three_kills(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In bfloat16 a continuation may differ after a resubmission, but each answer is whole and ends correctly."""
    folder = tmp_path_factory.mktemp("demo")
    store = ensure_store(model_path(), folder / "stores")
    settings = settings_for(folder, store, service={"max_restarts": 50})
    async with running(settings, WORKER) as front, http_client(settings) as client:
        body = {"prompt": "def add(a, b):", "max_tokens": 400, "temperature": 0, "stream": True, **FREE}
        body["stream_options"] = {"include_usage": True}
        asking = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        for start in range(1, 4):
            await until(lambda: total(front) > start * 300, 300)  # noqa: B023 (used at once)
            os.kill(supervisor_of(front).describe()["engine"]["pid"], signal.SIGKILL)
            await until(lambda: supervisor_of(front).starts > start)  # noqa: B023
        for answer in await asyncio.gather(*asking):
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events[-1]["usage"]["completion_tokens"] == 400
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert supervisor_of(front).requests.machine.gaps == 0
