"""Two boxes on loopback, each lacking experts that the other has, serve models of several families. Engines die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from support.box_kit import Oracle, talking_checkpoint
from support.box_processes import Box, make_boxes, settled
from support.checkpoints import partial_store
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names
from edgemoe.types.experts import padded

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
EXPERTS = 18  # in all


class Served(NamedTuple):
    boxes: tuple[Box, Box]
    oracle: Oracle


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["gpt_oss", "gemma4_text", "deepseek_v3"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Two boxes that have a plan; a's disk lacks half of the experts."""
    folder = tmp_path_factory.mktemp("x")
    checkpoint = talking_checkpoint(request.param, folder / "hf", stacked=True)
    store = ensure_store(checkpoint, folder / "stores")
    half = partial_store(store, folder / "half", np.tile(np.arange(6) < 3, (EXPERTS // 6, 1)))
    slot = padded(Manifest.load(store).entry(0, 0).bytes)
    a, b = make_boxes(
        folder,
        {"a": half, "b": store},
        free_ports(2),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": (EXPERTS // 2 + 2) * slot, "kv_bytes": 8 << 20},
        engine={"threads": 1},
        service={"max_restarts": 50, "drain_s": 2.0},
        cluster={"leader": "a", "replicas": 1, "absent_s": 60.0},
    )
    a.start()
    b.start()
    try:
        await until(lambda: settled((a, b), ("a", "b")))
        yield Served((a, b), Oracle(checkpoint))
    finally:
        await asyncio.gather(a.close(), b.close())


async def test_two_boxes_generate_one_box_s_tokens(served: Served) -> None:
    prompts = ["number one", "a longer prompt of several words " * 3]
    said = await asyncio.gather(*(box.complete(p, 64) for box, p in zip(served.boxes, prompts, strict=True)))
    assert said == [served.oracle.complete(prompt, 64) for prompt in prompts]
    metrics = names.parse(await served.boxes[0].metrics())
    assert names.select(metrics, names.REMOTE_EXPERTS) + names.select(metrics, names.EXPERTS_FETCHED) > 0


async def test_a_stream_goes_on_when_its_engine_dies(served: Served) -> None:
    a, _ = served.boxes
    assert await a.stream("go on", 300, 20, a.kill_engine) == served.oracle.complete("go on", 300)
