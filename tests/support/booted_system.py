"""A Debian system with systemd as its first process, in namespaces of this machine; its files end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.kept import STORES
from support.waiting import wait_until

KEPT = STORES.with_name("booted") / "root"  # files of the system as it is made, kept between runs
PACKAGES = "systemd,systemd-sysv,dbus,systemd-container,curl,ca-certificates"
SUITE, MAKE_S, BOOT_S, RUN_S = "bookworm", 1200.0, 120.0, 300.0
START = """\
mount -t overlay overlay -o lowerdir="$1",upperdir="$2/upper",workdir="$2/work" "$2/root"
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
libraries="$1/usr/lib/x86_64-linux-gnu"
shift 2
LD_LIBRARY_PATH="$libraries/systemd:$libraries" exec "$@"
"""


def missing() -> str:
    """Returns the reason why no system can be booted here; "" where one can."""
    if os.geteuid() != 0:
        return "only root boots a system"
    tools = [tool for tool in ("debootstrap", "unshare", "nsenter") if shutil.which(tool) is None]
    return f"{', '.join(tools)} is not installed" if tools else ""


def made() -> Path:
    """Returns the files of the system, which are fetched from Debian once."""
    if not (KEPT / "usr/bin/systemd-nspawn").is_file():
        shutil.rmtree(KEPT, ignore_errors=True)
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(KEPT)]
        subprocess.run(command, check=True, capture_output=True, timeout=MAKE_S)
    return KEPT


@dataclass
class BootedSystem:
    """A running system. `root` are its files as this machine sees them, `pid` its first process."""

    root: Path
    process: subprocess.Popen[bytes]
    pid: int

    def run(self, *words: str | Path, check: bool = True) -> str:
        """Runs a command in the system as root. Returns its output; fails with it where the command does."""
        inside = ["nsenter", "--target", str(self.pid), "--all", "env", "-i", "PATH=/usr/sbin:/usr/bin", "HOME=/root"]
        done = subprocess.run(
            [*inside, *map(str, words)], capture_output=True, text=True, timeout=RUN_S, check=False, cwd="/"
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Starts a command in the system."""
        inside = ["nsenter", "--target", str(self.pid), "--all", *map(str, words)]
        return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")


@contextmanager
def booted(folder: Path, binds: Sequence[str]) -> Iterator[BootedSystem]:
    """Boots a system whose files are in `folder`, with `binds` (PATH or FROM:TO) of this machine to read."""
    kept = made()
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
    nspawn = [str(kept / "usr/bin/systemd-nspawn"), "--boot", f"--directory={folder / 'root'}", "--quiet"]
    nspawn += ["--register=no", "--keep-unit", *(f"--bind-ro={bind}" for bind in binds)]
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", START, "sh", str(kept), str(folder), *nspawn],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    try:
        pid = wait_until(lambda: _first_process(process), BOOT_S)
        system = BootedSystem(Path(f"/proc/{pid}/root"), process, pid)
        wait_until(lambda: "running" in system.run("systemctl", "is-system-running", "--wait", check=False), BOOT_S)
        yield system
        system.run("systemctl", "poweroff")
        process.wait(BOOT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # the kernel ends its namespace with it
            process.wait()


def _first_process(process: subprocess.Popen[bytes]) -> int:
    """Returns the process id of the system's systemd; 0 while there is none."""
    assert process.poll() is None, "the system did not boot; see its console"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for child in children.read_text().split():
        if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
            return int(child)
    return 0
