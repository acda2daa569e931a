"""The real engine process on the real wire."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from support.checkpoints import tiny_checkpoint
from support.kept import STORES
from support.waiting import wait_until

from edgemoe.config.settings import (
    DeviceSettings,
    EngineSettings,
    LogSettings,
    MemorySettings,
    ModelSettings,
    RecordSettings,
    Settings,
)
from edgemoe.ipc.engine_socket import IpcServer
from edgemoe.ipc.messages import (
    Boot,
    Cancel,
    Drain,
    Emissions,
    Failed,
    FromEngine,
    Loading,
    Ping,
    Ready,
    Reload,
    Reloaded,
    SnapshotReply,
    SnapshotRequest,
    Stats,
    Stop,
    Submit,
    ToEngine,
)
from edgemoe.store.packer import pack
from edgemoe.telemetry.routing_recording import read_recording
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

M = TypeVar("M", bound=FromEngine)
START_S, ANSWER_S = 120, 30
EXPERT_BYTES = 8192  # one slot of the tiny model

SAMPLING = Sampling(temperature=1.0, top_p=0.95, max_tokens=60)


class Child:
    """A worker, and the front's end of its wire."""

    def __init__(self, process: asyncio.subprocess.Process, wire: IpcServer, boot_id: str) -> None:
        self.process, self._wire, self._boot_id = process, wire, boot_id
        self._messages = wire.messages()

    def send_message(self, message: ToEngine) -> None:
        self._wire.send(self._boot_id, message)

    async def next_message(self, kind: type[M], timeout_s: float = ANSWER_S) -> M:
        """Returns the next message of this kind."""
        async with asyncio.timeout(timeout_s):
            async for boot_id, message in self._messages:
                assert boot_id == self._boot_id
                if isinstance(message, kind):
                    return message
        raise AssertionError("the wire was closed")

    async def end(self) -> Emission:
        """Returns the next emission that ends a request."""
        while True:
            for item in (await self.next_message(Emissions)).items:
                if item.finish:
                    return item

    async def tokens(self, name: str, count: int = 10**9) -> list[int]:
        """Returns the tokens of a request, up to its end or to `count` tokens."""
        tokens: list[int] = []
        while True:
            for item in (await self.next_message(Emissions)).items:
                if item.request == name:
                    assert item.token is not None
                    tokens.append(item.token)
                    if item.finish or len(tokens) == count:
                        return tokens


@asynccontextmanager
async def started(settings: Settings, wire: IpcServer) -> AsyncIterator[Child]:
    """Runs a worker with these settings, and closes the front's end of its wire behind it."""
    boot_id, values = secrets.token_hex(8), msgspec.to_builtins(settings)
    boot = Boot(boot_id=boot_id, address=wire.address, speaks=PROTOCOL_VERSIONS, settings=values)
    command = (sys.executable, "-m", "edgemoe.worker")
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(boot))
    process.stdin.close()
    try:
        yield Child(process, wire, boot.boot_id)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        wire.close()


