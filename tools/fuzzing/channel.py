"""The channels: a daemon with its engine, and three listed peers, each of which is hostile on one channel.

Meanwhile requests are made at the socket, and must get the answer that they got before.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import zmq

from edgemoe.cluster.rpc.keys import Secret, generate, load_secret
from edgemoe.demo import model_path
from tools.fuzzing.peer import HostilePeer
from tools.testbed.daemons import listens

WHATS = ("control", "calls", "bulk")
EARLY = 0.2  # of the messages are sent before memory is measured first, by doors that have no largest one to send first
GROWTH_MB = 30.0  # that front and engine together may grow from then on
LATE = 0.2  # of the messages, at the end, in which a channel's memory is measured last,
LOOK_EVERY = 100  # messages
READY_S, ASK_S = 120.0, 20.0


class Target:
    """A daemon on loopback that lists a peer for each channel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: dict[str, Secret] = {channel: generate(folder / f"{channel}.key") for channel in WHATS}
        self.own = generate(folder / "own.key")
        self.ports = dict(zip(WHATS, _free_ports(3), strict=True))
        entries = {"box": (self.own, self.ports["control"])} | {name: (key, 9) for name, key in self.keys.items()}
        (folder / "peers.toml").write_text(
            "".join(
                f'[[peer]]\nnode = "{node}"\naddress = "127.0.0.1:{port}"\nkey = \'{key.public.decode()}\'\n'
                for node, (key, port) in entries.items()
            )
        )
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(folder / "api.sock")), base_url="http://box", timeout=ASK_S
        )

    def command(self) -> list[str]:
        """What starts it."""
        settings: dict[str, Any] = {
            "api.socket": str(self.folder / "api.sock"),
            "cluster.node": "box",
            "cluster.key_file": str(self.folder / "own.key"),
            "cluster.listen": f"127.0.0.1:{self.ports['control']}",
            "cluster.calls_port": self.ports["calls"],
            "cluster.bulk_port": self.ports["bulk"],
            "cluster.peers_file": str(self.folder / "peers.toml"),
            "cluster.state_dir": str(self.folder / "state"),
            "cluster.leader": "box",
            "cache.policy": "lru",
        }
        (self.folder / "empty.toml").write_text("")
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "edgemoe", "serve", "--config", str(self.folder / "empty.toml"), *words]

    def ask(self) -> str:
        """A greedy answer."""
        body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body)
        return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else f"status {answer.status_code}"

    def health(self) -> dict[str, Any]:
        return dict(self.http.get("/health").json())

    def wait_ready(self, child: subprocess.Popen[bytes]) -> None:
        """Raises RuntimeError with the end of its log where it does not come up."""
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and child.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if listens(self.folder / "api.sock") and self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the daemon did not become ready:\n{(self.folder / 'log').read_text()[-3000:]}")


@contextmanager
def target() -> Iterator[tuple[Target, subprocess.Popen[bytes]]]:
    """A daemon that is ready."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-") as name:
        made = Target(Path(name))
        with (made.folder / "log").open("wb") as log:
            child = subprocess.Popen(made.command(), stdout=log, stderr=log)
        try:
            made.wait_ready(child)
            yield made, child
        finally:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
            made.http.close()


class Others:
    """Asks in a thread of its own; notes what was answered otherwise than `right`."""

    def __init__(self, asked: Target, right: str) -> None:
        self.times_s: list[float] = []
        self.wrong: list[str] = []
        self._asked, self._right, self._over = asked, right, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * ASK_S)

    def _run(self) -> None:
        while not self._over.wait(0.3):
            began_s = time.monotonic()
            try:
                text = self._asked.ask()
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                text = repr(error)
            self.times_s.append(time.monotonic() - began_s)
            if text != self._right:
                self.wrong.append(text)


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Sends `count` messages to the channel, or to each of the three."""
    with target() as (box, child):
        health, right = box.health(), box.ask()
        others = Others(box, right)
        seen: dict[str, Any] = {"channels": {}}
        try:
            for channel in (what,) if what else WHATS:
                seen["channels"][channel] = _attack(box, child, channel, count, seed)
        finally:
            others.stop()
        engine = health["engine"]
        seen |= {
            "alive": child.poll() is None and box.health()["engine"] == engine,
            "others": len(others.times_s),
            "others_wrong": others.wrong[:5],
            "others_slowest_s": round(max(others.times_s, default=0.0), 3),
            "answered_after": box.ask() == right,
        }
        flat = all(channel["grown_mb"] < GROWTH_MB and channel["read"] for channel in seen["channels"].values())
        seen["ok"] = bool(seen["alive"] and flat and others.times_s and not others.wrong and seen["answered_after"])
        if not seen["ok"]:
            seen["log"] = (box.folder / "log").read_text()[-4000:]
        return seen


