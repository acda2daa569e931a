"""Boxes whose engines stand still or crawl: their streams go on at other boxes, whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio
from support.front_kit import KEY, http_client, keyed_address, openai_client, write_model
from support.rolling import THIS, WITHIN_S, Box, settings_of, settled, three
from support.waiting import until

from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import parse, select

TOKENS = 2000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(tmp_path_factory) -> AsyncIterator[list[Box]]:  # type: ignore[no-untyped-def]
    folder: Path = tmp_path_factory.mktemp("boxes")
    async with three(folder, write_model(folder / "model")) as found:
        yield found


class Stream:
    """A client's stream, and its text so far."""

    def __init__(self, box: Box, prompt: str, tokens: int) -> None:
        self.text = ""
        self.task = asyncio.ensure_future(self._read(box, prompt, tokens))

    async def _read(self, box: Box, prompt: str, tokens: int) -> str:
        async with openai_client(box.settings) as client:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True
            )
            async for chunk in stream:
                self.text += chunk.choices[0].text if chunk.choices else ""
        return self.text


async def engine_of(box: Box) -> int:
    """Returns the process of the box's engine."""
    return int((await box.health())["engine"]["pid"])


async def evaded(box: Box, why: str) -> float:
    async with http_client(box.settings) as client:
        return select(parse((await client.get("/metrics")).text), names.EVADED, why=why)


async def test_streams_of_a_frozen_engine_go_on_elsewhere_while_it_is_frozen(boxes: list[Box]) -> None:
    first, *others = boxes
    right = await Stream(others[0], "frozen", TOKENS).task
    streams = [Stream(box, "frozen", TOKENS) for box in [first, *others, first, first]]
    await until(lambda: all(stream.text for stream in streams), WITHIN_S)
    pid = await engine_of(first)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [await stream.task for stream in streams] == [right] * len(streams)
        assert sum([await evaded(box, "still") for box in boxes]) > 0
        assert await Stream(first, "frozen", TOKENS).task == right
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was silent for too long, on a very busy machine
            os.kill(pid, signal.SIGCONT)


async def test_the_recipe_for_clients_goes_on_at_the_next_address(tmp_path: Path) -> None:
    """A front is stopped while its client reads: the answer is whole, and no text comes twice."""
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text()
    recipe = page.split("```python\n")[1].split("```")[0].replace("Timeout(60.0", "Timeout(3.0")
    scope: dict[str, Any] = {}
    exec(recipe, scope)
    model, made, addresses = write_model(tmp_path / "model"), [], []
    for one in settings_of(tmp_path, model, "ab", leader="a"):
        address, api = keyed_address(tmp_path / one.cluster.node)
        made.append(msgspec.structs.replace(one, api=msgspec.structs.replace(one.api, **api)))
        addresses.append(f"http://{address}/v1")
    found = [Box(one, tmp_path / f"{one.cluster.node}.log") for one in made]
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
    try:
        for box in found:
            box.start(THIS)
        await until(lambda: ready(found), WITHIN_S)
        right = await asyncio.to_thread(lambda: "".join(scope["answer"](addresses[1:], KEY, **asked)))
        pieces = scope["answer"](["http://127.0.0.1:1/v1", *addresses], KEY, **asked)
        first = await asyncio.to_thread(next, pieces)
        assert found[0].process is not None
        found[0].process.send_signal(signal.SIGSTOP)
        rest = await asyncio.to_thread(lambda: "".join(pieces))
        assert first + rest == right
        assert len(right) == TOKENS
    finally:
        for box in found:
            if box.process is not None:
                box.process.kill()
                box.process.wait(60)


async def ready(boxes: list[Box]) -> bool:
    return all([(await box.health()).get("status") == "ready" for box in boxes])


async def test_a_stream_that_crawls_goes_on_at_a_box_where_it_does_not(boxes: list[Box]) -> None:
    await until(lambda: settled(boxes), WITHIN_S)
    prompts = [f"CRAWL{{{box.node}}}ENDcrawling" for box in boxes]
    right = [
        await Stream(other, prompt, TOKENS).task for other, prompt in zip(boxes[1:] + boxes[:1], prompts, strict=True)
    ]
    streams = [Stream(box, prompt, TOKENS) for box, prompt in zip(boxes, prompts, strict=True)]
    assert [await stream.task for stream in streams] == right
    assert sum([await evaded(box, "slow") for box in boxes]) > 0
