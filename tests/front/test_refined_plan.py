"""Three whole boxes, one of them with two devices: successions of experts refine their plan during requests."""

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
NODES = ("a", "b", "c")
SLOTS = 18 // len(NODES) + 4  # of RAM: two slots stay free for passing experts, two more allow moves
PROMPTS, TOKENS = {"a": "one and the same", "c": "something else, then"}, 40
STEPS = 50  # steps of a box after which the leader seeks a better plan


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "hf")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Box]]:
    """Box a, which leads, has no expert on its disk; c has two devices with a third of the experts."""
    folder = tmp_path_factory.mktemp("x")
    store = ensure_store(checkpoint, folder / "stores")
    bare = partial_store(store, folder / "bare", np.zeros((3, 6), np.bool_))
    slot = padded(Manifest.load(store).entry(0, 0).bytes)
    plans = {"placement": "gimbal", "replicas": 1, "migrate_s": 3600.0, "migrate_steps": STEPS}
    made = make_boxes(
        folder,
        {"a": bare, "b": store, "c": store},
        free_ports(len(NODES)),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": SLOTS * slot, "kv_bytes": 8 << 20},
        engine={"threads": 1},
        cluster={"coordination": "single", "leader": "a", **plans},
    )
    devices = [
        f"--set=device.{n}.{key}={value}"
        for n in range(2)
        for key, value in (("kind", "emulated"), ("expert_bytes", 3 * slot), ("link_bytes_per_s", 10**9))
    ]
    for box in made:
        box.start(*(devices if box.node == "c" else ()))
    try:
        await until(lambda: settled(made, NODES), 240.0)
        yield made
    finally:
        for box in made:
            await box.close()


async def test_a_plan_refined_by_steps_is_put_in_force_and_changes_nothing_that_requests_say(
    boxes: list[Box], checkpoint: Path
) -> None:
    asked = {box.node: box for box in boxes if box.node in PROMPTS}
    first = (await boxes[0].cluster())["plan"]
    assert first["policy"] == "uniform"
    said = {node: set[str]() for node in asked}

    async def ask() -> None:
        for node, box in asked.items():
            said[node].add(await box.complete(PROMPTS[node], TOKENS))

    async def improved() -> bool:
        await ask()
        plan = (await boxes[0].cluster())["plan"]
        return bool(plan["policy"] == "gimbal" and plan["version"] > first["version"])

    await until(improved, 300.0)

    async def moved() -> bool:
        await ask()
        return await settled(boxes, NODES)

    await until(moved)
    oracle = Oracle(checkpoint)
    assert said == {node: {oracle.complete(PROMPTS[node], TOKENS)} for node in asked}
