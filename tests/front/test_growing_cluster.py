"""A cluster grows from one box to four and loses one, by commands only and under load: no request is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.box_kit import Oracle, talking_checkpoint
from support.box_processes import Box
from support.kept import STORES
from support.ports import free_ports
from support.waiting import until

from edgemoe.store.packer import ensure_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary: install Debian's etcd-server"),
]
PROMPTS = ["number one", "a longer prompt of several words " * 3, "x"]
TOKENS, CLIENTS, WITHIN_S = 40, 3, 240.0


@dataclass
class Load:
    """Clients that ask the boxes that serve in turn, and the outcomes."""

    expected: dict[str, str]
    boxes: list[Box] = field(default_factory=list)
    completed: int = 0
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def client(self, at: int) -> None:
        while not self.stopping:
            box, prompt = self.boxes[at % len(self.boxes)], PROMPTS[at % len(PROMPTS)]
            at += 1
            try:
                said = await box.complete(prompt, TOKENS)
            except (httpx.HTTPError, AssertionError) as error:
                self.wrong.append(f"{box.node}: {error!r}")
                continue
            self.completed += 1
            if said != self.expected[prompt]:
                self.wrong.append(f"{box.node}: {said!r}")


def box_of(node: str, folder: Path, store: Path, port: int) -> Box:
    """Returns a box whose settings name no cluster; two of this machine need two ports."""
    (folder / node).mkdir()
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"listen": f"127.0.0.1:{port}", "state_dir": str(folder / node / "state"), "migrate_s": 0.0},
        "model": {"path": str(store), "name": "tiny", "store_dir": str(STORES)},
        "memory": {"ram_bytes": 64 << 20, "kv_bytes": 8 << 20},
        "engine": {"threads": 1},
        "api": {"socket": str(folder / node / "api.sock")},
        "service": {"drain_s": 20.0},
    }
    return Box(node, folder / node, sections)


async def command(box: Box, *words: str) -> str:
    """Runs `edgemoe cluster` at a box. Returns its output."""
    line = [sys.executable, "-m", "edgemoe", "cluster", *words, "--config", str(box.config)]
    done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def together(boxes: list[Box], votes: dict[str, str]) -> bool:
    """Whether all boxes see each other ready, with these votes, and go by one leader."""
    leaders = set()
    for box in boxes:
        health = await box.health()
        if health.get("status") != "ready":
            return False
        try:
            listed = dict((await box.http.get("/cluster")).json())
        except httpx.HTTPError:
            return False
        leaders.add(listed["leader"])
        found = {each["node"]: each["vote"] for each in listed["boxes"]}
        engines = [each["engine"] for each in health["cluster"]["members"] if each["state"] == "here"]
        if found != votes or len(engines) != len(boxes) or "" in engines:
            return False
    return len(leaders) == 1 and "" not in leaders


async def test_a_cluster_grows_to_four_boxes_and_shrinks_to_three(tmp_path: Path) -> None:
    checkpoint = talking_checkpoint("qwen3_moe", tmp_path / "hf")
    oracle = Oracle(checkpoint)
    store = ensure_store(checkpoint, tmp_path / "stores")
    load = Load({prompt: oracle.complete(prompt, TOKENS) for prompt in PROMPTS})
    a, b, c, d = (box_of(node, tmp_path, store, port) for node, port in zip("abcd", free_ports(4), strict=True))
    counts: dict[str, int] = {}

    async def step(what: str, boxes: list[Box], **votes: str) -> None:
        await until(lambda: together(boxes, votes), WITHIN_S)
        before = load.completed
        await until(lambda: load.completed > before + CLIENTS, WITHIN_S)
        counts[what] = load.completed - before

    try:
        await command(a, "init", "--node", "a")
        a.start()
        await until(lambda: together([a], {"a": "yes"}), WITHIN_S)
        load.boxes = [a]
        clients = [asyncio.ensure_future(load.client(at)) for at in range(CLIENTS)]
        for box, boxes, votes in ((b, [a, b], "ab"), (c, [a, b, c], "abc"), (d, [a, b, c, d], "abcd")):
            box.start("--invite", (await command(a, "invite", box.node)).strip())
            known = {each.node: "yes" for each in boxes[:-1]} | {box.node: "no"}
            await step(f"{len(boxes)} boxes", boxes, **known)
            load.boxes = boxes
            assert f"{box.node} votes" in await command(b, "vote", box.node)
            await step(f"{len(boxes)} votes", boxes, **dict.fromkeys(votes, "yes"))
        listed = json.loads(await command(d, "list", "--json"))
        assert [each["node"] for each in listed["boxes"]] == ["a", "b", "c", "d"]
        assert "a is removed" in await command(c, "remove", "a")
        load.boxes = [b, c, d]
        await step("3 boxes again", [b, c, d], b="yes", c="yes", d="yes")
        assert await a.complete(PROMPTS[0], TOKENS) == load.expected[PROMPTS[0]]  # it serves on, alone
        load.stopping = True
        await asyncio.gather(*clients)
        print(f"{load.completed} requests completed, {len(load.wrong)} lost; at least, after each step: {counts}")
        assert load.wrong == []
    finally:
        load.stopping = True
        for box in (a, b, c, d):
            await box.close()