@asynccontextmanager
async def worker(store: Path, runtime: Path) -> AsyncIterator[Child]:
    """Runs a worker with RAM for half of the experts and a device for a quarter."""
    wire = IpcServer(runtime)
    settings = Settings(
        model=ModelSettings(path=str(store), name="tiny", store_dir=str(STORES)),
        memory=MemorySettings(ram_bytes=9 * EXPERT_BYTES, kv_bytes=1 << 20),
        device=(DeviceSettings(kind="emulated", expert_bytes=4 * EXPERT_BYTES, link_bytes_per_s=1e10),),
        engine=EngineSettings(threads=1, max_sequences=4, max_queue=5),
        record=RecordSettings(dir=str(runtime / "routes")),
        log=LogSettings(level="warning"),
    )
    async with started(settings, wire) as child:
        yield child


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    pack(tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint")), directory)
    return directory


def request(name: str) -> Request:
    return Request(id=name, prompt=tuple(range(3, 40)), sampling=SAMPLING, seed=1234, user="1000")


async def test_another_engine_finishes_a_killed_engine_s_requests_with_the_same_tokens(
    store: Path, tmp_path: Path
) -> None:
    async with worker(store, tmp_path / "run") as first:
        assert (await first.next_message(Loading, START_S)).phase
        ready = await first.next_message(Ready, START_S)
        assert ready.model.id == "tiny"
        assert ready.limits.max_queue == 5
        assert ready.limits.context_tokens == 256
        first.send_message(Submit(request=request("whole")))
        whole = await first.tokens("whole")
        assert len(whole) == 60
        first.send_message(Submit(request=request("\0warm-up")))
        assert await first.tokens("\0warm-up") == whole, "no name keeps a request's tokens back"
        first.send_message(Submit(request=request("cut")))
        begun = await first.tokens("cut", count=7)
        first.process.send_signal(signal.SIGKILL)
        await first.process.wait()
    async with worker(store, tmp_path / "run") as second:
        await second.next_message(Ready, START_S)
        second.send_message(Submit(request=request("cut"), emitted=tuple(begun), attempt=2))
        assert begun + await second.tokens("cut") == whole
        await check_manners(second)
    *_, (header, steps) = (read_recording(file) for file in sorted((tmp_path / "run" / "routes").iterdir()))
    assert (header.layers, header.experts, header.top_k) == (3, 6, 2)
    assert {name for step in steps for name in step.meta.requests} >= {"cut", "long"}


async def check_manners(child: Child) -> None:
    """Checks a running engine's answers to all kinds of messages, and stops it."""
    child.send_message(Submit(request=request("long")))
    child.send_message(Submit(request=request("gone")))
    child.send_message(Cancel(request="gone", attempt=1))
    child.send_message(Drain())
    child.send_message(Submit(request=request("late")))
    long, gone, late = [], 0, None
    while len(long) < 60 or late is None:
        for item in (await child.next_message(Emissions)).items:
            assert item.request in ("long", "gone", "late")
            gone += (
                item.request == "gone" and late is not None
            )  # cancelled before `late` came: at most a step's, under way
            long += [item.token] if item.request == "long" else []
            late = item if item.request == "late" else late
    assert gone <= 1
    assert late.error_code == "engine_unavailable"
    child.send_message(Ping())
    values = (await child.next_message(Stats)).values
    while values["edgemoe_num_requests_running"]:
        values = (await child.next_message(Stats)).values
    assert values["edgemoe_kv_blocks_referenced"] == 0
    assert values['edgemoe_requests_finished_total{reason="cancelled"}'] == 1
    assert values['edgemoe_tier_hits_total{tier="nvme"}'] > 0
    assert values['edgemoe_tier_slots{tier="vram"}'] == 4
    child.send_message(Reload())
    reloaded = await child.next_message(Reloaded)
    assert not reloaded.refused
    assert "cache.scoutgate is not set" in reloaded.message
    child.send_message(SnapshotRequest())
    assert len((await child.next_message(SnapshotReply)).snapshot.cells) == 3 * 6
    child.process.send_signal(signal.SIGTERM)  # signals are for the front alone
    child.send_message(Stop())
    assert await asyncio.wait_for(child.process.wait(), ANSWER_S) == 0


async def test_an_engine_that_cannot_load_says_why_and_that_it_is_for_good(tmp_path: Path) -> None:
    async with worker(tmp_path / "nowhere", tmp_path / "run") as child:
        failed = await child.next_message(Failed, START_S)
        assert failed.fatal
        assert failed.error == "StoreError"
        assert "nowhere" in failed.message
        assert await asyncio.wait_for(child.process.wait(), ANSWER_S) == 1


@pytest.mark.slow
def test_an_engine_ends_with_its_front() -> None:
    """The front is a process that starts a worker, prints its id and is killed."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'edgemoe.worker'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        child = Path("/proc", front.stdout.readline().decode().strip())
        wait_until(lambda: (child / "oom_score_adj").read_text().startswith("500"))
        front.kill()
    wait_until(lambda: not child.exists() or "State:\tZ" in (child / "status").read_text())
