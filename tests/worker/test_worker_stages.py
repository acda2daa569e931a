"""Engine processes that each hold some layers of a model give the original model's tokens, also when one is killed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import tiny_checkpoint
from support.kept import STORES
from test_worker import EXPERT_BYTES, START_S, Child, started
from transformers import AutoModelForCausalLM

from edgemoe.cluster.rpc.keys import Secret, generate, load_secret
from edgemoe.config.settings import (
    ClusterSettings,
    EngineSettings,
    LogSettings,
    MemorySettings,
    ModelSettings,
    Settings,
)
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import ChannelsOpened, Emissions, PeerEngine, PeerList, Ready, Stats, Submit
from edgemoe.store.packer import pack
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.request import Emission, Request, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPLITS = {2: "a:0-0 b:1-2", 3: "a:0-0 b:1-1 c:2-2"}
TIGHT_BYTES = 44 << 10  # keys and values of the first stage's layer: too few for all requests at once
PROMPTS = {f"r{length}": tuple(range(3, 3 + length)) for length in (5, 40, 61, 77)}
TOKENS = 60
PAUSED = named(names.PREEMPTIONS, way="recompute")


@asynccontextmanager
async def worker(
    node: str, store: Path, runtime: Path, stages: str, kv_bytes: int
) -> AsyncIterator[tuple[Child, Secret]]:
    """Runs the engine of a box."""
    key_file = runtime / f"{node}.key"
    key = load_secret(key_file) if key_file.exists() else generate(key_file)
    wire = IpcServer(runtime / f"{node}{secrets.token_hex(2)}")
    cluster = ClusterSettings(
        node=node, key_file=str(key_file), listen="127.0.0.1:7540", call_timeout_s=3, stages=stages
    )
    settings = Settings(
        model=ModelSettings(path=str(store), name="tiny", store_dir=str(STORES)),
        memory=MemorySettings(ram_bytes=9 * EXPERT_BYTES, kv_bytes=kv_bytes),
        engine=EngineSettings(threads=1, max_sequences=4, step_tokens=24),
        log=LogSettings(level="error"),
        cluster=cluster,
    )
    async with started(settings, wire) as child:
        yield child, key


def submit(child: Child, names: Iterable[str], tokens: int = TOKENS, attempt: int = 1, seconds: float = 60.0) -> None:
    for name in names:
        sampling = Sampling(temperature=0.0, max_tokens=tokens)
        request = Request(id=name, prompt=PROMPTS[name], sampling=sampling, seed=1)
        child.send_message(Submit(request=request, attempt=attempt, remaining_ms=seconds * 1e3))


def again(child: Child, attempt: int) -> Child:
    """Submits the longest request once more."""
    submit(child, ["r77"], attempt=attempt)
    return child


async def answers(
    child: Child, names: Iterable[str], until: int = 10**9
) -> tuple[dict[str, list[int]], list[Emission]]:
    """Returns the tokens of requests, and their ends, once all have ended or `until` tokens have come."""
    found: dict[str, list[int]] = {name: [] for name in names}
    ends: list[Emission] = []
    while len(ends) < len(found) and sum(map(len, found.values())) < until:
        for item in (await child.next_message(Emissions)).items:
            if item.token is not None:
                assert item.index == len(found[item.request])
                found[item.request].append(item.token)
            ends += [item] if item.finish else []
    return found, ends


async def counted(child: Child, name: str, least: float = 1) -> None:
    """Waits until an engine reports such a number."""
    for _ in range(100):
        if (found := (await child.next_message(Stats)).values[name]) >= least:
            return
    raise AssertionError(f"{name} is {found}, not {least} or more")


class Boxes:
    """Engines that know each other."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}
        self._keys: dict[str, str] = {}
        self._engines: dict[str, PeerEngine] = {}

    async def add(self, node: str, child: Child, key: Secret) -> None:
        ports = await child.next_message(ChannelsOpened, START_S)
        calls, bulk = (f"127.0.0.1:{port}" for port in (ports.calls_port, ports.bulk_port))
        self.children[node], self._keys[node] = child, key.public.decode()
        self._engines[node] = PeerEngine(node=node, boot=secrets.token_hex(4), calls=calls, bulk=bulk)

    def introduce(self) -> None:
        for node, child in self.children.items():
            if child.process.returncode is None:
                keys = {other: (key,) for other, key in self._keys.items() if other != node}
                child.send_message(PeerList(keys=keys, engines=tuple(self._engines[other] for other in keys)))


def packed(folder: Path, family: str, **overrides: Any) -> Path:
    pack(tiny_checkpoint(family, folder / "checkpoint", **overrides), folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("model"), "qwen3_moe")


@cache
@torch.inference_mode()
def expected_tokens(store: Path) -> dict[str, list[int]]:
    """Returns the tokens of the original model, request after request."""
    model = AutoModelForCausalLM.from_pretrained(store.with_name("checkpoint")).eval()
    lengths = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0, "eos_token_id": []}
    found = {}
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
        found[name] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
