"""guidellm, the load generator, over TCP: completions and streamed chats, one after the other and four at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import use

REQUESTS = 4


def load(request_format: str, stream: bool, profile: str) -> None:
    report = Path(use.FOLDER, f"guidellm-{request_format.strip('/').replace('/', '-')}-{stream}.json")
    extras = {"body": {"temperature": 0}}
    backend = {
        "kind": "openai_http",
        "target": use.URL.removesuffix("/v1"),
        "model": use.MODEL,
        "api_key": use.KEY,
        "request_format": request_format,
        "stream": stream,
        "extras": extras,
    }
    command = [
        str(Path(sys.executable).with_name("guidellm")),
        *("run", "--disable-console", "--backend", json.dumps(backend), "--profile", profile),
        *("--data", json.dumps({"kind": "synthetic_text", "prompt_tokens": 48, "output_tokens": 16})),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": use.TOKENIZER})),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    for benchmark in json.loads(report.read_text())["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals


if __name__ == "__main__":
    use.run(
        chat=lambda: load("/v1/chat/completions", False, "kind=synchronous"),
        streaming=lambda: load("/v1/chat/completions", True, "kind=concurrent,streams=4"),
        completions=lambda: load("/v1/completions", True, "kind=concurrent,streams=4"),
    )
