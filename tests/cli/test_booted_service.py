"""The service under a booted systemd: installed, used by a group, restarted, reloaded, watched, upgraded and removed.

It begins with release 0.1.0 where this clone has its commit and the registry its library. The present release follows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.booted_system import BootedSystem, booted, missing
from support.kept import KERNELS
from support.waiting import wait_until

import edgemoe

ROOT = Path(__file__).parents[2]
RELEASED = "964771582d8da29c32225e94c2790ee5fe7dc467"  # 0.1.0
RELEASED_LIBRARY = "pysyncobj==0.3.17"  # of 0.1.0; later releases do without
HOME = "/opt/edgemoe"  # of the installation in the system
SOCKET = "/run/edgemoe/edgemoe.sock"
SETTINGS = """\
[memory]
ram_bytes = "8MiB"
kv_bytes = "16MiB"
[engine]
threads = 1
max_sequences = 4
"""
DONE = "data: [DONE]"  # the end of a whole answer
READY_S = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


def make_wheel(sources: Path, folder: Path) -> Path:
    """Makes a wheel without compiled kernels."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=300,
        cwd=sources,
        env={"EDGEMOE_KINDS": "", "PATH": "/usr/bin"},
    )
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def released(folder: Path) -> Path | None:
    """Returns the sources of release 0.1.0, with its library in `libraries`; None where one is missing."""
    target = str(folder / "libraries")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, RELEASED_LIBRARY]
    archive = subprocess.run(["git", "archive", RELEASED], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if archive.returncode:
        return None
    folder.mkdir()
    if subprocess.run(pip, capture_output=True, timeout=300, check=False).returncode:
        return None
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=60)
    return folder


