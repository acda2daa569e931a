"""Boxes of a cluster that serve further models by name: each box answers for the models of all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.front_kit import http_client, keyed_address, listed_boxes, started
from support.waiting import until

from edgemoe.api.http import responding
from edgemoe.api.resources import Api
from edgemoe.cluster.control.messages import ForwardedHttp
from edgemoe.cluster.control.requests import parcels
from edgemoe.config.settings import MemorySettings, NamedModelSettings, Settings
from edgemoe.errors import PeerRefused
from edgemoe.front import engine_starts, hosted_http, model_pool
from edgemoe.front.main import Front

GB = 1 << 30
BODIES: dict[str, dict[str, Any]] = {  # an endpoint of each API that generates
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 4}},
    "/completion": {"prompt": "x", "n_predict": 4},
}
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "some words"},
    "/detokenize": {"tokens": [97, 98]},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/responses/input_tokens": {"input": "x"},
    "/api/show": {},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "TICK_S", 0.05)
    monkeypatch.setattr(engine_starts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(engine_starts, "LONGEST_DELAY_S", 0.05)


def boxes_of(folder: Path, model: Path, models: dict[str, list[str]], **api: Any) -> list[Settings]:
    """Returns settings of boxes with these further models each; `api` is of the first one."""
    made = []
    for settings in listed_boxes(folder, model, list(models), leader=next(iter(models))):
        node = settings.cluster.node
        named = {name: NamedModelSettings(path=str(model), memory_bytes=GB // 4, idle_s=0) for name in models[node]}
        memory = MemorySettings(models_bytes=2 * GB, limit_bytes=GB)
        made.append(msgspec.structs.replace(settings, models=named, memory=memory))
    made[0] = msgspec.structs.replace(made[0], api=msgspec.structs.replace(made[0].api, **api))
    return made


class Cluster:
    """Fronts by name, and a client of each."""

    def __init__(self) -> None:
        self.fronts: dict[str, Front] = {}
        self.clients: dict[str, httpx.AsyncClient] = {}
        self.stacks: dict[str, AsyncExitStack] = {}

    async def start(self, settings: Settings) -> None:
        stack, node = AsyncExitStack(), settings.cluster.node
        self.fronts[node] = await stack.enter_async_context(started(settings, lambda front: front.pool is not None))
        self.clients[node] = await stack.enter_async_context(http_client(settings))
        self.stacks[node] = stack

    def boxes_with(self, node: str, model: str) -> list[str]:
        cluster = self.fronts[node].cluster
        found = cluster.distant.models().get(model) if cluster is not None else None
        return list(found.boxes) if found is not None else []

    def served(self, node: str, model: str) -> int:
        pool = self.fronts[node].pool
        assert pool is not None
        return pool.hosts[model].supervisor.starts

    def hosted(self, node: str) -> int:
        cluster = self.fronts[node].cluster
        assert cluster is not None
        return len(cluster.hosted_http)


@asynccontextmanager
async def cluster_of(*boxes: Settings) -> AsyncIterator[Cluster]:
    cluster = Cluster()
    try:
        await asyncio.gather(*map(cluster.start, boxes))
        yield cluster
    finally:
        await asyncio.gather(*(stack.aclose() for stack in cluster.stacks.values()))


async def known(cluster: Cluster, node: str, model: str, *boxes: str) -> None:
    await until(lambda: sorted(cluster.boxes_with(node, model)) == sorted(boxes))


async def test_each_endpoint_answers_as_the_box_that_has_the_model(tmp_path: Path, model_dir: Path) -> None:
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        there, here = cluster.clients["b"], cluster.clients["a"]
        for path, fields in BODIES.items():
            for stream in (False, True):
                body = {"model": "Extra", "stream": stream, "seed": 1, **fields}
                own, forwarded = [await one.post(path, json=body) for one in (there, here)]
                assert forwarded.status_code == own.status_code == 200, forwarded.text
                assert forwarded.headers["content-type"] == own.headers["content-type"]
                assert names(forwarded) == names(own), path
        for path, fields in COUNTS.items():
            own, forwarded = [await one.post(path, json={"model": "extra", **fields}) for one in (there, here)]
            assert (forwarded.status_code, forwarded.json()) == (own.status_code, own.json()), path
        assert (
            await here.post("/v1/chat/completions", json={"model": "tiny", **BODIES["/v1/chat/completions"]})
        ).json()["model"] == "tiny"
        assert cluster.served("b", "extra") == 1


def names(answer: httpx.Response) -> tuple[set[str], set[str]]:
    """Returns the names in the JSON objects of an answer and in its last one. A busy machine's pieces are larger."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{")] or [answer.json()]
    return set().union(*objects), set(objects[-1])


