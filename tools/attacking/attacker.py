"""One attack in a process of its own, at a low priority: `python -m tools.attacking.attacker NAME ADDRESS KEY`.

It attacks until it is terminated, and then prints how many answers had each status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NoReturn

import httpx

from tools.attacking.with_key import KEYED, KeyedAttack
from tools.attacking.without_key import KEYLESS

PAUSE_S = 0.2  # after a refusal for lack of room
LESS_PRIORITY = 5  # than its victim; on a busy machine the lowest priority would not attack at all
FIRST_S = 5.0  # that an attack's first answer may take before the attack counts as begun
ASK_S = 300.0


@asynccontextmanager
async def client(address: str, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client that has the key."""
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=ASK_S, headers=headers, limits=limits) as one:
        yield one


async def attack_with_key(attack: KeyedAttack, http: httpx.AsyncClient, seen: Counter[str]) -> None:
    """Sends the attack's bodies until cancelled."""
    numbers: Iterator[int] = iter(range(1 << 30))

    async def again() -> None:
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.post(attack.path, json=attack.body(next(numbers)))
                seen[str(answer.status_code)] += 1
                await asyncio.sleep(PAUSE_S if answer.status_code == httpx.codes.TOO_MANY_REQUESTS else 0)

    async with asyncio.TaskGroup() as group:
        for _ in range(attack.at_once):
            group.create_task(again())


async def run(name: str, address: str, key: str) -> NoReturn:
    """Attacks until SIGTERM. Prints the number of answers by status, and ends the process."""
    seen, ended = Counter[str](), asyncio.Event()

    async def attack() -> None:
        if name in KEYLESS:
            await KEYLESS[name](address, seen)
        else:
            async with client(address, key) as http:
                await attack_with_key(KEYED[name], http, seen)

    attacking = asyncio.ensure_future(attack())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            while not seen and not attacking.done():
                await asyncio.sleep(0.05)
    print("begun", flush=True)
    ending = asyncio.ensure_future(ended.wait())
    await asyncio.wait([attacking, ending], return_when=asyncio.FIRST_COMPLETED)
    if attacking.done():
        attacking.result()
    print(json.dumps(seen), flush=True)
    os._exit(0)  # ten thousand connections take long to close one by one


if __name__ == "__main__":
    os.nice(LESS_PRIORITY)
    asyncio.run(run(*sys.argv[1:4]))
