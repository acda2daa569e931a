"""Three boxes that agree by raft, restarted one after the other under load, with other releases if asked for.

* python tests/support/rolling.py: N -> N + 1 -> N
* python tests/support/rolling.py restart: each box once, no other release

Clients ask all boxes in turn. A box that refuses a connection, or is shutting down, is passed over. Any other
request without the right text counts as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import msgspec

from edgemoe.cluster.rpc.keys import generate
from edgemoe.config.settings import ClusterSettings, Settings
from support.front_kit import http_client, settings_for, write_model
from support.ports import free_ports
from support.waiting import until

FAKES = Path(__file__).parent
THIS = (sys.executable, str(FAKES / "daemon_process.py"))
NEXT = (sys.executable, str(FAKES / "next_release.py"), THIS[1])
NODES = ("a", "b", "c")
CLIENTS = 6
TOKENS = 150
WITHIN_S = 600.0


def settings_of(folder: Path, model_dir: Path, names: Sequence[str], **cluster: Any) -> list[Settings]:
    """Returns settings of boxes that list each other and spread their requests."""
    ports = free_ports(len(names))
    keys = {name: generate(folder / f"{name}.key").public.decode() for name in names}
    entry = '[[peer]]\nnode = "{}"\naddress = "127.0.0.1:{}"\nkey = "{}"\n'
    listed = "".join(entry.format(name, port, keys[name]) for name, port in zip(names, ports, strict=True))
    (folder / "peers.toml").write_text(listed)
    made = []
    for name, port in zip(names, ports, strict=True):
        (folder / name).mkdir()
        own = ClusterSettings(
            node=name,
            key_file=str(folder / f"{name}.key"),
            listen=f"127.0.0.1:{port}",
            peers_file=str(folder / "peers.toml"),
            state_dir=str(folder / name / "state"),
            route="least",
            **cluster,
        )
        made.append(settings_for(folder / name, model_dir, cluster=own, service={"drain_s": 60.0}))
    return made


class Box:
    """One daemon, of whichever release it was last started as."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings, self.log = settings, log
        self.node = settings.cluster.node
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> None:
        with self.log.open("ab") as file:
            said = msgspec.json.encode(self.settings).decode()
            self.process = subprocess.Popen([*command, said], stdout=file, stderr=file)

    async def leave(self) -> None:
        """Terminates the box by SIGTERM, so that it finishes its requests."""
        assert self.process is not None
        self.process.terminate()
        status = await asyncio.to_thread(self.process.wait, WITHIN_S)
        assert status == 0, f"{self.node} ended with {status}; see {self.log}"

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    async def health(self) -> dict[str, Any]:
        """Returns the body of /health; {} if the box does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            async with http_client(self.settings) as client:
                return dict((await client.get("/health")).json())
        return {}


@dataclass
class Load:
    """The clients' requests, and their outcomes."""

    boxes: Sequence[Box]
    right: str
    completed: int = 0
    passed_over: int = 0
    lost: list[str] = field(default_factory=list)
    stopping: bool = False

    async def client(self, at: int) -> None:
        """Asks all boxes in turn until told to stop."""
        while not self.stopping:
            box, at = self.boxes[at % len(self.boxes)], at + 1
            try:
                said = await ask(box)
            except httpx.ConnectError:
                self.passed_over += 1
                await asyncio.sleep(0.05)
            except (httpx.HTTPError, ValueError) as error:
                self.lost.append(f"{box.node}: {error!r}")
            else:
                if said is None:
                    self.passed_over += 1
                    await asyncio.sleep(0.05)
                elif said == self.right:
                    self.completed += 1
                else:
                    self.lost.append(f"{box.node}: {said!r}")

    def figures(self) -> dict[str, int]:
        asked = self.completed + len(self.lost)
        return {
            "asked": asked,
            "completed": self.completed,
            "lost": len(self.lost),
            "passed_over": self.passed_over,
        }


async def ask(box: Box) -> str | None:
    """Streams a completion over a connection of its own; None from a box that takes none. Raises ValueError."""
    body = {"model": "tiny", "prompt": "roll on", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    async with http_client(box.settings) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 503:
            return None
        pieces, ended = [], False
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "choices" not in event:
                    raise ValueError(line)
                pieces += [choice["text"] for choice in event["choices"]]
            ended = ended or line == "data: [DONE]"
    if answer.status_code != 200 or not ended:
        raise ValueError(f"status {answer.status_code}, cut off after {len(pieces)} pieces")
    return "".join(pieces)


async def settled(boxes: Sequence[Box]) -> bool:
    """Whether all are ready, go by one leader, and see each other."""
    told = [await box.health() for box in boxes]
    if any(one.get("status") != "ready" for one in told):
        return False
    members = [member for one in told for member in one["cluster"]["members"]]
    here = all(member["state"] == "here" and member["engine"] for member in members)
    leaders = {one["cluster"]["leader"] for one in told}
    return here and len(leaders) == 1 and "" not in leaders


async def agreed(boxes: Sequence[Box]) -> None:
    """Waits until all boxes go by one leader, epoch and plan, also under load."""

    async def met() -> bool:
        told = [(await box.health()).get("cluster") for box in boxes]
        seen = {(one["leader"], one["epoch"], str(one["plan"])) if one else ("", 0, "") for one in told}
        return len(seen) == 1 and "" not in next(iter(seen))

    await until(met, WITHIN_S)


@asynccontextmanager
async def three(folder: Path, model_dir: Path) -> AsyncIterator[list[Box]]:
    """Runs three boxes of this release, and yields them when they are ready."""
    settings = settings_of(folder, model_dir, NODES, coordination="raft")
    boxes = [Box(one, folder / f"{one.cluster.node}.log") for one in settings]
    try:
        for box in boxes:
            box.start(THIS)
        await until(lambda: settled(boxes), WITHIN_S)
        yield boxes
    finally:
        running = [box.process for box in boxes if box.process is not None and box.process.poll() is None]
        for process in running:
            process.kill()
            process.wait(60)


async def roll(boxes: Sequence[Box], rounds: Sequence[Sequence[str]], after: Callable[[], Awaitable[Any]]) -> Load:
    """Restarts every box with each command, one after the other, under load. `after` each round is awaited."""
    right = await ask(boxes[0])
    assert right
    load = Load(boxes, right)
    clients = [asyncio.ensure_future(load.client(at)) for at in range(CLIENTS)]
    try:
        for command in rounds:
            for box in boxes:
                await box.leave()
                box.start(command)
                await until(lambda: settled(boxes), WITHIN_S)
            await after()
    finally:
        load.stopping = True
        await asyncio.gather(*clients)
    return load


async def by_hand(rounds: Sequence[Sequence[str]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        async with three(Path(folder), model) as boxes:
            began_s = time.monotonic()
            load = await roll(boxes, rounds, lambda: agreed(boxes))
            return load.figures() | {"seconds": round(time.monotonic() - began_s, 1), "what_was_lost": load.lost[:10]}


if __name__ == "__main__":
    result = asyncio.run(by_hand([THIS] if sys.argv[1:] == ["restart"] else [NEXT, THIS]))
    print(json.dumps(result, indent=2))
    sys.exit(bool(result["lost"]))