class Service:
    """The service in the system."""

    def __init__(self, system: BootedSystem) -> None:
        self.system = system

    def install(self, wheel: Path, libraries: Path | None = None) -> None:
        """Installs a wheel in place of another, with this machine's libraries and others, and the service of it."""
        run, root = self.system.run, self.system.root
        shutil.copy(wheel, root / "opt" / wheel.name)
        if not (root / "opt/edgemoe/bin/python").is_symlink():
            run(Path(sys.executable).resolve(), "-m", "venv", "--without-pip", HOME)
            packages = next((root / "opt/edgemoe/lib").glob("python*/site-packages"))
            (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
            if libraries is not None:
                shutil.copytree(libraries, packages, dirs_exist_ok=True)
        pip = [f"{HOME}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
        run(*pip, "--prefix", HOME, "--root-user-action=ignore", f"/opt/{wheel.name}")
        run(f"{HOME}/bin/edgemoe", "service", "install", "--no-start")
        kernels = root / "var/lib/edgemoe/kernels"
        if KERNELS.is_dir() and not any(kernels.iterdir()):
            shutil.copytree(KERNELS, kernels, dirs_exist_ok=True)
            run("chown", "-R", "edgemoe:edgemoe", "/var/lib/edgemoe/kernels")
            run("chmod", "0700", "/var/lib/edgemoe/kernels")
        run("systemctl", "restart", "--no-block", "edgemoe.socket", "edgemoe.service")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Waits until the model is served; fails with the journal where the service does."""

        def is_ready() -> bool:
            state = self.show("ActiveState")
            assert state != "failed", self.journal()
            return state == "active" and self.health().get("status") == "ready"

        wait_until(is_ready, READY_S)

    def health(self) -> dict[str, object]:
        """Returns the body of /health; nothing while none comes."""
        said = self.system.run(
            "curl", "-s", "--max-time", "20", "--unix-socket", SOCKET, "http://x/health", check=False
        )
        return dict(json.loads(said)) if said.startswith("{") else {}

    def ask(self, *options: str, tokens: int = 8) -> list[str]:
        """Returns the command of a streamed completion."""
        body = json.dumps(
            {"prompt": "The capital of France is", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        )
        return ["curl", "-sS", "-N", *options, "--unix-socket", SOCKET, "http://x/v1/completions", "-d", body]

    def show(self, name: str) -> str:
        """Returns a property of the unit."""
        return self.system.run("systemctl", "show", "--value", "-p", name, "edgemoe.service").strip()

    def journal(self) -> str:
        """Returns the last lines of the service's log."""
        return self.system.run("journalctl", "-u", "edgemoe", "-n", "60", "--no-pager", check=False)

    def override(self, text: str) -> None:
        """Sets further lines of the unit, and restarts it."""
        folder = self.system.root / "etc/systemd/system/edgemoe.service.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)
        self.system.run("systemctl", "daemon-reload")
        self.system.run("systemctl", "restart", "edgemoe")
        self.wait_until_ready()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(ROOT, tmp_path_factory.mktemp("present"))


@pytest.fixture(scope="module")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The present release, after 0.1.0 where that is at hand."""
    folder = tmp_path_factory.mktemp("booted")
    libraries = sysconfig.get_path("purelib")
    python = Path(sys.executable).resolve().parents[1]
    with booted(folder / "system", [str(python), libraries]) as system:
        service = Service(system)
        (system.root / "etc/edgemoe").mkdir()
        (system.root / "etc/edgemoe/edgemoe.toml").write_text(SETTINGS)
        if (sources := released(folder / "released")) is not None:
            service.install(make_wheel(sources, tmp_path_factory.mktemp("old")), sources / "libraries")
            assert DONE in system.run(*service.ask())
        service.install(wheel)
        yield service


def test_the_present_release_serves_after_the_one_before(service: Service) -> None:
    assert edgemoe.__version__ in service.system.run(f"{HOME}/bin/edgemoe", "--version")
    assert DONE in service.system.run(*service.ask())
    assert service.system.run("systemctl", "is-enabled", "edgemoe.service", "edgemoe.socket").split() == ["enabled"] * 2
    assert (service.system.root / "etc/edgemoe/edgemoe.toml").read_text() == SETTINGS


def test_members_of_its_group_may_use_the_socket_and_others_not(service: Service) -> None:
    run = service.system.run
    run("useradd", "alice")
    run("usermod", "--append", "--groups", "edgemoe", "alice")
    run("useradd", "bob")
    assert DONE in run("runuser", "-u", "alice", "--", *service.ask())
    assert DONE not in run("runuser", "-u", "bob", "--", *service.ask(), check=False)


def test_a_reload_with_nothing_to_load_is_no_failure(service: Service) -> None:
    before = service.show("MainPID")
    service.system.run("systemctl", "reload", "edgemoe")
    assert service.show("MainPID") == before
    assert service.show("Result") == "success"


def test_a_reload_serves_a_model_that_was_added(service: Service) -> None:
    before = service.show("MainPID")
    file = service.system.root / "etc/edgemoe/edgemoe.toml"
    store = next(path for path in (service.system.root / "var/lib/edgemoe/stores").iterdir() if path.is_dir())
    file.write_text(f'{SETTINGS}[models.second]\npath = "/var/lib/edgemoe/stores/{store.name}"\n')
    service.system.run("systemctl", "reload", "edgemoe")
    body = json.dumps({"model": "second", "prompt": "The capital of France is", "max_tokens": 8, "ignore_eos": True})
    asked = ("curl", "-sS", "--unix-socket", SOCKET, "http://x/v1/completions", "-d", body)
    answer = json.loads(service.system.run(*asked))
    assert answer.get("model") == "second", answer
    assert answer["usage"]["completion_tokens"] == 8
    assert service.show("MainPID") == before
    file.write_text(SETTINGS)
    service.system.run("systemctl", "reload", "edgemoe")


def test_a_restart_lets_a_stream_finish_and_serves_again(service: Service) -> None:
    before = service.show("MainPID")
    stream = service.system.start(*service.ask(tokens=60))
    assert stream.stdout is not None
    first = stream.stdout.readline()
    service.system.run("systemctl", "restart", "edgemoe")
    whole = first + stream.communicate(timeout=READY_S)[0]
    assert '"finish_reason":"length"' in whole, whole[-300:]
    assert DONE in whole
    service.wait_until_ready()
    assert service.show("MainPID") != before
    assert DONE in service.system.run(*service.ask())


def test_the_watchdog_replaces_a_front_that_stands_still(service: Service) -> None:
    service.override("[Service]\nWatchdogSec=5\n")
    before = service.show("MainPID")
    service.system.run("sh", "-c", f"kill -STOP {before}")
    wait_until(lambda: service.show("MainPID") not in (before, "0"), READY_S)
    service.wait_until_ready()
    assert "watchdog" in service.journal().lower()
    assert DONE in service.system.run(*service.ask())


def test_the_kernel_would_end_the_engine_before_its_front_which_replaces_it(service: Service) -> None:
    """The kernel chooses the engine, which its front replaces."""
    service.override("[Service]\nMemoryMax=infinity\n")
    front = service.show("MainPID")
    health = service.health()
    assert isinstance(health["engine"], dict)
    engine = health["engine"]["pid"]
    score = service.system.run("cat", f"/proc/{engine}/oom_score_adj").strip()
    assert int(score) > int(service.system.run("cat", f"/proc/{front}/oom_score_adj").strip())
    service.system.run("sh", "-c", f"kill -KILL {engine}")
    service.wait_until_ready()
    assert DONE in service.system.run(*service.ask())
    assert service.show("MainPID") == front
    assert service.show("OOMPolicy") == "continue"


def test_the_units_log_says_once_why_no_engine_starts(service: Service) -> None:
    """Torch needs more addresses than the limit allows, and the front fewer."""
    file = service.system.root / "etc/systemd/system/edgemoe.service.d/test.conf"
    file.write_text("[Service]\nLimitAS=600M\n")
    service.system.run("systemctl", "daemon-reload")
    service.system.run("systemctl", "restart", "--no-block", "edgemoe")
    wait_until(lambda: service.health().get("status") == "failed", READY_S)
    reason = str(service.health()["cannot_start"]["reason"])  # type: ignore[index]
    assert "3 times" in reason
    assert "MemoryError" in reason
    assert "memory.ram_bytes" in reason
    front = service.show("MainPID")
    assert service.journal().count("the engine cannot start") == 1
    assert json.loads(service.system.run(*service.ask()))["error"]["message"] == reason
    status = json.loads(service.system.run(f"{HOME}/bin/edgemoe", "status", "--json", check=False))
    assert status["health"]["cannot_start"]["reason"] == reason
    assert service.show("MainPID") == front
    assert service.show("NRestarts") == "0"
    file.unlink()
    service.system.run("systemctl", "daemon-reload")
    service.system.run("systemctl", "restart", "edgemoe")
    service.wait_until_ready()
    assert DONE in service.system.run(*service.ask())


def test_an_uninstalled_service_leaves_settings_and_models_only(service: Service) -> None:
    service.system.run(f"{HOME}/bin/edgemoe", "service", "uninstall")
    root = service.system.root
    assert not list((root / "etc/systemd/system").glob("edgemoe*.*t*"))
    assert not (root / "run/edgemoe/edgemoe.sock").exists()
    assert (root / "etc/edgemoe/edgemoe.toml").read_text() == SETTINGS
    assert any((root / "var/lib/edgemoe/stores").iterdir())
    assert "could not be found" in service.system.run("systemctl", "status", "edgemoe", check=False)
