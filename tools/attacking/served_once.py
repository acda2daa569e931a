"""Serves a hostile checkpoint and asks it some questions: `python -m tools.attacking.served_once MODEL FOLDER`.

Ends with 0 if the daemon does not start, by an error of its own, or answers its other clients while it is asked.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tools.fuzzing.target import end

READY_S, ASK_S, HEALTHY_S = 170.0, 90.0, 20.0
TEXTS = ("a" * 40, "a" * 20_000, "ab" * 1000, "é" * 500)


def ask(client: httpx.Client, told: list[str]) -> None:
    """Asks for chats and tokens; notes answers that no client should get."""
    questions: list[tuple[str, dict[str, Any]]] = [("/tokenize", {"prompt": text}) for text in TEXTS]
    questions += [("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})]
    questions += [("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})]
    for path, body in questions:
        answer = client.post(path, json=body)
        if answer.status_code not in (200, 400, 429):
            told.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        if "/usr/bin" in answer.text or "root:" in answer.text:
            told.append(f"{path}: {answer.text[:200]}")


def main() -> int:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    (folder / "empty.toml").write_text("")
    sets = (f"api.socket={folder / 'api.sock'}", f"model.path={model}", f"model.store_dir={folder / 'stores'}")
    words = [word for one in sets for word in ("--set", one)]
    daemon = subprocess.Popen(
        [sys.executable, "-m", "edgemoe", "serve", "--config", str(folder / "empty.toml"), *words]
    )
    transport = httpx.HTTPTransport(uds=str(folder / "api.sock"))
    client = httpx.Client(transport=transport, base_url="http://box", timeout=ASK_S)
    told, slowest_s = list[str](), 0.0
    try:
        ends_s = time.monotonic() + READY_S
        while True:
            if daemon.poll() is not None:
                print(f"refused, code {daemon.returncode}")
                return 0 if daemon.returncode in (1, 2, 78) else 1
            if time.monotonic() > ends_s:
                print("neither ready nor ended")
                return 1
            try:
                if client.get("/health").json().get("status") in ("ready", "failed"):
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        if client.get("/health").json()["status"] == "failed":
            print("refused: the engine cannot start")
            return 0
        asking = threading.Thread(target=ask, args=(client, told))
        asking.start()
        while asking.is_alive():
            began_s = time.monotonic()
            client.get("/health").raise_for_status()
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            asking.join(0.1)
    finally:
        end(daemon)
    print(f"served; /health took {slowest_s:.1f} s at most; {'; '.join(told) or 'well'}")
    return int(bool(told) or slowest_s > HEALTHY_S)


if __name__ == "__main__":
    sys.exit(main())
