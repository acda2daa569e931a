"""Two real engine processes that compute for each other, and the survivor when one of them is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.checkpoints import tiny_checkpoint
from support.kept import STORES
from test_worker import EXPERT_BYTES, START_S, Child, started

from edgemoe.cluster.rpc.keys import Secret, generate
from edgemoe.config.settings import (
    ClusterSettings,
    EngineSettings,
    LogSettings,
    MemorySettings,
    ModelSettings,
    Settings,
)
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import (
    Cancel,
    ChannelsOpened,
    ExpertActivity,
    ExpertDemandReport,
    FetchPrefixKV,
    HeldExperts,
    PeerEngine,
    PeerLinkMeasured,
    PeerList,
    PrefixKVFetched,
    PrefixSignatureReply,
    PrefixSignatureRequest,
    PromptSignature,
    Ready,
    Submit,
)
from edgemoe.policy.routing.signatures import ModelSizes, counts_of
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import pack
from edgemoe.types.placement import unpack_bits
from edgemoe.types.request import Request, Sampling

LAYERS, EXPERTS, TOP_K = 3, 6, 2
SIZES = ModelSizes(LAYERS, EXPERTS)


def without_experts(store: Path) -> None:
    """Removes all experts but the first of each layer from the store's manifest."""
    manifest = Manifest.load(store)
    layers = tuple(msgspec.structs.replace(layer, experts=layer.experts[:1]) for layer in manifest.layers)
    msgspec.structs.replace(manifest, layers=layers).save(store)


@asynccontextmanager
async def worker(node: str, store: Path, slots: int, runtime: Path) -> AsyncIterator[tuple[Child, Secret]]:
    key_file = runtime / f"{node}.key"
    key = generate(key_file)
    wire = IpcServer(runtime / node)
    settings = Settings(
        model=ModelSettings(path=str(store), name="tiny", store_dir=str(STORES)),
        memory=MemorySettings(ram_bytes=slots * EXPERT_BYTES, kv_bytes=1 << 20),
        engine=EngineSettings(threads=1, max_sequences=4),
        log=LogSettings(level="error"),
        cluster=ClusterSettings(
            node=node, key_file=str(key_file), listen="127.0.0.1:7540", call_timeout_s=3, route="eldr"
        ),
    )
    async with started(settings, wire) as child:
        yield child, key


def engine(node: str, ports: ChannelsOpened) -> PeerEngine:
    return PeerEngine(
        node=node,
        boot="boot",
        calls=f"127.0.0.1:{ports.calls_port}",
        bulk=f"127.0.0.1:{ports.bulk_port}",
    )


def submit(name: str) -> Submit:
    sampling = Sampling(temperature=0.0, max_tokens=24)
    return Submit(request=Request(id=name, prompt=(3, 30, 60, 9), sampling=sampling, seed=1), remaining_ms=60_000)


@asynccontextmanager
async def helped(tmp_path: Path) -> AsyncIterator[tuple[Child, Child]]:
    """Runs box a with one expert a layer and room for four, and box b, which has all and computes for it."""
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), tmp_path / "whole")
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint again"), tmp_path / "part")
    without_experts(tmp_path / "part")
    async with (
        worker("a", tmp_path / "part", 4, tmp_path) as (a, a_key),
        worker("b", tmp_path / "whole", LAYERS * EXPERTS, tmp_path) as (b, b_key),
    ):
        a_ports, b_ports = [await box.next_message(ChannelsOpened, START_S) for box in (a, b)]
        for box in (a, b):
            await box.next_message(Ready, START_S)
        a.send_message(PeerList(keys={"b": (b_key.public.decode(),)}, engines=(engine("b", b_ports),)))
        b.send_message(PeerList(keys={"a": (a_key.public.decode(),)}, engines=(engine("a", a_ports),)))
        assert (await a.next_message(PeerLinkMeasured)).node == "b"
        yield a, b


async def test_a_box_with_few_experts_generates_its_helper_s_tokens_until_that_is_killed(tmp_path: Path) -> None:
    async with helped(tmp_path) as (a, b):
        b.send_message(submit("r"))
        wanted = await b.tokens("r")
        a.send_message(submit("r"))
        assert await a.tokens("r") == wanted
        await check_what_it_says_of_choices(a)
        prompt = await check_that_a_prompt_has_one_signature(a)
        b.send_message(FetchPrefixKV(request="pulled", attempt=1, node="a", prompt=prompt))
        assert await b.next_message(PrefixKVFetched) == PrefixKVFetched(request="pulled", attempt=1, blocks=6)
        b.process.kill()
        await b.process.wait()
        a.send_message(msgspec.structs.replace(submit("again"), remaining_ms=2_000))
        end = await a.end()
        assert (end.finish, end.error_code) == ("error", "missing_expert")
        Manifest.load(tmp_path / "whole").save(tmp_path / "part")  # its files were complete all along
        while not unpack_bits((await a.next_message(HeldExperts)).disk, LAYERS, EXPERTS).all():
            pass
        a.send_message(submit("whole"))
        assert await a.tokens("whole") == wanted


