"""Makes a training set for ScoutGate: serves a model with recording on, sends it prompts, and converts the
recording.

    python -m tools.record_corpus --out .cache/routes                # the demo model, on generated prompts
    python -m tools.record_corpus --out DIR --model STORE --prompts FILE.jsonl.gz ...   # {"prompt": ...} a line
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from rich.progress import track

from edgemoe import demo
from edgemoe.cli.client import Client
from edgemoe.store.packer import ensure_store
from scoutgate.convert import recordings
from tools.demo import daemon, wait_until_ready
from tools.demo_model import chat, corpus

ANSWER_TIMEOUT_S = 300.0
CONTINUATION_CHARS = (80, 500)


def generated(count: int, seed: int) -> Iterator[dict[str, object]]:
    """Yields bodies of requests: half of them questions for the chat endpoint, half beginnings of texts for
    completions.
    """
    rng = random.Random(seed)
    texts = corpus.gather(seed, max_chars=600_000, generated=200).documents
    domains = [name for name in texts if name != "chat"]
    for _ in range(count):
        if rng.random() < 0.5:
            yield {"messages": [{"role": "user", "content": chat.turn(rng)[0]}]}
        else:
            text = rng.choice(texts[rng.choice(domains)])
            start = rng.randrange(max(1, len(text) - 600))
            yield {"prompt": text[start : start + rng.randrange(*CONTINUATION_CHARS)]}


def from_files(files: list[Path], count: int) -> Iterator[dict[str, object]]:
    """Yields chat requests from lines of JSON with a "prompt", of all files in turn."""
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for _, line in zip(range(count // len(files) + 1), lines, strict=False):
                yield {"messages": [{"role": "user", "content": json.loads(line)["prompt"]}]}


def send(socket: Path, body: dict[str, object], number: int, max_tokens: int) -> int:
    """Sends one request; returns the number of generated tokens. Raises httpx.HTTPError."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    more = {"model": demo.NAME, "max_tokens": max_tokens, "temperature": 0.7, "seed": number}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=ANSWER_TIMEOUT_S) as client:
        answer = client.post(f"http://edgemoe{path}", json={**body, **more}).raise_for_status().json()
    return int(answer["usage"]["completion_tokens"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="data set to write")
    parser.add_argument("--model", type=Path, help="store or checkpoint; the demo model if not given")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines with a prompt each")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="edgemoe-record-"))
    store = ensure_store(options.model or demo.model_path(), Path(".cache/stores"))
    chosen = from_files(options.prompts, options.requests) if options.prompts else None
    bodies = list(chosen or generated(options.requests, options.seed))
    socket, records = work / "edgemoe.sock", work / "records"
    command = [sys.executable, "-m", "edgemoe", "serve", "--model", str(store), "--socket", str(socket)]
    sets = {"model.name": demo.NAME, "record.dir": records, "memory.kv_bytes": "64MiB", "device.0.kind": "cpu"}
    command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    began_s = time.monotonic()
    try:
        with daemon(command, work / "log") as process, Client(socket) as client:
            wait_until_ready(process, client)
            with ThreadPoolExecutor(options.at_once) as pool:
                jobs = [pool.submit(send, socket, body, n, options.max_tokens) for n, body in enumerate(bodies)]
                tokens = sum(job.result() for job in track(jobs, "Asking", transient=True))
        count = recordings(records, store, options.out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    took_s = time.monotonic() - began_s
    print(f"{options.out}: {count} tokens routed, {tokens} of them decoded, in {took_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
