"""Attacks of one principal on resources that it shares with another, against a daemon on TCP with keys."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from edgemoe.api.api_keys import new_key
from edgemoe.config.settings import Settings
from tools.attacking.with_key import SHARES as ATTACKS

VICTIM_TOKENS = 60


@dataclass(slots=True)
class Stream:
    """A client's record of a streamed answer."""

    status: int
    first_s: float  # from the question to the first token
    gaps_s: list[float]


def keys_of(file: Path, *names: str) -> dict[str, str]:
    """Returns new keys by name."""
    return {name: new_key(file, name).secret for name in names}


@contextlib.asynccontextmanager
async def client(settings: Settings, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client that has the key."""
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"http://{settings.api.tcp}", timeout=300.0, headers=headers, limits=limits, verify=False
    ) as one:
        yield one


async def stream(http: httpx.AsyncClient, prompt: str, tokens: int = VICTIM_TOKENS) -> Stream:
    """Streams an answer and records the times of its tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    began_s, times_s = time.monotonic(), list[float]()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.monotonic())
    gaps_s = [after - before for before, after in pairwise(times_s)]
    return Stream(answer.status_code, times_s[0] - began_s if times_s else 0.0, gaps_s)


@contextlib.asynccontextmanager
async def under(name: str, http: httpx.AsyncClient, statuses: list[int]) -> AsyncIterator[None]:
    """Attacks while the `async with` block runs: each request is sent again once it is answered or refused."""
    attack = ATTACKS[name]
    numbers: Iterator[int] = iter(range(1 << 30))

    async def again() -> None:
        while True:
            answer = await http.post(attack.path, json=attack.body(next(numbers)))
            statuses.append(answer.status_code)
            await asyncio.sleep(0.2 if answer.status_code == 429 else 0)

    tasks = [asyncio.ensure_future(again()) for _ in range(attack.at_once)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
