"""The README followed on a fresh machine: packages freshly installed, as root and as an ordinary user."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.readme import CURL, PYTHON, TALK
from support.waiting import wait_until

from edgemoe.jit.compile_target import AMX, WITH_AMX, host, kind_of

ROOT = Path(__file__).parents[2]
USER = "edgemoe-reader"
INSTALL_S, READY_S = 900, 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # two installations
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("useradd"), reason="makes a user, which takes root"),
]


@pytest.fixture(scope="module")
def machine() -> Iterator[Path]:
    """A folder that all may read, with the packages of `pip install edgemoe` and `pip install openai`."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-reader-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        kind = kind_of(host())
        name = kind.name + WITH_AMX if kind.has(*AMX) else kind.name
        shell(f"env EDGEMOE_KINDS={name} {sys.executable} -m hatchling build -t wheel -d {folder}", cwd=ROOT)
        for venv, package in (("edgemoe", f"{next(folder.glob('*.whl'))}"), ("openai", "openai")):
            shell(f"{everybodys_python()} -m venv {folder / venv}")
            shell(f"{folder / venv}/bin/pip install --quiet -c {ROOT / 'constraints.txt'} {package}")
        yield folder


@pytest.fixture(params=["root", "user"])
def prefix(request: pytest.FixtureRequest, machine: Path) -> Iterator[list[str]]:
    """The words that run a command as a user with a home and, as after `su`, without XDG_RUNTIME_DIR."""
    home = machine / f"home-{request.param}"
    home.mkdir(mode=0o755)
    path = f"{machine}/edgemoe/bin:/usr/local/bin:/usr/bin:/bin"
    words = ["env", "-i", f"HOME={home}", f"PATH={path}", "LANG=C.UTF-8"]
    if request.param == "root":
        yield words
        return
    shell(f"useradd --no-create-home --home-dir {home} {USER}")
    try:
        shutil.chown(home, USER, USER)
        yield ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *words]
    finally:
        wait_until(lambda: not processes_of(USER))
        shell(f"userdel {USER}")


def processes_of(user: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["username"]) if each.info["username"] == user]


def compiled_here(prefix: list[str]) -> str:
    """Returns the object files that engines of this user compiled."""
    script = "find $HOME -name '*.o' -path '*kernels*'"
    return subprocess.run([*prefix, "bash", "-ec", script], capture_output=True, text=True, check=True).stdout


def everybodys_python() -> Path:
    """Finds a Python that an ordinary user can run too: not one in root's home."""
    known = (Path(sys.executable).resolve(), Path("/usr/bin/python3"), Path("/usr/local/bin/python3"))
    for python in known:
        if python.is_file() and all(folder.stat().st_mode & stat.S_IXOTH for folder in python.resolve().parents):
            return python
    pytest.skip("there is no Python that an ordinary user can run")


def shell(command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command.split(), cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_can_be_followed_by_root_and_by_a_user(machine: Path, prefix: list[str]) -> None:
    def run(script: str) -> subprocess.CompletedProcess[str]:
        command = [*prefix, "bash", "-ec", script]
        return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)

    log = machine / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen([*prefix, "edgemoe", "serve"], cwd="/", stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + READY_S
        while run("edgemoe status").returncode:
            assert daemon.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.5)
        client = f"PATH={machine}/openai/bin:$PATH"
        done = run("\n".join([TALK, CURL, client, "echo; cat <<'EOF' | python3", f"{PYTHON}EOF"]))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Paris") >= 3, done.stdout
        assert not compiled_here(prefix), "the wheel lacks code for this processor"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(60) == 0, log.read_text()
    finally:
        daemon.kill()
        daemon.wait()
