"""`edgemoe run`: a model is fetched, served and talked to by one command, which leaves no daemon behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.front_kit import running, settings_for, write_model
from support.hub import LocalHub, Repository, local_hub
from support.kept import KERNELS
from support.waiting import wait_until

from edgemoe import demo
from edgemoe.cli.client import Client
from edgemoe.errors import StoreError
from edgemoe.front.main import Front
from edgemoe.store.catalog import HUB_NAME, resolve
from edgemoe.store.hub_names import HUB_NAMES, hub_name

LIMIT_S = 600
SMALL = ("--set", "memory.kv_bytes=16MiB", "--set", "memory.headroom_bytes=64MiB")


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with local_hub() as found:
        found.repositories["someone/Tiny-MoE"] = Repository(demo.model_path())
        yield found


def run(
    folder: Path, hub: LocalHub, *words: str, said: str = "", stores: Path | None = None
) -> subprocess.CompletedProcess[str]:
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hub"), "HF_TOKEN": ""}
    command = command_of(folder, stores or folder / "stores", *words)
    return subprocess.run(command, env=os.environ | home, input=said, text=True, capture_output=True, timeout=LIMIT_S)


def command_of(folder: Path, stores: Path, *words: str) -> list[str]:
    places = ("--socket", str(folder / "s"), "--set", f"model.store_dir={stores}")
    return [sys.executable, "-m", "edgemoe", "run", *words, *places, *SMALL]


@pytest.fixture
def stores() -> Iterator[Path]:
    """An empty folder beside the kernels that tests have compiled."""
    with tempfile.TemporaryDirectory(prefix="run-", dir=KERNELS.parent) as folder:
        yield Path(folder)


def test_a_model_of_the_hub_is_fetched_served_and_answers_and_nothing_goes_on(
    hub: LocalHub, tmp_path: Path, stores: Path
) -> None:
    asked = ("someone/Tiny-MoE", "--max-tokens", "8", "--temperature", "0")
    first = run(tmp_path, hub, *asked, "Tell me a story.", stores=stores)
    assert first.returncode == 0, first.stderr
    assert "someone/Tiny-MoE is fetched from the hub" in first.stderr
    assert not (tmp_path / "s").exists(), "the daemon has gone"
    fetched = len(hub.asked)
    again = run(tmp_path, hub, *asked, said="Tell me a story.\n", stores=stores)
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout != "\n", "by line and by message, the same answer"
    assert len(hub.asked) == fetched, "a store that is here is not fetched again"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_daemon_ends_with_the_command_however_that_ends(tmp_path: Path, stores: Path, number: int) -> None:
    with subprocess.Popen(command_of(tmp_path, stores, "demo"), stdin=subprocess.PIPE) as process:
        client = Client(tmp_path / "s")
        try:
            wait_until(client.is_listening)
            process.send_signal(number)
            wait_until(lambda: not client.is_listening())
        finally:
            process.kill()


def test_a_daemon_that_cannot_serve_says_why(hub: LocalHub, tmp_path: Path) -> None:
    done = run(tmp_path, hub, "demo", "hello", "--set", "device.0.kind=cuda:7")
    assert done.returncode != 0
    assert "cuda:7" in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [("./nowhere", "is not there"), ("nothing", "no store of the name"), ("qwen3", "qwen3:30b"), ("a/b", "a/b")],
)
def test_a_name_that_is_nothing_is_refused_before_anything_starts(
    hub: LocalHub, tmp_path: Path, name: str, why: str
) -> None:
    done = run(tmp_path, hub, name)
    assert done.returncode == 1
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.log"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("run")
    async with running(settings_for(folder, write_model(folder / "model"))) as front:
        yield front


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["tiny", "someone/Tiny"])
async def test_a_running_daemon_with_the_model_is_used_and_goes_on(front: Front, name: str) -> None:
    status, printed, complained = await _run_at(front, name)
    assert status == 0, complained
    assert printed.strip()
    assert (await _run_at(front, name))[0] == 0, "it goes on"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_daemon_with_another_model_is_named(front: Front) -> None:
    status, _, complained = await _run_at(front, "mixtral:8x7b")
    assert status == 1
    assert "serves tiny" in complained


async def _run_at(front: Front, name: str) -> tuple[int, str, str]:
    words = ("run", name, "hello", "--max-tokens", "4", "--socket", front.settings.api.socket)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "edgemoe", *words, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(LIMIT_S):
        printed, complained = await process.communicate()
    return process.returncode or 0, printed.decode(), complained.decode()


@pytest.mark.parametrize("short", HUB_NAMES)
def test_short_names_are_found_however_they_are_written(short: str, tmp_path: Path) -> None:
    full = HUB_NAMES[short]
    assert HUB_NAME.fullmatch(full)
    assert {hub_name(each) for each in (short, short.upper(), short.replace(":", "-"), full)} == {full}
    store = tmp_path / f"{Path(full).name}-v2-0123456789ab"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    assert resolve(short, tmp_path) == resolve(full, tmp_path) == store


def test_a_part_of_a_short_name_is_no_name(tmp_path: Path) -> None:
    assert hub_name("qwen3") == "qwen3"
    with pytest.raises(StoreError, match="short names are mixtral:8x22b, mixtral:8x7b"):
        resolve("mixtral", tmp_path)


def test_the_page_of_models_lists_the_short_names() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("## Short names")[2]
    assert dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", rows, re.MULTILINE)) == HUB_NAMES