async def check_what_it_says_of_choices(a: Child) -> None:
    """Checks the reported experts of a prompt, and of steps during the request and after it."""
    sampling = Sampling(temperature=0.0, max_tokens=900)
    request = Request(id="long", prompt=(3, 30, 60, 9), sampling=sampling, seed=1)
    a.send_message(Submit(request=request, remaining_ms=60_000, signature=True))
    read = await a.next_message(PromptSignature)
    assert (read.request, read.attempt) == ("long", 1)
    assert 4 <= read.signature.tokens <= 16  # the prompt, and the tokens that have filled its one block meanwhile
    counts = counts_of(read.signature.tokens, read.signature.chosen, SIZES)
    assert counts is not None
    np.testing.assert_allclose(counts.sum(axis=1), read.signature.tokens * TOP_K, rtol=1e-3)
    here = await a.next_message(ExpertDemandReport)
    while set(here.choices.absent) == {255}:
        here = await a.next_message(ExpertDemandReport)
    far = np.frombuffer(here.choices.far, np.uint8).reshape(LAYERS, EXPERTS)
    assert 0 < (far == 0).sum() <= 4
    assert set(far[far > 0].tolist()) == {2}, "box b has the others in memory"
    assert here.choices.step_s > 0
    await a.tokens("long", 40)
    looks = 0
    while not here.ended:
        here, looks = await a.next_message(ExpertDemandReport), looks + 1
        if looks == 2:  # it has generated more tokens since
            a.send_message(Cancel(request="long", attempt=1))
    (ended,) = here.ended
    assert 4 <= ended.prompt.tokens <= 16
    assert ended.answer.tokens >= 16
    assert ended.answer.tokens % 16 == 0, "whole blocks"
    for told in (ended.prompt, ended.answer):
        counts = counts_of(told.tokens, told.chosen, SIZES)
        assert counts is not None
        np.testing.assert_allclose(counts.sum(axis=1), told.tokens * TOP_K, rtol=1e-3)
    while set(here.choices.absent) != {255}:
        here = await a.next_message(ExpertDemandReport)


async def check_that_a_prompt_has_one_signature(a: Child) -> tuple[int, ...]:
    """Computes a prompt, and reads it from the cache: both have one signature, also before submission. Returns the
    prompt.
    """
    prompt = tuple(int(token) for token in np.random.default_rng(5).integers(3, 90, 103))
    read = list[PromptSignature]()
    for name in ("computed", "cached"):
        a.send_message(PrefixSignatureRequest(request=name, prompt=prompt))
        found = await a.next_message(PrefixSignatureReply)
        request = Request(id=name, prompt=prompt, sampling=Sampling(temperature=0.0, max_tokens=800), seed=1)
        a.send_message(Submit(request=request, remaining_ms=60_000, signature=True))
        read.append(await a.next_message(PromptSignature))
        a.send_message(Cancel(request=name, attempt=1))
        assert (found.request, read[-1].request) == (name, name)
        assert found.signature == (read[0].signature if name == "cached" else None)
    assert read[0].signature == read[1].signature
    assert read[0].signature.tokens == 96, "its whole blocks"
    return prompt


@pytest.mark.slow
async def test_an_engine_reports_its_held_experts(tmp_path: Path) -> None:
    pack(tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), tmp_path / "part")
    without_experts(tmp_path / "part")
    async with worker("a", tmp_path / "part", 8, tmp_path) as (a, _):
        holds = await a.next_message(HeldExperts, START_S)
        disk = unpack_bits(holds.disk, LAYERS, EXPERTS)
        np.testing.assert_array_equal(disk, np.tile(np.arange(EXPERTS) == 0, (LAYERS, 1)))
        assert holds.budget_experts == 6


@pytest.mark.slow
async def test_an_engine_reports_its_own_requests_experts_only(tmp_path: Path) -> None:
    async with helped(tmp_path) as (a, b):
        a.send_message(submit("r"))
        await a.tokens("r")
        asked = await a.next_message(ExpertActivity, START_S)
        for _ in range(3):  # the report of an earlier period comes first
            asked = asked if asked.tokens else await a.next_message(ExpertActivity, START_S)
        assert 20 < asked.tokens < 28  # four of the prompt, 24 less the last, with decay; none of the warm-up
        chosen = np.frombuffer(asked.chosen, np.uint16).reshape(LAYERS, EXPERTS)
        np.testing.assert_allclose(chosen.sum(axis=1), TOP_K * 65535, rtol=1e-3)
        pairs = np.frombuffer(asked.pairs, np.uint16).reshape(-1, 4)
        assert pairs[:, 3].sum() == pytest.approx(LAYERS * TOP_K * (TOP_K - 1) / 2 * 65535, rel=1e-2)
        for _ in range(3):
            assert not (
                await b.next_message(ExpertActivity, START_S)
            ).tokens  # it computed for a, and had no requests of its own
