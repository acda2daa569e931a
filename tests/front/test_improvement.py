"""Two whole boxes on loopback; only one gets requests, and the plan gives it their experts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

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
from edgemoe.types.experts import padded

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800), pytest.mark.slow]
NODES = ("a", "b")
EXPERTS = 18  # in all
SLOTS = EXPERTS // 2 + 4  # of RAM: two slots stay free for passing experts, two more allow moves
PROMPT, TOKENS = "one and the same", 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "hf")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Box]]:
    """Box a leads and gets the requests; it has no expert on its disk."""
    folder = tmp_path_factory.mktemp("x")
    store = ensure_store(checkpoint, folder / "stores")
    bare = partial_store(store, folder / "bare", np.zeros((3, 6), np.bool_))
    slot = padded(Manifest.load(store).entry(0, 0).bytes)
    made = make_boxes(
        folder,
        {"a": bare, "b": store},
        free_ports(len(NODES)),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": SLOTS * slot, "kv_bytes": 8 << 20},
        engine={"threads": 1},
        cluster={"coordination": "single", "leader": "a", "replicas": 1, "migrate_s": 5.0},
    )
    for box in made:
        box.start()
    try:
        await until(lambda: settled(made, NODES))
        yield made
    finally:
        for box in made:
            await box.close()


async def test_a_plan_follows_the_requests_experts_and_changes_no_token(boxes: list[Box], checkpoint: Path) -> None:
    a = boxes[0]
    first = (await a.cluster())["plan"]
    assert first["policy"] == "uniform"
    said: set[str] = set()

    async def improved() -> bool:
        said.add(await a.complete(PROMPT, TOKENS))  # without further requests no move would pay
        plan = (await a.cluster())["plan"]
        return bool(plan["policy"] == "rendezvous" and plan["version"] > first["version"])

    await until(improved, 300.0)

    async def moved() -> bool:
        said.add(await a.complete(PROMPT, TOKENS))
        told = [(await box.cluster())["plan"]["digest"] for box in boxes]
        moving = sum(member["to_come"] for member in (await a.cluster())["members"])
        return len(set(told)) == 1 and not moving and not any([await box.missing() for box in boxes])

    await until(moved)
    assert said == {Oracle(checkpoint).complete(PROMPT, TOKENS)}
