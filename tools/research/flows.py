"""Prints the files that one request enters, in order, in live daemons that serve the demo model.

    python tools/research/flows.py

A profile hook notes the first call of each function while one chat is streamed. It leaves out functions that an idle
daemon calls, and files that count, log or supervise. The flows: experts all in RAM, some in RAM, shared by two boxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from edgemoe import demo
from edgemoe.cluster.rpc.keys import generate
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store

ROOT = Path(__file__).parents[2]
READY_S, WRITE_S, IDLE_S = 300.0, 30.0, 3.0
RAM_SHARE = 0.22
ASIDE = (  # counts, logs, supervises
    "telemetry/",
    "api/metrics",
    "front/supervisor",
    "front/engine_starts",
    "front/engine_process",
    "front/cluster_snapshots",
    "worker/snapshot_feed",
    "ticking",
    "heap",
    "errors",
)
CALL = (  # files that an expert call to a peer may enter, in both engines
    "experts/compute/peer_",
    "experts/compute/cost_model",
    "policy/resolve",
    "types/peers",
    "cluster/",
    "wire/",
)
HOOK = """
import json, os, pathlib, sys, threading, time

KIND = {"edgemoe": "front", "edgemoe.worker": "engine"}.get(next(iter(sys.orig_argv[2:3]), ""))
if KIND and os.environ.get("FLOWS_FOLDER"):
    folder, package = pathlib.Path(os.environ["FLOWS_FOLDER"]), os.environ["FLOWS_PACKAGE"]
    first = {}
    recording = False

    def hook(frame, event, _):
        if recording and event == "call" and frame.f_code not in first and package in frame.f_code.co_filename:
            first[frame.f_code] = time.monotonic()

    def watch():
        global recording
        while True:
            switch = folder / "record"
            wanted = switch.read_text() if switch.exists() else ""
            if wanted and not recording:
                first.clear()
                name, recording = wanted, True
            elif recording and not wanted:
                recording = False
                calls = [(c.co_filename, c.co_qualname, s) for c, s in sorted(first.items(), key=lambda i: i[1])]
                written = folder / f"{name}.{KIND}.new"
                written.write_text(json.dumps(calls))
                written.rename(folder / f"{name}.{KIND}")
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
"""
Calls = list[tuple[str, str]]  # file and function, in the order of the first calls


class Recorded:
    """A daemon under the hook."""

    def __init__(self, folder: Path, store: Path, settings: Mapping[str, object]) -> None:
        folder.mkdir()
        self._model = ""
        self._folder, self._socket = folder, folder / "api.sock"
        (folder / "sitecustomize.py").write_text(HOOK)
        chosen = {"model.path": store, "api.socket": self._socket, **settings}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        (folder / "empty.toml").write_text("")
        path = os.pathsep.join((str(folder), str(ROOT)))
        env = os.environ | {"PYTHONPATH": path, "FLOWS_FOLDER": str(folder), "FLOWS_PACKAGE": f"{ROOT}/edgemoe/"}
        command = [sys.executable, "-m", "edgemoe", "serve", "--config", str(folder / "empty.toml"), *words]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._socket)), base_url="http://box", timeout=300.0
        )

    def wait_ready(self) -> None:
        """Waits until it takes requests. Raises RuntimeError with the end of its log."""
        ends_s = time.monotonic() + READY_S
        while time.monotonic() < ends_s and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the daemon is not ready:\n{self.log.read_text()[-3000:]}")

    def chat(self, tokens: int) -> None:
        """Streams one greedy chat of `tokens` tokens."""
        self._model = self._model or self.http.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            text = response.read().decode()
            if response.status_code != 200 or "data: [DONE]" not in text:
                raise RuntimeError(f"no answer: {text[-500:]}")

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    def start(self, name: str) -> None:
        """Begins to record under a name."""
        (self._folder / "switch").write_text(name)
        (self._folder / "switch").rename(self._folder / "record")
        time.sleep(0.2)  # the hook's thread looks 50 times a second

    def stop(self, name: str) -> dict[str, Calls]:
        """Ends the recording. Returns the calls of the front and of the engine."""
        (self._folder / "record").unlink()
        ends_s = time.monotonic() + WRITE_S
        found: dict[str, Calls] = {}
        for kind in ("front", "engine"):
            file = self._folder / f"{name}.{kind}"
            while not file.exists() and time.monotonic() < ends_s:
                time.sleep(0.05)
            calls = json.loads(file.read_text())
            found[kind] = [(path.split("/edgemoe/", 1)[-1].removesuffix(".py"), name) for path, name, _ in calls]
        return found


@contextlib.contextmanager
def running(boxes: Sequence[Recorded]) -> Iterator[None]:
    """Waits until all take requests, and closes them at the end."""
    try:
        for box in boxes:
            box.wait_ready()
        yield
    finally:
        for box in boxes:
            box.close()


def record(boxes: Sequence[Recorded], tokens: int, only: tuple[str, ...] = ()) -> list[dict[str, Calls]]:
    """Returns each box's calls while the first answers a chat: the ones in `only`, or else all but idle ones."""
    boxes[0].chat(tokens)  # so that nothing happens for the first time
    for box in boxes:
        box.start("idle")
    time.sleep(IDLE_S)
    idle = [box.stop("idle") for box in boxes]
    for box in boxes:
        box.start("chat")
    boxes[0].chat(tokens)
    chats = [box.stop("chat") for box in boxes]
    found = []
    for calls, quiet in zip(chats, idle, strict=True):
        chosen: dict[str, Calls] = {}
        for kind, entered in calls.items():
            left_out = set() if only else set(quiet[kind])
            chosen[kind] = [call for call in entered if call not in left_out and call[0].startswith(only or "")]
        found.append(chosen)
    return found


