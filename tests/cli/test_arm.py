"""Arm serves the demo and its int4 store word for word as this machine, with the wheel's machine code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.arm_system import arm_python, missing
from support.waiting import wait_until

from edgemoe.cli.client import Client
from edgemoe.demo import model_path
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.packer import pack

ROOT = Path(__file__).parents[2]
KIND = "cortex-a76"
READY_S = 3000.0  # on a busy machine; an engine takes five minutes to start
SETTINGS = ("engine.threads=1", "memory.ram_bytes=64MiB", "memory.kv_bytes=16MiB")
QUESTIONS = ("What is the capital of France?", "Tell me a story about a fox.")
SOCKET = "edgemoe.sock"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * READY_S),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with machine code for Arm, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"EDGEMOE_KINDS": KIND}, check=True, timeout=READY_S)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as packed:
        packed.extractall(folder / "unpacked")
    return folder / "unpacked"


@contextmanager
def serving(command: list[str], home: Path, **env: str) -> Iterator[httpx.Client]:
    """Yields a client of the daemon that a command starts. Its socket is in `home`."""
    with (home / "log").open("ab") as log:
        daemon = subprocess.Popen(command, cwd="/", env=os.environ | env, stdout=log, stderr=log)
    try:
        with Client(home / SOCKET) as client:
            wait_until(lambda: client.is_ready() or daemon.poll() is not None, READY_S)
        assert daemon.poll() is None, (home / "log").read_text()[-3000:]
        transport = httpx.HTTPTransport(uds=str(home / SOCKET))
        with httpx.Client(transport=transport, base_url="http://edgemoe", timeout=READY_S) as http:
            yield http
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(300) == 0, (home / "log").read_text()[-3000:]
    finally:
        daemon.kill()
        daemon.wait()


def answers(http: httpx.Client) -> list[str]:
    """Returns greedy answers of 40 tokens."""
    said = []
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        said.append(answer["choices"][0]["message"]["content"])
    return said


@pytest.mark.parametrize("encoding", ["keep", "int4"])
def test_arm_answers_word_for_word_as_this_machine(encoding: str, wheel: Path, tmp_path: Path) -> None:
    found = {}
    for machine in ("here", "arm"):
        home = tmp_path / machine
        home.mkdir()
        pack(model_path(), home / "store", wanted=WantedEncodings.parse(encoding, "keep"))
        options = [word for setting in SETTINGS for word in ("--set", setting)]
        serve = ["-m", "edgemoe", "serve", *options, "--model"]
        own = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PYTHONPATH": str(ROOT)}
        if machine == "here":
            command, env = [sys.executable, *serve, str(home / "store")], own
        else:
            command, env = arm_python(wheel, home, *serve, "/root/store"), {}
        with serving(command, home, **env) as http:
            found[machine] = answers(http)
    assert found["arm"] == found["here"]
    assert "Paris" in found["arm"][0]
    assert not list((tmp_path / "arm").rglob("kernels/*.o")), "Arm compiled what the wheel should bring"
