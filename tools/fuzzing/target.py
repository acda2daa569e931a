"""The attacked daemon, with its engine; it lists three peers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from edgemoe.cluster.rpc.keys import Secret, generate
from tools.testbed.daemons import listens

CHANNELS = ("control", "calls", "bulk")
GROWTH_MB = 30.0  # growth allowed to front and engine together
READY_S, ASK_S = 600.0, 20.0  # kernels are compiled at the first start
KEPT = Path(__file__).parents[2] / ".cache/stores"  # with compiled kernels beside it
CLOSED_PORT = 9  # a port without a listener


class Target:
    """A daemon on loopback that lists a peer for each channel; only the one on the control channel can be reached."""

    def __init__(self, folder: Path, route: str) -> None:
        self.folder, self.route = folder, route
        self.keys: dict[str, Secret] = {channel: generate(folder / f"{channel}.key") for channel in CHANNELS}
        self.own = generate(folder / "own.key")
        *ports, self.peer_port = free_ports(4)
        self.ports = dict(zip(CHANNELS, ports, strict=True))
        entries = {"box": (self.own, self.ports["control"])}
        entries |= {
            name: (key, self.peer_port if name == "control" else CLOSED_PORT) for name, key in self.keys.items()
        }
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
        """Returns the command that starts it."""
        settings: dict[str, Any] = {
            "model.store_dir": KEPT,
            "api.socket": str(self.folder / "api.sock"),
            "cluster.node": "box",
            "cluster.key_file": str(self.folder / "own.key"),
            "cluster.listen": f"127.0.0.1:{self.ports['control']}",
            "cluster.calls_port": self.ports["calls"],
            "cluster.bulk_port": self.ports["bulk"],
            "cluster.peers_file": str(self.folder / "peers.toml"),
            "cluster.state_dir": str(self.folder / "state"),
            "cluster.leader": "box",
            "cluster.route": self.route,
            "cache.policy": "lru",
        }
        (self.folder / "empty.toml").write_text("")
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "edgemoe", "serve", "--config", str(self.folder / "empty.toml"), *words]

    def ask(self) -> str:
        """Asks for a greedy answer. Raises httpx.HTTPStatusError if there is none."""
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body).raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def still_answers(self, right: str) -> bool:
        """Whether the same answer comes again."""
        try:
            return self.ask() == right
        except httpx.HTTPError:
            return False

    def health(self) -> dict[str, Any]:
        return dict(self.http.get("/health").json())

    def wait_ready(self, child: subprocess.Popen[bytes]) -> None:
        """Waits until it is ready. Raises RuntimeError with the end of its log if it does not start."""
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and child.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if listens(self.folder / "api.sock") and self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the daemon did not become ready:\n{(self.folder / 'log').read_text()[-3000:]}")


@contextmanager
def target(route: str = "pull") -> Iterator[tuple[Target, subprocess.Popen[bytes]]]:
    """Starts a daemon, and waits until it is ready."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-fuzz-") as name:
        made = Target(Path(name), route)
        with (made.folder / "log").open("wb") as log:
            child = subprocess.Popen(made.command(), stdout=log, stderr=log)
        try:
            made.wait_ready(child)
            yield made, child
        finally:
            end(child)
            made.http.close()


def end(child: subprocess.Popen[bytes]) -> None:
    """Stops a daemon, by force if it does not end by itself."""
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(10)


def rss_mb(pids: tuple[int, ...]) -> float:
    """Returns the resident memory of these processes together."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue  # it has died, which `alive` reports
    return round(pages * os.sysconf("SC_PAGESIZE") / 1e6, 1)


def free_ports(count: int) -> list[int]:
    """Returns unused TCP ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
