"""Serves the demo model from memory far smaller than its experts, and streams an answer through the `openai` client.

Prints the speed, the tiers that served experts, and the transfers between them.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
from rich.console import Console

from edgemoe import demo
from edgemoe.cli.client import Client, WaitingLine
from edgemoe.cli.status_command import take_snapshot, tier_table
from edgemoe.config.sizes import format_size
from edgemoe.errors import EdgemoeError, ServiceError
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import ensure_store
from edgemoe.telemetry.metrics import BYTES_MOVED, select

STOP_TIMEOUT_S, ANSWER_TIMEOUT_S = 30.0, 60.0
VRAM_SHARE, RAM_SHARE, LINK = 0.25, 0.50, "1GB/s"
HOPS = (("nvme", "ram"), ("ram", "vram"))
FIGURES_S = 1.0  # the engine reports its figures twice a second
QUESTION = "Tell me a story about a fox."
console = Console(highlight=False)


def main() -> int:
    """Exits 0 when an answer came and the daemon stopped cleanly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgemoe-demo-") as folder:
        log = Path(folder) / "log"
        try:
            demonstrate(Path(folder) / "edgemoe.sock", log, args.question, args.max_tokens)
        except (EdgemoeError, openai.OpenAIError) as error:
            said = log.read_text().splitlines()[-20:] if log.exists() else []
            console.print(f"[red]The demo failed:[/] {error}", *said, sep="\n")
            return 1
    return 0


def demonstrate(socket: Path, log: Path, question: str, max_tokens: int) -> None:
    """Serves the model, asks, and prints the figures. Raises EdgemoeError, OpenAIError."""
    began_s = time.monotonic()
    store = ensure_store(demo.model_path(), Path(".cache/stores"))
    command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--socket", str(socket)]
    with daemon([*command, *budgets(Manifest.load(store))], log) as process, Client(socket) as client:
        wait_until_ready(process, client)
        console.print(f"Ready after {time.monotonic() - began_s:.1f} s, at {socket}\n")
        answer(socket, question, max_tokens)
        time.sleep(FIGURES_S)
        metrics = take_snapshot(client, socket).metrics
    console.print(tier_table(metrics))
    moved = (f"{format_size(select(metrics, BYTES_MOVED, **{'from': a, 'to': b}))} {a} to {b}" for a, b in HOPS)
    console.print(f"[bold]Bytes moved[/] {', '.join(moved)}")
    console.print("The daemon has stopped cleanly.")


def budgets(manifest: Manifest) -> list[str]:
    """Returns --set options with memory for a few of the experts, and prints them."""
    size_bytes = sum(entry.bytes for layer in manifest.layers for entry in layer.experts)
    vram_bytes, ram_bytes = int(size_bytes * VRAM_SHARE), int(size_bytes * RAM_SHARE)
    console.print(
        f"[bold]{demo.NAME}[/] has {format_size(size_bytes)} of experts. It gets {format_size(vram_bytes)} of "
        f"emulated VRAM behind a link of {LINK} and {format_size(ram_bytes)} of RAM; the rest stays on disk."
    )
    settings = {
        "model.name": demo.NAME,
        "device.0.kind": "emulated",
        "device.0.expert_bytes": vram_bytes,
        "device.0.link_bytes_per_s": LINK,
        "memory.ram_bytes": ram_bytes,
        "memory.kv_bytes": "16MiB",
        "memory.headroom_bytes": "64MiB",
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@contextmanager
def daemon(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the daemon while the block runs. Raises ServiceError unless it stops cleanly on SIGTERM."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ServiceError(f"the daemon has not stopped within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None
    finally:
        process.kill()
        process.wait()
    if code:
        raise ServiceError(f"the daemon ended with exit code {code}")


def wait_until_ready(process: subprocess.Popen[bytes], client: Client) -> None:
    """Waits as long as loading makes progress. Raises ServiceError if the daemon ends first, or no engine can start."""
    with console.status("Starting the daemon ...") as status:
        line = WaitingLine()
        show = (lambda text: status.update(f"Starting the daemon: {text}")) if console.is_terminal else line.show
        try:
            client.wait_while_loading(show, lambda: process.poll() is None)
        except ServiceError as error:
            if process.poll() is not None:
                raise ServiceError(f"the daemon ended with exit code {process.returncode}") from error
            raise


def answer(socket: Path, question: str, max_tokens: int) -> None:
    """Streams one answer and prints its speed."""
    console.print(f"[bold cyan]> {question}[/]")
    transport = httpx2.HTTPTransport(uds=str(socket))
    with (
        httpx2.Client(transport=transport, timeout=ANSWER_TIMEOUT_S) as http,
        openai.OpenAI(base_url="http://edgemoe/v1", api_key="unused", http_client=http) as app,
    ):
        model = app.models.list().data[0].id
        began_s, first_s, tokens = time.monotonic(), 0.0, 0
        stream = app.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.monotonic()
                print(chunk.choices[0].delta.content, end="", flush=True)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        ended_s = time.monotonic()
    if tokens < 2 or not first_s:
        raise ServiceError("the answer was empty")
    speed = (tokens - 1) / (ended_s - first_s)
    console.print(
        f"\n\n{tokens} tokens, the first after {first_s - began_s:.2f} s, then [bold]{speed:.1f} tokens/s[/]\n"
    )


if __name__ == "__main__":
    sys.exit(main())