async def test_boxes_with_some_layers_each_give_the_original_model_s_tokens(
    store: Path, tmp_path: Path, count: int
) -> None:
    boxes, split, expected = Boxes(), SPLITS[count], expected_tokens(store)
    async with AsyncExitStack() as opened:
        for node in "cba"[3 - count :]:
            kv_bytes = TIGHT_BYTES if node == "a" else 2 << 20
            child, key = await opened.enter_async_context(worker(node, store, tmp_path, split, kv_bytes))
            await boxes.add(node, child, key)
        boxes.introduce()
        for node, child in boxes.children.items():
            ready = await child.next_message(Ready, START_S)
            assert ready.takes_requests == (node == "a")
        a = boxes.children["a"]
        paused = (await a.next_message(Stats)).values[PAUSED]  # by openings
        submit(a, PROMPTS)
        found, ends = await answers(a, PROMPTS)
        assert found == expected
        assert {end.finish for end in ends} == {"length"}
        await counted(a, PAUSED, least=paused + 1)
        await counted(a, named(names.STAGE_STEPS, peer="b"))
        assert (await answers(again(a, 2), ["r77"]))[0]["r77"] == expected["r77"]
        again(a, 3)
        assert (await a.next_message(Emissions)).items[0].cached_tokens >= 64, "the prompt is cached here and there"
        for node, child in boxes.children.items():
            if node != "a":
                await counted(child, names.STAGE_STEPS_SERVED)


# family, kinds of layers where others than usual, and the memory for keys, values and states of a and b
UNEQUAL = {
    "blocks": ("qwen3_moe", (), (2 << 20, 2 * TIGHT_BYTES)),
    "windows": ("gpt_oss", (), (2 << 20, 140 << 10)),
    "windows elsewhere": ("gpt_oss", ("full", "sliding", "sliding"), (2 << 20, 140 << 10)),
    "states": ("qwen3_next", (), (2 << 20, 80 << 10)),
    "states elsewhere": ("qwen3_next", ("full", "linear", "linear"), (2 * TIGHT_BYTES, 200 << 10)),
}
USUAL = ("windows", "states")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in USUAL else [pytest.mark.slow]) for kind in UNEQUAL]
)
async def test_the_first_box_uses_the_places_that_all_boxes_have(tmp_path: Path, kind: str) -> None:
    family, layers, memory = UNEQUAL[kind]
    overrides = {"layer_types": [f"{layer}_attention" for layer in layers]} if layers else {}
    store = packed(tmp_path, family, **overrides)
    expected = expected_tokens(store)
    async with AsyncExitStack() as opened:
        boxes, split = Boxes(), SPLITS[2]
        for node, kv_bytes in zip("ab", memory, strict=True):
            await boxes.add(node, *await opened.enter_async_context(worker(node, store, tmp_path, split, kv_bytes)))
        boxes.introduce()
        a = boxes.children["a"]
        await a.next_message(Ready, START_S)
        paused = (await a.next_message(Stats)).values[PAUSED]  # by the opening
        submit(a, PROMPTS)
        assert (await answers(a, PROMPTS))[0] == expected
        await counted(a, PAUSED, least=paused + 1)
        limited = names.WINDOW_BLOCKS if kind == "windows elsewhere" else names.KV_BLOCKS
        assert (await a.next_message(Stats)).values[limited] < 60, "the first box alone has many more"


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
async def test_a_stage_that_is_killed_and_started_again_costs_no_token(
    store: Path, tmp_path: Path, family: str
) -> None:
    boxes, split = Boxes(), SPLITS[2]
    store = store if family == "qwen3_moe" else packed(tmp_path, family)
    expected = expected_tokens(store)
    async with AsyncExitStack() as opened:
        for node, kv_bytes in (("b", 2 << 20), ("a", 1 << 20)):
            await boxes.add(node, *await opened.enter_async_context(worker(node, store, tmp_path, split, kv_bytes)))
        boxes.introduce()
        a, first = boxes.children["a"], boxes.children["b"]
        await a.next_message(Ready, START_S)
        submit(a, PROMPTS)
        begun, ends = await answers(a, PROMPTS, until=40)
        assert not ends
        first.process.kill()
        await first.process.wait()
        less = 110 << 10  # memory for keys, values and states than before: the others use no more from now on
        await boxes.add("b", *await opened.enter_async_context(worker("b", store, tmp_path, split, less)))
        boxes.introduce()
        rest: dict[str, list[int]] = {name: list(tokens) for name, tokens in begun.items()}
        while not all(len(tokens) == TOKENS for tokens in rest.values()):
            for item in (await a.next_message(Emissions)).items:
                if item.token is not None:
                    assert item.index == len(rest[item.request])
                    rest[item.request].append(item.token)
        assert rest == expected
        boxes.children["b"].process.kill()
        submit(a, ["r40"], attempt=2, seconds=3.0)
        _, (end,) = await answers(a, ["r40"])
        assert (end.finish, end.error_code) == ("error", "stage_unavailable")
        assert "layers 1 to 2 of the model are held by b, which does not answer" in end.error