def files_of(calls: Calls) -> dict[str, list[str]]:
    """Returns the necessary files in order, each with its functions."""
    files: dict[str, list[str]] = {}
    for file, function in calls:
        if not file.startswith(ASIDE) and not function.endswith("<module>"):
            files.setdefault(file, []).append(function)
    return files


def show(title: str, files: Mapping[str, list[str]]) -> None:
    print(f"\n{title}: {len(files)} files, {sum(map(len, files.values()))} functions")
    for file, functions in files.items():
        print(f"  {file:45} {', '.join(functions[:4])}{', ...' if len(functions) > 4 else ''}")


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def pair_settings(folder: Path, shared: Mapping[str, object]) -> list[dict[str, Any]]:
    """Returns the settings of two boxes that know each other."""
    nodes, ports = ("a", "b"), free_ports(2)
    keys = [generate(folder / f"{node}.key").public.decode() for node in nodes]
    entries = [
        f'[[peer]]\nnode = "{node}"\naddress = "127.0.0.1:{port}"\nkey = "{key}"\n'
        for node, port, key in zip(nodes, ports, keys, strict=True)
    ]
    (folder / "peers.toml").write_text("\n".join(entries))
    return [
        {
            **shared,
            "cluster.node": node,
            "cluster.key_file": folder / f"{node}.key",
            "cluster.listen": f"127.0.0.1:{port}",
            "cluster.peers_file": folder / "peers.toml",
            "cluster.state_dir": folder / f"state-{node}",
            "cluster.leader": "a",
            "cluster.route": "least",
        }
        for node, port in zip(nodes, ports, strict=True)
    ]


def main() -> None:
    """Records the three flows and prints them."""
    with tempfile.TemporaryDirectory(prefix="flows-") as made:
        folder = Path(made)
        store = ensure_store(demo.model_path(), folder / "stores")
        size_bytes = sum(entry.bytes for layer in Manifest.load(store).layers for entry in layer.experts)
        common = {"memory.kv_bytes": "16MiB", "memory.headroom_bytes": "64MiB"}
        tight = {**common, "memory.ram_bytes": int(size_bytes * RAM_SHARE)}
        box = Recorded(folder / "alone", store, common)
        with running([box]):
            (alone,) = record([box], 16)
        for kind, calls in alone.items():
            show(f"chat, all experts in RAM, {kind}", files_of(calls))
        box = Recorded(folder / "tight", store, tight)
        with running([box]):
            (small,) = record([box], 16)
        show(f"chat, {RAM_SHARE:.0%} of experts in RAM, engine", files_of(small["engine"]))
        (folder / "pair").mkdir()
        boxes = [
            Recorded(folder / f"box{i}", store, one) for i, one in enumerate(pair_settings(folder / "pair", tight))
        ]
        with running(boxes):
            time.sleep(IDLE_S)  # links are measured
            asking, answering = record(boxes, 64, CALL)
        asked = files_of(asking["engine"])
        answered = files_of(answering["engine"])
        show("peer's expert call, asking engine", asked)
        show("peer's expert call, answering engine", answered)
        print(f"\npeer's expert call: {len(asked.keys() | answered.keys())} files in both engines")


if __name__ == "__main__":
    main()