async def test_errors_come_as_the_other_box_says_them(tmp_path: Path, model_dir: Path) -> None:
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        client = cluster.clients["a"]
        wrong = await client.post(
            "/v1/chat/completions", json={"model": "extra", **BODIES["/v1/chat/completions"], "temperature": 9}
        )
        assert wrong.status_code == 400
        assert "temperature" in wrong.text
        unknown = await client.post("/v1/chat/completions", json={"model": "other", **BODIES["/v1/chat/completions"]})
        assert unknown.status_code == 404
        assert "'tiny', 'extra'" in unknown.text
        listed = await client.post("/v1/completions", json={"model": "other", "models": ["extra"], "prompt": "x"})
        assert listed.json()["model"] == "extra"


async def test_lists_say_which_box_has_which(tmp_path: Path, model_dir: Path) -> None:
    boxes = boxes_of(tmp_path, model_dir, {"a": ["own"], "b": ["own", "extra"]})
    async with cluster_of(*boxes) as cluster:
        await known(cluster, "a", "extra", "b")
        await known(cluster, "a", "own", "b")
        client = cluster.clients["a"]

        async def cards() -> dict[str, Any]:
            return {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}

        async def all_told() -> bool:
            told = await cards()
            return told["tiny"]["boxes"] == ["a", "b"]

        await until(all_told)
        told = await cards()
        assert {name: card["boxes"] for name, card in told.items()} == {
            "tiny": ["a", "b"],
            "own": ["a", "b"],
            "extra": ["b"],
        }
        assert told["extra"]["state"] == "not-loaded"
        assert (await client.get("/v1/models/extra")).json()["boxes"] == ["b"]
        tags = {one["name"]: one["boxes"] for one in (await client.get("/api/tags")).json()["models"]}
        assert tags == {"tiny:latest": ["a", "b"], "own:latest": ["a", "b"], "extra:latest": ["b"]}
        await client.post("/v1/completions", json={"model": "extra", "prompt": "x", "max_tokens": 1})

        async def is_shown() -> bool:
            loaded = {one["name"]: one["boxes"] for one in (await client.get("/api/ps")).json()["models"]}
            return loaded.get("extra:latest") == ["b"]

        await until(is_shown)
        card, own = [(await cluster.clients[node].get("/v1/models/extra")).json() for node in ("a", "b")]
        assert {name: card[name] for name in ("digest", "max_model_len", "state")} == {
            name: own[name] for name in ("digest", "max_model_len", "state")
        }
        health = {one["name"]: one for one in (await client.get("/health")).json()["models"]}
        assert {name: one["boxes"] for name, one in health.items()} == {
            "tiny": ["a", "b"],
            "own": ["a", "b"],
            "extra": ["b"],
        }
        assert health["extra"]["state"] == "ready"


async def test_a_long_prompt_and_a_long_answer_come_whole(tmp_path: Path, model_dir: Path) -> None:
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        asked = {"model": "extra", "content": "x" * 4000, "with_pieces": True}
        body = json.dumps(asked) + " " * (parcels.SHORT_BYTES + parcels.PARCEL_PART_BYTES)
        own, forwarded = [await cluster.clients[node].post("/tokenize", content=body) for node in ("b", "a")]
        assert len(own.content) > hosted_http.PART_BYTES
        assert forwarded.json() == own.json()


async def test_a_client_that_hangs_up_ends_the_request_at_the_other_box(tmp_path: Path, model_dir: Path) -> None:
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        body = {"model": "extra", "prompt": "HANG@3", "max_tokens": 500, "stream": True}
        waiting = asyncio.create_task(cluster.clients["a"].post("/v1/completions", json=body))
        await until(lambda: cluster.hosted("b") == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: cluster.hosted("b") == 0)
        pool = cluster.fronts["b"].pool
        assert pool is not None
        await until(lambda: pool.hosts["extra"].uses == 0)


