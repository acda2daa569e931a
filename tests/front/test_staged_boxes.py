"""Two boxes on loopback, each with some layers of a model, serve it by both fronts. Engines die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio
from support.box_kit import Oracle, talking_checkpoint
from support.box_processes import Box, make_boxes
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


class Served(NamedTuple):
    boxes: tuple[Box, Box]
    oracle: Oracle


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("qwen3_moe", "a:0-0 b:1-2"), ("gpt_oss", "a:0-0 b:1-2"), ("qwen3_next", "a:0-0 b:1-2")],
    ids=["qwen3_moe", "gpt_oss", "qwen3_next"],
)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Two boxes that are ready, and have keys and values by default; gpt_oss's layer that sees all tokens is b's."""
    folder, (family, stages) = tmp_path_factory.mktemp("x"), request.param
    checkpoint = talking_checkpoint(family, folder / "hf", stacked=True)
    store = ensure_store(checkpoint, folder / "stores")
    a, b = make_boxes(
        folder,
        {"a": store, "b": store},
        free_ports(2),
        model={"name": "tiny", "store_dir": str(STORES)},
        engine={"threads": 1, "step_tokens": 32},
        service={"max_restarts": 50, "drain_s": 2.0},
        cluster={"leader": "a", "stages": stages},
    )
    a.start()
    b.start()

    async def ready() -> bool:
        return [(await box.health()).get("status") for box in (a, b)] == ["ready", "ready"]

    try:
        await until(ready)
        yield Served((a, b), Oracle(checkpoint))
    finally:
        await asyncio.gather(a.close(), b.close())


async def test_both_fronts_give_one_box_s_tokens(served: Served) -> None:
    prompts = ["number one", "a longer prompt of several words " * 3, "third", "a longer prompt of several words again"]
    asked = zip(served.boxes * 2, prompts, strict=True)
    said = await asyncio.gather(*(box.complete(prompt, 64) for box, prompt in asked))
    assert said == [served.oracle.complete(prompt, 64) for prompt in prompts]
    a, b = [names.parse(await box.metrics()) for box in served.boxes]
    assert names.select(a, names.STAGE_STEPS, peer="b") > 0
    assert names.select(b, names.STAGE_STEPS_SERVED) > 0
    stages = (await served.boxes[0].health())["cluster"]["stages"]
    assert [(stage["node"], stage["state"], stage["answers"]) for stage in stages] == [
        ("a", "here", None),
        ("b", "here", True),
    ]
    assert min(stage["dense_bytes"] for stage in stages) > 0


@pytest.mark.parametrize("front", [0, 1])
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_stream_goes_on_when_an_engine_dies(served: Served, front: int, killed: int) -> None:
    prompt = f"go on {front} {killed}"
    text = await served.boxes[front].stream(prompt, 200, 20, served.boxes[killed].kill_engine)
    assert text == served.oracle.complete(prompt, 200)
