"""The source archive, the wheel made of it, and the first steps after its installation."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kept import KERNELS
from support.old_store import make_version_1
from support.readme import CURL, TALK
from support.waiting import wait_until

import edgemoe
from edgemoe.cli.client import Client
from edgemoe.demo import model_path
from edgemoe.store.packer import pack
from tools.build_hook import locked_libraries

ROOT = Path(__file__).parents[2]
STORE = "demo-v1"
SMALL = ("device.0.kind=emulated", "device.0.expert_bytes=4MiB", "device.0.link_bytes_per_s=1GB/s")
SMALL += ("memory.ram_bytes=8MiB", "memory.kv_bytes=16MiB", "memory.headroom_bytes=0", "engine.threads=1")


def run(*words: str | Path, **options: object) -> str:
    settings = {"capture_output": True, "text": True, "timeout": 120, "check": False} | options
    done = subprocess.run([str(word) for word in words], **settings)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def files_of(folder: str) -> dict[str, bytes]:
    """Returns all files in a folder of the root, without compiled Python."""
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, as a folder."""
    folder = tmp_path_factory.mktemp("archive")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # of 3.11.4
    return folder / f"edgemoe-{edgemoe.__version__}"


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """Made of the archive alone, without compiled kernels."""
    env = os.environ | {"EDGEMOE_KINDS": ""}
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", archive.parent, cwd=archive, env=env)
    return next(archive.parent.glob("*.whl"))


@pytest.fixture(scope="module")
def env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has installed the wheel alone; requirements come from the tests' environment."""
    home = tmp_path_factory.mktemp("home")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv")
    python = home / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-compile", wheel)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "PYTHON"))}
    env |= {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PATH": f"{python.parent}:{env['PATH']}"}
    assert Path(run(python, "-c", "import edgemoe; print(edgemoe.__file__)", cwd=home, env=env)).is_relative_to(home)
    KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
    stores = home / ".cache/edgemoe/stores"
    stores.mkdir(parents=True)
    stores.with_name("kernels").symlink_to(KERNELS)
    pack(model_path(), stores / STORE)
    make_version_1(stores / STORE)
    return env


@pytest.fixture(scope="module")
def home(env: dict[str, str]) -> Iterator[Path]:
    """The user's, while the daemon serves the old store; it must end cleanly."""
    home = Path(env["HOME"])
    sets = (word for setting in SMALL for word in ("--set", setting))
    with (home / "log").open("wb") as log:
        command = ["edgemoe", "serve", "--model", STORE, *sets]
        process = subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log)
    try:
        with Client(home / "edgemoe.sock") as client:
            wait_until(lambda: client.is_ready() or process.poll() is not None)
        assert process.poll() is None, (home / "log").read_text()
        yield home
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (home / "log").read_text()
    finally:
        process.kill()
        process.wait()


def test_the_archive_makes_a_wheel_of_all_that_the_package_is_and_of_nothing_else(archive: Path, wheel: Path) -> None:
    expected = files_of("edgemoe") | files_of("scoutgate")
    expected |= {f"edgemoe/{name}": data for name, data in files_of("systemd").items()}
    with zipfile.ZipFile(wheel) as packed:
        found = {name: packed.read(name) for name in packed.namelist() if ".dist-info/" not in name}
    assert found == expected
    beside = {path.name for path in archive.iterdir()}
    assert beside <= {path.name for path in ROOT.iterdir()} | {"PKG-INFO"}
    assert not beside & {"tests", "shared", ".venv", ".cache"}
    assert [path.name for path in (archive / "tools").glob("*.*")] == ["build_hook.py"]
    assert {"docs", "CHANGELOG.md", "README.md", "LICENSE", "requirements.lock"} <= beside


def test_the_wheel_lists_the_libraries_of_the_lock(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if ".dist-info/sboms/" in name)
        listed = json.loads(packed.read(name))
    assert listed["metadata"]["component"]["version"] == edgemoe.__version__
    locked = locked_libraries((ROOT / "requirements.lock").read_text())
    assert [each["purl"] for each in listed["components"]] == [each.url for each in locked]
    assert len(locked) > 30


@pytest.mark.usefixtures("home")
def test_the_readmes_commands_run_from_the_wheel_on_a_store_of_the_release_before(env: dict[str, str]) -> None:
    def shell(script: str) -> str:
        return run("bash", "-ec", script, cwd=env["HOME"], env=env)

    assert "edgemoe serve --model" in shell("edgemoe")
    assert STORE in shell("edgemoe models")
    assert shell(f"{TALK}\n{CURL}").count("Paris") >= 2
    found = {row["check"]: row["state"] for row in json.loads(shell("edgemoe doctor --json || true"))}
    assert {found[check] for check in ("versions", "settings", "store", "daemon")} == {"pass"}
    assert "systemd" in shell("python -c 'import edgemoe.cli.service_command as units; print(units.templates())'")
    assert '"version": 1' in (Path(env["HOME"]) / ".cache/edgemoe/stores" / STORE / "manifest.json").read_text()


def test_the_changelog_begins_with_this_release() -> None:
    released = re.findall(r"(?m)^## \[(\d[\d.]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text())
    assert released[0] == edgemoe.__version__
    assert shutil.which("edgemoe", path=str(Path(sys.executable).parent))
    assert run(Path(sys.executable).with_name("edgemoe"), "--version").strip() == f"edgemoe {edgemoe.__version__}"
