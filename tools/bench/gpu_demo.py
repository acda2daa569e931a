"""Serves the demo model from a device, and measures the daemon's start and the speed of an answer.

    python -m tools.bench.gpu_demo [--device cuda:0] [--max-tokens 200]

Each figure is printed at once as a JSON line. The daemon's log goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from edgemoe import demo
from edgemoe.cli.client import Client

START_S, STOP_S, ANSWER_S = 150.0, 20.0, 60.0
QUESTION = "Tell me a story about a fox."
STORES = Path(__file__).resolve().parents[2] / ".cache" / "stores"  # the tests' kernels are beside it, too
ASKED = 3


def main() -> int:
    """Exits 0 if answers came and the daemon stopped cleanly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()
    for figure in figures(args.device, args.max_tokens):
        print(json.dumps(figure), flush=True)
    return 0


def figures(device: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """Yields figures by name. Raises RuntimeError if the daemon does not start, answer or stop."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-demo-") as folder:
        socket = Path(folder) / "edgemoe.sock"
        settings = {
            "model.name": demo.NAME,
            "model.store_dir": STORES,
            "device.0.kind": device,
            "memory.kv_bytes": "64MiB",
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(demo.model_path()), "--socket", str(socket)]
        began_s = time.monotonic()
        daemon = subprocess.Popen([*command, *words], stdout=sys.stderr)
        try:
            wait_until_ready(daemon, socket)
            yield {"start_s": round(time.monotonic() - began_s, 1)}
            for number in range(ASKED):
                yield {f"answer_{number + 1}": answer(socket, max_tokens)}
            daemon.send_signal(signal.SIGTERM)
            yield {"exit_code": daemon.wait(STOP_S)}
        finally:
            daemon.kill()
            daemon.wait()


def wait_until_ready(daemon: subprocess.Popen[bytes], socket: Path) -> None:
    end_s = time.monotonic() + START_S
    with Client(socket) as client:
        while not client.is_ready():
            if daemon.poll() is not None:
                raise RuntimeError(f"the daemon ended with exit code {daemon.returncode}")
            if time.monotonic() > end_s:
                raise RuntimeError(f"the daemon is not ready after {START_S:.0f} s")
            time.sleep(0.1)


def answer(socket: Path, max_tokens: int) -> dict[str, float]:
    """Returns the time to the first token, and the tokens per second after it."""
    body = {
        "model": demo.NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    transport = httpx.HTTPTransport(uds=str(socket))
    began_s, times, tokens = time.monotonic(), list[float](), 0
    with (
        httpx.Client(transport=transport, base_url="http://edgemoe", timeout=ANSWER_S) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        if not response.is_success:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read()[:500].decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    times.append(time.monotonic() - began_s)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if tokens < 2 or not times:
        raise RuntimeError("the answer was empty")
    return {
        "first_token_ms": round(times[0] * 1e3, 1),
        "tokens": tokens,
        "tokens_per_s": round((tokens - 1) / (times[-1] - times[0]), 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
