"""Daemons in the boxes of a test bed: one each, on its own or helping the others."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from edgemoe.cluster.rpc.keys import generate
from edgemoe.telemetry.metrics import parse
from tools.testbed.bed import Bed, BedError, Box

CONTROL_PORT, CALLS_PORT, BULK_PORT = 7540, 7541, 7542
READY_S = 90.0
Settings = Mapping[str, object]  # "section.key" -> value


@dataclass(slots=True)
class Answer:
    """The answer to a request: its text, its end, and the arrival time of each piece."""

    text: str = ""
    finish: str = ""
    error: str = ""
    began_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # since it began
    status: int = 0

    @property
    def took_s(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0


class Daemon:
    """One box's daemon, which can be started again after it was killed."""

    def __init__(self, box: Box, folder: Path, settings: Settings, module: str = "edgemoe") -> None:
        """Makes `folder`, for sockets, state and log. `module` is the program that runs."""
        folder.mkdir(parents=True, exist_ok=True)
        self.box, self.folder = box, folder
        self.log = folder / "log"
        self._socket = folder / "api.sock"
        chosen = {"api.socket": str(self._socket), "log.format": "json", "log.level": "info", **settings}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={_word(value)}")]
        config = folder / "empty.toml"
        config.write_text("")
        self._command = [sys.executable, "-m", module, "serve", "--config", str(config), *words]
        self._transport = httpx.HTTPTransport(uds=str(self._socket))
        self.http = httpx.Client(
            transport=self._transport, base_url="http://box", timeout=httpx.Timeout(120, connect=2)
        )
        self._child: subprocess.Popen[Any] | None = None
        self._read = 0  # bytes of the log
        self._events: list[dict[str, Any]] = []
        self._begins: list[int] = []  # positions in the log

    def start(self, instead: Settings | None = None) -> None:
        """Starts it; `wait_ready` waits. With settings `instead` of some of its own it logs to another file."""
        words = [word for key, value in (instead or {}).items() for word in ("--set", f"{key}={_word(value)}")]
        with (self.log.with_name("log.aside") if instead else self.log).open("a") as log:
            self._child = self.box.spawn([*self._command, *words], stdout=log, stderr=log)

    @property
    def alive(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._child is not None and self._child.poll() is None

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Waits until it accepts requests. Raises BedError, with the end of its log."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if self._child is not None and self._child.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if listens(self._socket) and self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise BedError(f"{self.box.name} did not become ready:\n{self.log.read_text()[-3000:]}")

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stops it, and waits for its end."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait(timeout_s)
            self._child = None

    def kill(self) -> None:
        """Kills all its processes with SIGKILL."""
        self.box.kill()
        if self._child is not None:
            self._child.wait(10)
            self._child = None

    def close(self) -> None:
        self.kill()
        self.http.close()

    def complete(self, prompt: str | Sequence[int], tokens: int, *, timeout_s: float = 60.0, user: str = "") -> Answer:
        """Streams a greedy completion of exactly `tokens` tokens."""
        body: dict[str, object] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "model": "m",
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        if user:
            body["user"] = user
        answer = Answer(began_s=time.time())
        began_s = time.monotonic()
        try:
            with self.http.stream("POST", "/v1/completions", json=body, timeout=timeout_s) as response:
                answer.status = response.status_code
                if answer.status != 200:
                    answer.error = response.read().decode()[:500]
                    return answer
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        answer.error = json.dumps(event["error"])[:500]
                        continue
                    for choice in event.get("choices", ()):
                        answer.text += choice["text"]
                        answer.finish = choice["finish_reason"] or answer.finish
                        answer.times_s.append(time.monotonic() - began_s)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    def metrics(self) -> dict[str, float]:
        """Returns all metrics: names with their labels -> values."""
        return parse(self.http.get("/metrics").text)

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Returns the events of its log, from that byte of the log on."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            if line.startswith(b"{"):
                self._events.append(json.loads(line))
                self._begins.append(self._read)
            self._read += len(line)
        return self._events[bisect_left(self._begins, since) :]

    def log_bytes(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def epoch(self) -> int:
        """Returns the highest epoch on its disk."""
        file = self.folder / "state" / "epoch"
        return int(file.read_text().split()[0]) if file.exists() else 0  # a checksum follows


class Cluster:
    """A daemon in every box of a bed, all in one cluster."""

    def __init__(
        self,
        bed: Bed,
        folder: Path,
        settings: Settings,
        own: Mapping[str, Settings] | None = None,
        empty: Sequence[str] = (),
        state_bytes: int = 0,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Makes daemons with `settings` for all and `own` for one box each; addresses, keys and state are added.

        Boxes that are `empty` are listed without a vote, and have no daemon. With `state_bytes` the state of each box
        lies on a file system of that size. Boxes in `modules` run that module.
        """
        self.bed, self.folder = bed, folder
        self.settings, self.own = dict(settings), dict(own or {})
        folder.mkdir(parents=True, exist_ok=True)
        self._keys = {name: generate(self.key_file(name)).public.decode() for name in bed.boxes}
        self.empty, self._state_bytes = frozenset(empty), state_bytes
        homes = [box for box in bed.boxes.values() if box.name not in empty]
        runs = modules or {}
        self.daemons = {
            box.name: Daemon(box, folder / box.name, self.settings_of(box), runs.get(box.name, "edgemoe"))
            for box in homes
        }
        self.list({})

    def list(self, instead: Mapping[str, str]) -> None:
        """Writes each box's list of peers, with the keys in `instead`; a box whose key is "" is left out."""
        for name in self.daemons:
            self.write_peers(self.peers_file(name), keys=instead)

    def write_peers(self, path: Path, *, keys: Settings | None = None) -> None:
        """Writes a list of peers. Boxes whose key in `keys` is "" are left out."""
        entries = []
        for name, key in {**self._keys, **(keys or {})}.items():
            where = 'address = ""' if name in self.empty else f'address = "{self.bed[name].address}:{CONTROL_PORT}"'
            vote = "\nvoter = false" if name in self.empty else ""
            if key:
                entries.append(f'[[peer]]\nnode = "{name}"\n{where}{vote}\nkey = "{key}"\nvouches = true\n')
        fresh = path.with_suffix(".new")
        fresh.write_text("\n".join(entries))
        fresh.rename(path)

    def peers_file(self, name: str) -> Path:
        return self.folder / name / "peers.toml"

    def state_dir(self, name: str) -> Path:
        return self.folder / name / "state"

    def key_file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def settings_of(self, box: Box) -> dict[str, object]:
        return {
            "cluster.node": box.name,
            "cluster.key_file": str(self.key_file(box.name)),
            "cluster.listen": f"{box.address}:{CONTROL_PORT}",
            "cluster.calls_port": CALLS_PORT,
            "cluster.bulk_port": BULK_PORT,
            "cluster.peers_file": str(self.peers_file(box.name)),
            "cluster.state_dir": str(self.state_dir(box.name)),
            "cluster.coordination": "raft",
            **self.settings,
            **self.own.get(box.name, {}),
        }

    def __enter__(self) -> Cluster:
        try:
            for name in self.daemons if self._state_bytes else ():
                self.state_dir(name).mkdir(mode=0o700)
                size = f"size={self._state_bytes},mode=700"
                subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.state_dir(name)], check=True)
            for daemon in self.daemons.values():
                daemon.start()
            for daemon in self.daemons.values():
                daemon.wait_ready()
            self.wait_settled()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Daemon:
        return self.daemons[name]

    def __iter__(self) -> Iterator[Daemon]:
        return iter(self.daemons.values())

    def close(self) -> None:
        for daemon in self:
            daemon.box.resume()
            daemon.close()
            if self.state_dir(daemon.box.name).is_mount():
                subprocess.run(["umount", self.state_dir(daemon.box.name)], check=True)

    def wait_settled(self, timeout_s: float = READY_S, *, moving: bool = False) -> None:
        """Waits until all have a plan and see each other, and homes are in memory or `moving`. Raises BedError."""
        ends = time.monotonic() + timeout_s
        waits = list(self)
        state: dict[str, str] = {}
        while waits and time.monotonic() < ends:
            for daemon in list(waits):
                state[daemon.box.name] = why = self._unsettled(daemon, moving)
                if not why:
                    waits.remove(daemon)
            if waits:
                time.sleep(0.25)  # a question costs each box some milliseconds, which its start needs
        if waits:
            ends_of_logs = "\n".join(daemon.log.read_text()[-1500:] for daemon in waits)
            raise BedError(f"the boxes did not find together: {state}\n{ends_of_logs}")

    def _unsettled(self, daemon: Daemon, moving: bool) -> str:
        try:
            if daemon.http.get("/health").status_code != 200:
                return "not ready"
            metrics = daemon.metrics()
        except httpx.TransportError as error:
            return f"no answer: {error}"
        if not metrics.get("edgemoe_home_experts"):
            return "no plan"
        if metrics.get("edgemoe_home_experts_missing") and not moving:
            return "experts on their way"
        seen = [key for key in metrics if key.startswith("edgemoe_peer_latency_seconds{")]
        return "" if len(seen) == len(self.daemons) - 1 else f"sees {len(seen)} others"

    def leader(self) -> str:
        """Returns the box that logged last that it leads; "" if none did."""
        found = [
            (event["time"], daemon.box.name)
            for daemon in self
            for event in daemon.events()
            if event["event"] == "leading"
        ]
        return max(found)[1] if found else ""


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def listens(path: Path) -> bool:
    """Whether a process accepts connections there; httpcore leaves its socket open if none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