async def test_the_second_box_answers_where_the_first_is_gone(tmp_path: Path, model_dir: Path) -> None:
    boxes = boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"], "c": ["extra"]})
    async with cluster_of(*boxes) as cluster:
        await known(cluster, "a", "extra", "b", "c")
        cluster.fronts["b"].cluster.hosted_http.app = None  # type: ignore[union-attr]
        answer = await cluster.clients["a"].post("/v1/completions", json={"model": "extra", "prompt": "x"})
        assert answer.status_code == 200
        assert (cluster.served("b", "extra"), cluster.served("c", "extra")) == (0, 1)
        await cluster.stacks.pop("c").aclose()
        refused = await cluster.clients["a"].post("/v1/completions", json={"model": "extra", "prompt": "x"})
        assert refused.status_code == 503
        assert "no box that serves the model 'extra' takes requests; b: " in refused.text
        await cluster.stacks.pop("b").aclose()
        await known(cluster, "a", "extra")
        assert (
            await cluster.clients["a"].post("/v1/completions", json={"model": "extra", "prompt": "x"})
        ).status_code == 404


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_whose_box_is_lost_ends_with_an_error(
    tmp_path: Path, model_dir: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responding, "QUIET_S", 0.05)
    monkeypatch.setattr(responding, "WHOLE_QUIET_S", 0.05)
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        body = {"model": "extra", "prompt": "hold", "max_tokens": 500, "stream": stream}
        async with cluster.clients["a"].stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            got = answer.aiter_text()
            await anext(got)
            own = cluster.fronts["b"].cluster
            assert own is not None
            for exchange in own.hosted_http._exchanges.values():
                monkeypatch.setattr(exchange, "part", refuse)
            if stream:
                rest = "".join([some async for some in got])
                assert "the box b, which was answering, is lost" in rest
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    _ = [some async for some in got]


async def refuse(number: int) -> Any:
    raise PeerRefused("there is no such request here, or not any more")


async def test_no_box_answers_more_than_its_bound_for_another(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_http, "MOST_HOSTED", 1)
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        body = {"model": "extra", "prompt": "HANG@3", "max_tokens": 500}
        waiting = asyncio.create_task(cluster.clients["a"].post("/v1/completions", json=body))
        await until(lambda: cluster.hosted("b") == 1)
        refused = await cluster.clients["a"].post("/v1/completions", json={"model": "extra", "prompt": "x"})
        assert refused.status_code == 503
        assert "1 requests of that box are answered here" in refused.text
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_an_answer_that_nobody_fetches_ends(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_http, "UNASKED_S", float("inf"))
    monkeypatch.setattr(hosted_http, "LOOK_S", 0.05)
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]})) as cluster:
        await known(cluster, "a", "extra", "b")
        asking = cluster.fronts["a"].cluster
        assert asking is not None
        body = json.dumps({"model": "extra", "prompt": "hold", "max_tokens": 500}).encode()
        asked = ForwardedHttp(999, "/v1/completions", "a/uid:7")
        await asking.plane.parcels.forward("b", asked, body, wanted=lambda: True)
        await until(lambda: cluster.hosted("b") == 1)
        monkeypatch.setattr(hosted_http, "UNASKED_S", 0.1)
        await until(lambda: cluster.hosted("b") == 0)


async def test_the_other_box_counts_the_clients_principal_and_no_other(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    before = Api.context

    async def context(api: Api, principal: Any) -> Any:
        seen.append(principal)
        return await before(api, principal)

    monkeypatch.setattr(Api, "context", context)
    address, api = keyed_address(tmp_path)
    async with cluster_of(*boxes_of(tmp_path, model_dir, {"a": [], "b": ["extra"]}, **api)) as cluster:
        await known(cluster, "a", "extra", "b")
        body = {"model": "extra", "prompt": "x", "max_tokens": 1}
        await cluster.clients["a"].post("/v1/completions", json=body)
        async with httpx.AsyncClient(
            base_url=f"http://{address}", headers={"authorization": "Bearer 0123456789abcdef"}
        ) as keyed:
            assert (await keyed.post("/v1/completions", json=body)).status_code == 200
    assert [one.partition(":")[0] for one in seen] == ["a/uid", "key"]


def test_a_forwarded_request_takes_no_principal_of_another_box() -> None:
    told = {
        name: hosted_http._scope("a", ForwardedHttp(1, "/", name), 0)["state"]["told_principal"]
        for name in ("b/uid:0", "a/uid:0", "key:x")
    }
    assert told == {"b/uid:0": "a/b/uid:0", "a/uid:0": "a/uid:0", "key:x": "key:x"}
