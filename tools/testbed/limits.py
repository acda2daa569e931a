"""Limits of a box on CPU, memory and disk: control groups, version 1."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "blkio")
PERIOD_US = 10_000  # short, so that a box that has used up its share waits for milliseconds only


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one box; 0 is no limit. `disk_bytes_per_s` limits reads of the disk under `disk_of`."""

    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes_per_s: int = 0
    disk_of: Path = Path("/")

    def why_not(self) -> str:
        """Returns the reason why these limits cannot be set here; "" if they can."""
        for controller, wanted in zip(CONTROLLERS, (self.cpus, self.memory_bytes, self.disk_bytes_per_s), strict=True):
            if wanted and not os.access(ROOT / controller / "cgroup.procs", os.W_OK):
                return f"{ROOT / controller} is no writable control group of version 1"
        return ""


NO_LIMITS = Limits()


class Group:
    """One box's control groups, of the same name in every controller."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self, limits: Limits) -> None:
        """Makes the control groups and sets their limits. Raises OSError."""
        for folder in self._folders():
            folder.mkdir(exist_ok=True)
        if limits.cpus:
            (ROOT / "cpu" / self.name / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (ROOT / "cpu" / self.name / "cpu.cfs_quota_us").write_text(str(int(limits.cpus * PERIOD_US)))
        if limits.memory_bytes:
            (ROOT / "memory" / self.name / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))
        if limits.disk_bytes_per_s:
            self.limit_disk(limits.disk_bytes_per_s, limits.disk_of)

    def limit_disk(self, bytes_per_s: int, path: Path) -> None:
        """Limits reads of the disk under `path`; 0 lifts the limit. Raises OSError."""
        (ROOT / "blkio" / self.name / "blkio.throttle.read_bps_device").write_text(f"{disk_of(path)} {bytes_per_s}")

    def squeeze_memory(self, spare_bytes: int) -> None:
        """Limits memory to that in use without files, and `spare_bytes`; -1 lifts the limit. Raises OSError.

        Pages of files, programs among them, then go and come from the disk all the time, as in a box that swaps.
        """
        folder = ROOT / "memory" / self.name
        most = -1
        if spare_bytes >= 0:
            stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
            most = int(stat["total_rss"]) + int(stat["total_shmem"]) + spare_bytes
        (folder / "memory.limit_in_bytes").write_text(str(most))

    def enter(self, command: list[str]) -> list[str]:
        """Wraps `command` so that it runs in the groups from its first instruction on."""
        enters = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in self._folders())
        return ["sh", "-c", f'{enters} && exec "$@"' if enters else 'exec "$@"', "sh", *command]

    def throttled(self) -> dict[str, float]:
        """Returns the periods in which the box ran, the periods in which it was throttled, and the throttled
        seconds.
        """
        text = (ROOT / "cpu" / self.name / "cpu.stat").read_text()
        counts = {name: int(value) for name, value in map(str.split, text.splitlines())}
        return {
            "nr_periods": counts["nr_periods"],
            "nr_throttled": counts["nr_throttled"],
            "throttled_s": counts["throttled_time"] / 1e9,
        }

    def remove(self) -> None:
        """Removes the groups, and kills processes that are still in them. Raises OSError."""
        for folder in self._folders():
            for tries in range(500, -1, -1):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if not tries:
                        raise
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                    time.sleep(0.02)
                else:
                    break

    def _folders(self) -> Iterator[Path]:
        for controller in CONTROLLERS:
            if os.access(ROOT / controller / "cgroup.procs", os.W_OK):
                yield ROOT / controller / self.name


def groups(prefix: str) -> set[str]:
    """Returns the names of control groups with this prefix."""
    found = (path.name for controller in CONTROLLERS for path in (ROOT / controller).glob(f"{prefix}*"))
    return set(found)


def disk_of(path: Path) -> str:
    """Returns "major:minor" of the whole disk under `path`."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (block / "partition").exists():
        block = block.resolve().parent
    return (block / "dev").read_text().strip()
