"""Whole boxes with expert clusters, fitted to the experts of their requests; deaths and drift change them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.box_kit import Oracle, talking_checkpoint
from support.box_processes import Box, make_boxes
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.cluster.control.requests.expert_fitting import REFIT_S
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry import metrics as names

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]
TOKENS = 240
KINDS = {  # prompts of at least 64 tokens, which fronts recognise
    "digits": ["31415926535897932384" * 4, "27182818284590452353" * 4, "14142135623730950488" * 4],
    "capitals": ["QUARTZ JUMPS FOX VEX " * 4, "WALTZ BAD NYMPH FOR " * 4, "SPHINX OF BLACK QUARTZ " * 4],
    "marks": ["(){}[]<>!?;:+-*/=%&|" * 4, "<<>>((()))[[]]{}{}!!" * 4, "?!;:,.-_/&%$+*~#=<>|" * 4],
}
OLD = [*KINDS["digits"], *KINDS["capitals"]]
ALIKE = dict.fromkeys("abc", "both")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "hf")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, str]:
    """The greedy answer of transformers to each prompt."""
    oracle = Oracle(checkpoint)
    return {prompt: oracle.complete(prompt, TOKENS) for kind in KINDS.values() for prompt in kind}


class Boxes:
    """Daemons; the first one leads."""

    def __init__(self, made: Sequence[Box], expected: dict[str, str]) -> None:
        self.boxes, self.leads, self.expected = list(made), made[0], expected

    async def figures(self, box: Box) -> dict[str, float]:
        return names.parse(await box.metrics())

    async def ask(self, prompts: Sequence[str]) -> None:
        """Asks all prompts at once, by boxes in turn."""
        fronts = [self.boxes[n % len(self.boxes)] for n in range(len(prompts))]
        said = await asyncio.gather(*(box.complete(one, TOKENS) for box, one in zip(fronts, prompts, strict=True)))
        assert said == [self.expected[prompt] for prompt in prompts]

    async def ask_until(self, done: Callable[[], Any], prompts: Sequence[str]) -> None:
        while not await done():
            await self.ask(prompts)

    async def host(self) -> Box | None:
        """Returns a box that runs requests of another, if any."""
        for box in self.boxes:
            if await box.hosted_requests():
                return box
        return None

    async def home(self, prompt: str, among: Sequence[Box]) -> str:
        """Asks until the answer comes from the prompt's nearest cluster, and returns that box.

        A box that seems busy is not asked at once.
        """
        while True:
            before = {box.node: await self.figures(box) for box in among}
            assert await self.leads.complete(prompt, TOKENS) == self.expected[prompt]
            after = {box.node: await self.figures(box) for box in among}
            taken = [node for node in after if grown(before[node], after[node], names.HOSTED_REQUESTS_TOTAL)]
            if routes(before[self.leads.node], after[self.leads.node]) == {"nearest"}:
                return taken[0] if taken else self.leads.node

    async def homes(self, among: Sequence[Box] = ()) -> dict[str, str]:
        return {prompt: await self.home(prompt, among or self.boxes) for prompt in OLD}

    async def decoder(self, prompt: str) -> str:
        """Returns the box that decodes after the prompt."""
        before = {box.node: await self.figures(box) for box in self.boxes}
        assert await self.leads.complete(prompt, TOKENS) == self.expected[prompt]
        after = {box.node: await self.figures(box) for box in self.boxes}
        return next(node for node in after if grown(before[node], after[node], names.HOSTED_REQUESTS_TOTAL))


def grown(before: dict[str, float], after: dict[str, float], family: str) -> bool:
    return names.select(after, family) > names.select(before, family)


def routes(before: dict[str, float], after: dict[str, float]) -> set[str]:
    """Returns the reasons of the routings between two readings of the metrics."""
    found = {name for name in after if name.startswith(names.ROUTED) and after[name] > before.get(name, 0.0)}
    return {name.split('why="')[1].split('"')[0] for name in found}


@asynccontextmanager
async def running(
    folder: Path, checkpoint: Path, expected: dict[str, str], roles: dict[str, str]
) -> AsyncIterator[Boxes]:
    """Makes boxes, and starts them."""
    store = ensure_store(checkpoint, folder / "stores")
    made = make_boxes(
        folder,
        dict.fromkeys(roles, store),
        free_ports(len(roles)),
        model={"name": "tiny", "store_dir": str(STORES)},
        memory={"ram_bytes": 64 << 20, "kv_bytes": 8 << 20},
        engine={"threads": 1, "max_sequences": 4},
        service={"max_restarts": 50, "drain_s": 2.0},
        cluster={"coordination": "single", "leader": next(iter(roles)), "replicas": len(roles), "route": "eldr"},
    )
    try:
        yield Boxes(made, expected)
    finally:
        for box in made:
            await box.close()


async def started(boxes: Sequence[Box], roles: dict[str, str]) -> None:
    for box in boxes:
        box.start("--set", f"cluster.role={roles[box.node]}")
    await until(lambda: ready(boxes), 600.0)


async def ready(boxes: Sequence[Box]) -> bool:
    told = [await box.health() for box in boxes]
    return all(one.get("status") == "ready" and one["cluster"]["leader"] for one in told)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(
    checkpoint: Path, expected: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Boxes]:
    async with running(tmp_path_factory.mktemp("x"), checkpoint, expected, ALIKE) as boxes:
        yield boxes


async def test_clusters_are_fitted_to_the_traffic_of_running_boxes_and_followed(three: Boxes) -> None:
    boxes, three.boxes = three.boxes, three.boxes[:2]
    await started(three.boxes, ALIKE)
    await three.ask_until(lambda: has_clusters(three, 2), OLD * 2)
    before = await three.figures(three.leads)
    await three.ask(OLD * 2)
    assert routes(before, await three.figures(three.leads)) <= {"nearest", "in band"}
    assert set((await three.homes()).values()) == {"a", "b"}
    await three.ask(OLD * 6)
    told = [await three.figures(box) for box in three.boxes]
    assert sum(names.select(each, names.OFFERS_FORECAST, by="cached") for each in told) > 0, "of who waits"
    three.boxes = boxes


async def test_a_new_box_gets_a_cluster_and_half_of_the_prompts_keep_their_box(three: Boxes) -> None:
    before = await three.homes(among=three.boxes[:2])
    await started(three.boxes[2:], ALIKE)
    await until(lambda: has_clusters(three, 3))
    after = await three.homes()
    assert set(after.values()) == {"a", "b", "c"}
    assert sum(after[prompt] == before[prompt] for prompt in OLD) >= len(OLD) / 2


async def test_an_engine_that_dies_and_starts_again_has_its_cluster_and_no_token_is_lost(three: Boxes) -> None:
    homes, fitted = await three.homes(), len(reasons(three))
    asked = asyncio.create_task(three.ask(OLD * 2))
    dies = await until(three.host)
    await dies.kill_engine()
    await asked
    await until(lambda: ready(three.boxes), 600.0)
    again = await three.homes()
    assert "engines" not in reasons(three)[fitted:]
    assert again == homes or len(reasons(three)) > fitted, "unless they were fitted to more meanwhile"


async def test_requests_of_a_new_kind_cause_a_new_fit_and_others_keep_their_box(three: Boxes) -> None:
    homes, since_s = await three.homes(), time.monotonic()
    await until(lambda: time.monotonic() > since_s + REFIT_S, REFIT_S + 1.0)
    await three.ask_until(lambda: said(three, "drift"), KINDS["marks"] * 3)
    after = await three.homes()
    assert sum(after[prompt] == homes[prompt] for prompt in OLD) >= len(OLD) / 2


async def test_the_box_that_decodes_is_chosen_by_clusters_too(
    checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    roles = {"p": "prefill", "d": "decode", "e": "decode"}
    async with running(tmp_path, checkpoint, expected, roles) as apart:
        await started(apart.boxes, roles)
        await apart.ask_until(lambda: has_clusters(apart, 2), OLD * 2)
        decoders = [await apart.decoder(prompt) for prompt in OLD * 2]
        same = sum(decoders[n] == decoders[n + len(OLD)] for n in range(len(OLD)))
        assert same >= len(OLD) - 1, "one may be taken to be busy still"
        assert set(decoders) == {"d", "e"}
        figures = [await apart.figures(box) for box in apart.boxes]
        assert sum(each[names.HANDED_OVER] for each in figures) >= len(decoders)
        await until(lambda: all_free(apart))


async def has_clusters(boxes: Boxes, count: int) -> bool:
    return (await boxes.figures(boxes.leads))[names.EXPERT_CLUSTERS] == count


async def all_free(boxes: Boxes) -> bool:
    return not any([(await boxes.figures(box))[names.KV_BLOCKS_REFERENCED] for box in boxes.boxes])


def reasons(boxes: Boxes) -> list[str]:
    """Returns the reason of each fit of clusters."""
    lines = [line for line in boxes.leads.log().splitlines() if "expert clusters fitted" in line]
    return [why for line in lines for why in ("first", "engines", "more requests", "drift") if why in line]


async def said(boxes: Boxes, why: str) -> bool:
    return why in reasons(boxes)