def hostile(box: Target, channel: str, seed: int) -> HostilePeer:
    """The peer that is hostile on this channel."""
    health = box.health()
    digest, layers, experts = (health["model"][name] for name in ("digest", "layers", "experts"))
    hints = {
        "model": [digest, digest[:5], "0" * 32],
        "node": ["box", *WHATS],
        "boot": ["", health["engine"].get("boot", "x")],
        "plan_digest": ["", "0" * 64],
        "request": ["r-1", "r-1/2", "box/x/r-1"],
        "leading": [0, 0, 1, 2],
        "layers": [layers],
        "experts": [experts, 1, 2, 20],
        "expert_bytes": [health["model"]["expert_bytes"]],
        "row_bytes": [_row_bytes()],
        "ram": [bytes(-(-layers * experts // 8)), b""],
        "disk": [bytes(-(-layers * experts // 8))],
        "layer": [0, 1, health["model"]["layers"]],
        "bytes": [1, 4096, 1 << 20],
    }
    return HostilePeer(
        channel,
        load_secret(box.folder / f"{channel}.key"),
        box.own.public,
        f"127.0.0.1:{box.ports[channel]}",
        channel,
        random.Random(seed),
        hints,
    )


def _attack(box: Target, child: subprocess.Popen[bytes], channel: str, count: int, seed: int) -> dict[str, Any]:
    """Measures memory once the largest message was read, and last where it is smallest towards the end.

    What a message takes as objects, some eight times its bytes, is given back by Python only where no object of another
    message's lies in between. Python keeps up to 40,000 freed tuples for use until it collects garbage, so that tens of
    megabytes stay for a while, after any large message, however many there were before it.
    """
    peer, health = hostile(box, channel, seed), box.health()
    pids = (child.pid, health["engine"]["pid"])
    began_s, early, late, read = time.monotonic(), 0.0, float("inf"), False
    try:
        peer.send_largest(count)
        early = rss_mb(pids)
        began_s = time.monotonic()
        for number in range(count):
            peer.send()
            if number >= (1 - LATE) * count and number % LOOK_EVERY == 0:
                late = min(late, rss_mb(pids))
        peer.settle()
        read = True
    except zmq.Again:
        pass  # it reads nothing more; `read` says so
    finally:
        took_s = time.monotonic() - began_s
        peer.close()
    late = min(late, rss_mb(pids))
    return {
        "sent": peer.sent,
        "read": read,
        "lost": peer.lost,
        "a_second": round(peer.sent / took_s),
        "answers": dict(peer.answers.most_common(12)),
        "early_mb": early,
        "late_mb": late,
        "grown_mb": round(late - early, 1),
    }


def _row_bytes() -> int:
    """Of one row of the demo model's hidden states."""
    config = json.loads((model_path() / "config.json").read_text())
    return int(config["hidden_size"]) * (4 if config["torch_dtype"] == "float32" else 2)


def rss_mb(pids: tuple[int, ...]) -> float:
    """What these processes have in memory together."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue  # it has died, which `alive` says
    return round(pages * os.sysconf("SC_PAGESIZE") / 1e6, 1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
