"""Whole boxes as processes on loopback: `edgemoe serve` with a configuration file each, all with one model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from edgemoe.cluster.rpc.keys import generate
from edgemoe.telemetry import metrics as names

COMPLETION = {"temperature": 0, "ignore_eos": True}


def toml(tables: dict[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


class Box:
    """One box: its front and its engine."""

    def __init__(self, node: str, folder: Path, sections: dict[str, dict[str, Any]]) -> None:
        self.node, self.folder = node, folder
        self.socket = folder / "api.sock"
        self.config = folder / "edgemoe.toml"
        self.config.write_text(toml(sections))
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.socket), verify=False), base_url="http://box", timeout=60.0
        )

    def start(self, *words: str) -> None:
        command = [sys.executable, "-m", "edgemoe", "serve", "--config", str(self.config), *words]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    async def health(self) -> dict[str, Any]:
        """Returns the body of /health; {} if the box does not answer."""
        try:
            return dict((await self.http.get("/health")).json())
        except httpx.HTTPError:
            return {}

    async def cluster(self) -> dict[str, Any]:
        return dict((await self.health()).get("cluster", {}))

    async def complete(self, prompt: str, max_tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, **COMPLETION}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def stream(self, prompt: str, max_tokens: int, at: int, then: Callable[[], Any]) -> str:
        """Streams a completion and returns its text; awaits `then` once `at` pieces of text have come."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **COMPLETION}
        pieces: list[str] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    pieces += [choice["text"] for choice in event["choices"]]
                    if len(pieces) >= at > 0:
                        at = 0
                        await then()
        return "".join(pieces)

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def missing(self) -> float:
        """Returns the number of homes that are not in memory yet; 1 without a figure."""
        return names.parse(await self.metrics()).get(names.HOME_MISSING, 1.0)

    async def hosted_requests(self) -> float:
        """Returns the number of other boxes' requests that run here."""
        return names.parse(await self.metrics()).get(names.HOSTED_REQUESTS, 0.0)

    async def kill_engine(self) -> None:
        os.kill((await self.health())["engine"]["pid"], signal.SIGKILL)

    async def kill(self) -> None:
        """Kills front and engine at once, as a power loss does."""
        assert self.process is not None
        engine = (await self.health())["engine"]["pid"]
        self.process.kill()
        os.kill(engine, signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        """Terminates the daemon by SIGTERM, without waiting."""
        assert self.process is not None
        self.process.terminate()

    async def close(self) -> None:
        """Ends the daemon in any state, by SIGKILL if need be."""
        await self.http.aclose()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def own_section(folder: Path, port: int) -> dict[str, Any]:
    """Returns a box's own part of its section `[cluster]`."""
    return {
        "node": folder.name,
        "key_file": str(folder / "key"),
        "listen": f"127.0.0.1:{port}",
        "state_dir": str(folder / "state"),
    }


def like(box: Box, folder: Path, port: int) -> Box:
    """Makes a box with the store and settings of another, with a key and without a list of peers."""
    folder.mkdir()
    generate(folder / "key")
    sections = tomllib.loads(box.config.read_text())
    del sections["cluster"]["peers_file"]
    sections["cluster"] |= own_section(folder, port)
    sections["api"]["socket"] = str(folder / "api.sock")
    return Box(folder.name, folder, sections)


def make_boxes(folder: Path, stores: Mapping[str, Path], ports: Sequence[int], **sections: dict[str, Any]) -> list[Box]:
    """Makes boxes that list each other, with a store each. `sections` go into every configuration, also `cluster`."""
    entries, boxes = [], []
    for node, port in zip(stores, ports, strict=True):
        (folder / node).mkdir()
        key = generate(folder / node / "key").public.decode()
        entries.append(f'[[peer]]\nnode = "{node}"\naddress = "127.0.0.1:{port}"\nkey = "{key}"\nvouches = true\n')
    for node, port in zip(stores, ports, strict=True):
        (folder / node / "peers.toml").write_text("\n".join(entries))
        own = own_section(folder / node, port) | {"peers_file": str(folder / node / "peers.toml")}
        merged = {**sections, "cluster": own | sections.get("cluster", {})}
        merged["model"] = {"path": str(stores[node])} | sections.get("model", {})
        merged["api"] = {"socket": str(folder / node / "api.sock")} | sections.get("api", {})
        boxes.append(Box(node, folder / node, merged))
    return boxes


async def settled(boxes: Iterable[Box], nodes: tuple[str, ...]) -> bool:
    """Whether all are ready, see these nodes alone, every expert of one plan is at home, and nothing moves."""
    told = [await box.health() for box in boxes]
    if any(one.get("status") != "ready" or not one["cluster"]["leader"] for one in told):
        return False
    plans = {one["cluster"]["plan"] and one["cluster"]["plan"]["digest"] for one in told}
    members = [member for one in told for member in one["cluster"]["members"]]
    still = not any(member["to_come"] or member["to_go"] for member in members)
    alive = still and all(member["state"] == "here" and member["homes"] for member in members)
    alive = alive and all({m["node"] for m in one["cluster"]["members"]} == set(nodes) for one in told)
    return alive and len(plans) == 1 and None not in plans and not any([await box.missing() for box in boxes])
