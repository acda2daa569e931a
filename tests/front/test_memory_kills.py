"""An engine that the kernel kills for want of memory, in a real control group: its front goes on, and says why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.front_kit import http_client, settings_for
from support.waiting import until

from edgemoe.front.engine_starts import why_killed
from edgemoe.telemetry.probes import MemoryKills

LIMIT_BYTES = 600 << 20
FRONT = """
import sys
from pathlib import Path
from support.front_kit import SCRIPTED, settings_for
from edgemoe.front.main import run

folder, model, group = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(__import__("os").getpid()))
engine = f'''
import runpy, sys, threading, time
from pathlib import Path

def grow():
    while not Path({str(folder / "grow")!r}).exists():
        time.sleep(0.05)
    Path({str(folder / "grow")!r}).unlink()
    held = [bytearray(b"x") * (16 << 20) for _ in range(1000)]

Path("/proc/self/oom_score_adj").write_text("500")
threading.Thread(target=grow, daemon=True).start()
runpy.run_path({SCRIPTED[1]!r}, run_name="__main__")
'''
run(settings_for(folder, model), (sys.executable, "-c", engine))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of this kernel's version, with a limit and without swap."""
    base = Path("/sys/fs/cgroup")
    first = (base / "memory").is_dir()
    folder = (base / "memory" if first else base) / f"edgemoe-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit, swap = (
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if first else ("memory.max", "memory.swap.max")
        )
        (folder / limit).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):  # a kernel without limits of swap
            (folder / swap).write_text(str(LIMIT_BYTES if first else 0))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory control group can be made: {error}")
    yield folder
    folder.rmdir()


def kernel_kills(group: Path) -> int:
    """Returns how many of the group's processes the kernel has killed for want of memory."""
    file = next(path for name in ("memory.oom_control", "memory.events") if (path := group / name).exists())
    return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])


async def test_the_front_outlives_its_engine_and_says_what_to_change(
    tmp_path: Path, model_dir: Path, group: Path
) -> None:
    command = [sys.executable, "-c", FRONT, str(tmp_path), str(model_dir), str(group)]
    front = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    settings = settings_for(tmp_path, model_dir)
    try:
        async with http_client(settings) as http:

            async def is_ready() -> bool:
                assert front.poll() is None, "the front has ended"
                with contextlib.suppress(httpx.TransportError):
                    return bool((await http.get("/health")).status_code == 200)
                return False

            await until(is_ready)
            body = {"model": "tiny", "prompt": "SAY{after the death}END", "max_tokens": 30}
            (tmp_path / "grow").touch()

            async def has_been_replaced() -> bool:
                return bool((await http.get("/health")).json()["engine"]["starts"] > 1)

            # Until then nothing is asked: the kernel may kill a front that allocates while the engine is being freed.
            await until(lambda: kernel_kills(group) > 0)
            await asyncio.sleep(0.5)
            await until(has_been_replaced)
            await until(is_ready)
            ended = (await http.get("/health")).json()["engine"]["last_end"]
            assert "killed by SIGKILL by the kernel for want of memory" in ended
            assert "may take 600 MiB (MemoryMax of the unit" in ended
            assert "memory.ram_bytes" in ended
            answer = await http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "after the death"
    finally:
        front.terminate()
        await asyncio.to_thread(front.wait, 60)


@pytest.mark.parametrize(
    ("now", "limit", "told"),
    [
        (MemoryKills(1, 5), 1 << 30, ""),
        (MemoryKills(2, 6), 1 << 30, "may take 1.0 GiB"),
        (MemoryKills(2, 6), None, "the machine has no more"),
        (MemoryKills(1, 6), 1 << 30, "the machine has no more"),
    ],
)
def test_the_counts_say_whether_the_kernel_has_killed(now: MemoryKills, limit: int | None, told: str) -> None:
    said = why_killed(MemoryKills(1, 5), now, limit)
    assert told in said
    assert bool(said) == bool(told)
