"""Two whole boxes, one of which prefills and one of which decodes: requests move, and tokens are transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.box_kit import Oracle, talking_checkpoint
from support.box_processes import Box, make_boxes, settled
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]
ROLES = {"p": "prefill", "d": "decode"}
PROMPTS = ["a longer prompt of several words " * 5, "number two says something else " * 4, "x"]
TOKENS = 400
LONG = "The quick brown fox jumps over the lazy dog; " * 800  # 8,000 tokens of some three bytes: no short frame


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With states beside keys and values, and without."""
    return talking_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / "hf", positions=16384)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Box]]:
    folder = tmp_path_factory.mktemp("x")
    store = ensure_store(checkpoint, folder / "stores")
    made = make_boxes(
        folder,
        dict.fromkeys(ROLES, store),
        free_ports(len(ROLES)),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": 64 << 20, "kv_bytes": 64 << 20},
        engine={"threads": 1},
        service={"max_restarts": 50, "drain_s": 2.0},
        cluster={"coordination": "single", "leader": "d", "replicas": 2, "absent_s": 60.0},
    )
    for box in made:
        box.start("--set", f"cluster.role={ROLES[box.node]}")
    try:
        await until(lambda: settled(made, tuple(ROLES)))
        yield {box.node: box for box in made}
    finally:
        for box in made:
            await box.close()


async def figures(box: Box) -> dict[str, float]:
    return names.parse(await box.metrics())


async def count(boxes: dict[str, Box], family: str) -> float:
    return sum([names.select(await figures(box), family) for box in boxes.values()])


async def test_requests_of_both_boxes_are_prefilled_by_one_and_decoded_by_the_other(
    boxes: dict[str, Box], oracle: Oracle
) -> None:
    asked = [(box, prompt) for box in boxes.values() for prompt in PROMPTS]
    said = await asyncio.gather(*(box.complete(prompt, TOKENS) for box, prompt in asked))
    assert said == [oracle.complete(prompt, TOKENS) for _, prompt in asked]
    here = {node: await figures(box) for node, box in boxes.items()}
    assert sum(figure[names.HANDED_OVER] for figure in here.values()) == len(asked)
    assert names.select(here["d"], names.KV_FETCHED_BLOCKS) > 8
    assert names.select(here["d"], names.KV_FETCH_FAILURES) == 0
    hits = names.select(here["d"], names.PREFIX_HIT_TOKENS)
    assert hits >= 16 * names.select(here["d"], names.KV_FETCHED_BLOCKS), "what has come is not computed again"
    assert [figure[names.KV_BLOCKS_REFERENCED] for figure in here.values()] == [0, 0]
    told: Any = (await boxes["p"].cluster())["members"]
    assert {member["node"]: member["serves"] for member in told} == ROLES


async def test_a_long_prompt_moves_beside_the_control_lane(boxes: dict[str, Box], oracle: Oracle) -> None:
    moved = await count(boxes, names.HANDED_OVER)
    said = await asyncio.gather(*(box.complete(LONG, TOKENS) for box in boxes.values()))
    assert said == [oracle.complete(LONG, TOKENS)] * len(boxes)
    failed = [line for box in boxes.values() for line in box.log().splitlines() if "did not come" in line]
    assert await count(boxes, names.HANDED_OVER) == moved + len(boxes), failed
    assert await count(boxes, names.KV_BLOCKS_REFERENCED) == 0


async def test_a_death_in_between_costs_no_token(boxes: dict[str, Box], oracle: Oracle) -> None:
    for front, dies in (("d", "p"), ("p", "d"), ("p", "p")):
        prompt = f"{front} goes on when the engine of {dies} has died, whatever it did " * 3
        said = await boxes[front].stream(prompt, 200, 8, boxes[dies].kill_engine)
        assert said == oracle.complete(prompt, 200)
        await until(lambda: settled(boxes.values(), tuple(ROLES)))
    for box in boxes.values():
        assert (await figures(box))[names.KV_BLOCKS_REFERENCED] == 0
