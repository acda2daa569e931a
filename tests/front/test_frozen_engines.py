"""Boxes whose engines stand still or crawl: their streams go on at other boxes, whole, long before any engine ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from support.front_kit import http_client, openai_client, write_model
from support.rolling import WITHIN_S, Box, settled, three
from support.waiting import until

from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import parse, select

TOKENS = 3000


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


async def engine_of(box: Box) -> tuple[int, int]:
    """Returns the process of the box's engine, and the number of its start."""
    engine = (await box.health())["engine"]
    return int(engine["pid"]), int(engine["starts"])


async def evaded(box: Box, why: str) -> float:
    async with http_client(box.settings) as client:
        return select(parse((await client.get("/metrics")).text), names.EVADED, why=why)


async def test_streams_of_a_frozen_engine_go_on_elsewhere_while_it_is_frozen(boxes: list[Box]) -> None:
    first, *others = boxes
    right = await Stream(others[0], "frozen", TOKENS).task
    streams = [Stream(box, "frozen", TOKENS) for box in [first, *others, first, first]]
    await until(lambda: all(stream.text for stream in streams), WITHIN_S)
    pid, starts = await engine_of(first)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [await stream.task for stream in streams] == [right] * len(streams)
        assert await engine_of(first) == (pid, starts)  # it was not given up
        assert sum([await evaded(box, "still") for box in boxes]) > 0
        assert await Stream(first, "frozen", TOKENS).task == right
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: settled(boxes), WITHIN_S)
    assert await engine_of(first) == (pid, starts)


async def test_a_stream_that_crawls_goes_on_at_a_box_where_it_does_not(boxes: list[Box]) -> None:
    await until(lambda: settled(boxes), WITHIN_S)
    prompts = [f"CRAWL{{{box.node}}}ENDcrawling" for box in boxes]
    right = [
        await Stream(other, prompt, TOKENS).task for other, prompt in zip(boxes[1:] + boxes[:1], prompts, strict=True)
    ]
    streams = [Stream(box, prompt, TOKENS) for box, prompt in zip(boxes, prompts, strict=True)]
    assert [await stream.task for stream in streams] == right
    assert sum([await evaded(box, "slow") for box in boxes]) > 0
