"""The attacked daemon and its victim: a client with a key of its own that streams greedy answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from edgemoe.api.api_keys import new_key
from tools.fuzzing.target import KEPT, end, free_ports, rss_mb
from tools.testbed.float32_model import float32_demo

READY_S, ASK_S = 600.0, 120.0  # kernels are compiled at the first start
PROMPT = "Once upon a time"
VICTIM, ATTACKER = "victim", "attacker"
CLEAR_PEAK = "5"  # written to /proc/PID/clear_refs


@dataclass(slots=True)
class StreamedAnswer:
    """An answer of the victim's: its text, and the seconds between its tokens."""

    status: int
    text: str = ""
    gaps_s: list[float] = field(default_factory=list)


class Attacked:
    """A daemon on a TCP port with two keys, and its processes and log as far as they are known."""

    def __init__(self, address: str, keys: dict[str, str], log: Path | None = None, front_pid: int = 0) -> None:
        self.address, self.keys, self.log, self.front_pid = address, keys, log, front_pid
        self._http = httpx.Client(
            base_url=f"http://{address}", timeout=ASK_S, headers={"authorization": f"Bearer {keys[VICTIM]}"}
        )

    def health(self) -> dict[str, Any]:
        return dict(self._http.get("/health").json())

    def stream(self, tokens: int) -> StreamedAnswer:
        """Streams the victim's greedy answer."""
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        times_s, parts = list[float](), list[str]()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    times_s.append(time.monotonic())
                    parts += [choice["text"] for choice in json.loads(line[6:]).get("choices", ())]
        gaps_s = [after - before for before, after in pairwise(times_s)]
        return StreamedAnswer(answer.status_code, "".join(parts), gaps_s)

    def say(self, prompt: str) -> None:
        """Has the victim's prompt computed."""
        self._http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()

    def fresh_s(self) -> float:
        """Returns how long a new connection with the victim's key takes to get an answer; ASK_S if it gets none."""
        began_s = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            key = {"authorization": f"Bearer {self.keys[VICTIM]}"}
            httpx.get(f"http://{self.address}/v1/models", headers=key, timeout=ASK_S).raise_for_status()
            return time.monotonic() - began_s
        return ASK_S

    def files(self) -> int:
        """Counts the open files of the front; 0 where its process is not known."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.front_pid}/fd")) if self.front_pid else 0
        return 0

    def log_lines(self) -> int:
        """Counts the lines of the daemon's log; 0 where it is not known."""
        return self.log.read_bytes().count(b"\n") if self.log else 0

    def forget_peaks(self) -> None:
        """Resets the peaks of memory of front and engine."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text(CLEAR_PEAK)

    def peaks_mb(self) -> tuple[float, float]:
        """Returns the peaks of resident memory of front and engine since `forget_peaks`; 0 where one is not known."""
        front, engine = (_peak_mb(pid) for pid in self._pids())
        return front, engine

    def now_mb(self) -> float:
        """Returns the resident memory of the engine."""
        return rss_mb(self._pids()[1:])

    def close(self) -> None:
        self._http.close()

    def _pids(self) -> tuple[int, int]:
        return self.front_pid, self.health().get("engine", {}).get("pid") or 0


def _peak_mb(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1e3
    return 0.0


@contextmanager
def attacked_daemon(sets: tuple[str, ...] = (), width: int = 0) -> Iterator[Attacked]:
    """Starts a daemon with two keys and the settings `sets`; yields it once it is ready.

    It serves the demo model in float32, its experts padded to `width` if that is not 0, so that a step takes longer.
    """
    store = float32_demo(KEPT.parent, width)
    with tempfile.TemporaryDirectory(prefix="edgemoe-attack-") as name:
        folder = Path(name)
        keys = {who: new_key(folder / "keys", who).secret for who in (VICTIM, ATTACKER)}
        address = f"127.0.0.1:{free_ports(1)[0]}"
        (folder / "empty.toml").write_text("")
        chosen = (
            f"api.socket={folder / 'api.sock'}",
            f"api.tcp={address}",
            f"api.api_key_file={folder / 'keys'}",
            f"model.path={store}",
            f"model.store_dir={KEPT}",
            *sets,
        )
        words = [word for one in chosen for word in ("--set", one)]
        command = [sys.executable, "-m", "edgemoe", "serve", "--config", str(folder / "empty.toml"), *words]
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": name})
        attacked = Attacked(address, keys, folder / "log", child.pid)
        try:
            _wait_ready(attacked, child, folder / "log")
            yield attacked
        finally:
            attacked.close()
            end(child)


def _wait_ready(attacked: Attacked, child: subprocess.Popen[bytes], log: Path) -> None:
    ends_s = time.monotonic() + READY_S
    while time.monotonic() < ends_s and child.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if attacked.health().get("status") == "ready":
                return
        time.sleep(0.2)
    raise RuntimeError(f"the daemon did not become ready:\n{log.read_text()[-3000:]}")
