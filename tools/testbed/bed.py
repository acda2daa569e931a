"""Boxes on one machine: network namespaces on a bridge, with shaped links, limits and faults.

A token bucket on both ends of each veth limits a box's rate in either direction. All names carry a prefix and the
maker's process id, so that `leftovers` can remove a crashed bed, and another process can find this one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.testbed.limits import NO_LIMITS, Group, Limits, groups

PREFIX = "edgemoe-bed-"
HUB = "hub"
RATE_MBIT = 500.0
BURST_KIB = 128  # TCP sends 68 KiB at once; a burst beyond the bucket is cut into single packets, for half a core
QUEUE_MS = 50  # a packet waits so long at most in the bucket before it is dropped
NOWHERE = "02:00:00:00:de:ad"  # a link-layer address that no box has
NAMESPACES = Path("/run/netns")
_numbers = itertools.count()


class BedError(Exception):
    """A part of the test bed is not available on this machine."""


def why_not(limits: Limits = NO_LIMITS) -> str:
    """Returns the reason why no test bed can be built here; "" if one can."""
    if os.geteuid() != 0:
        return "a test bed needs root: it makes network namespaces"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"a test bed needs {tool} (Debian: iproute2, util-linux)"
    probe = f"{PREFIX}{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    shaped = subprocess.run(
        [*f"tc -n {probe} qdisc add dev lo root tbf rate 1mbit burst 32kb latency 50ms".split()],
        capture_output=True,
        text=True,
    )
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"tc has no token bucket here: {shaped.stderr.strip()}" if shaped.returncode else limits.why_not()


@dataclass(frozen=True, slots=True)
class Box:
    """One box: a namespace, an address, control groups."""

    name: str
    address: str
    namespace: str
    hub: str
    group: Group

    def spawn(self, command: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Starts `command` in the box."""
        inside = ["nsenter", f"--net={NAMESPACES / self.namespace}", *command]
        return subprocess.Popen(self.group.enter(inside), **kwargs)

    def pids(self) -> list[int]:
        """Returns the ids of the processes in the box."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def signal(self, number: int, pids: Sequence[int] = ()) -> None:
        """Sends a signal to these processes, or to all in the box."""
        for pid in pids or self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills all processes of the box with SIGKILL, and waits until all have ended."""
        for _ in range(500):
            if not (pids := self.pids()):
                return
            self.signal(signal.SIGKILL, pids)
            time.sleep(0.01)
        raise BedError(f"{self.name}: processes that do not die: {self.pids()}")

    def pause(self) -> None:
        """Sends SIGSTOP to all processes of the box."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def link(self, *, up: bool) -> None:
        """Disconnects the box's cable, or connects it again."""
        _run("ip", "-n", self.hub, "link", "set", f"to-{self.name}", "up" if up else "down")

    def cut(self, other: Box) -> None:
        """Drops all packets from this box to `other`; the other direction is untouched."""
        where = ("dev", "e0", "nud", "permanent")
        _run("ip", "-n", self.namespace, "neigh", "replace", other.address, "lladdr", NOWHERE, *where)

    def mend(self, other: Box) -> None:
        """Undoes the effect of `cut`."""
        with contextlib.suppress(BedError):
            _run("ip", "-n", self.namespace, "neigh", "del", other.address, "dev", "e0")

    def rate(self, mbit: float = RATE_MBIT) -> None:
        """Sets the link's rate, in both directions."""
        bucket = f"root tbf rate {mbit}mbit burst {BURST_KIB}kb latency {QUEUE_MS}ms".split()
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "e0", *bucket)
        _run("tc", "-n", self.hub, "qdisc", "replace", "dev", f"to-{self.name}", *bucket)

    def sent_bytes(self) -> int:
        """Returns the bytes that have left this box, by its link's counter."""
        return self._passed_bytes("tx")

    def received_bytes(self) -> int:
        """Returns the bytes that have reached this box, by its link's counter."""
        return self._passed_bytes("rx")

    def _passed_bytes(self, way: str) -> int:
        shown = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "e0"))
        return int(shown[0]["stats64"][way]["bytes"])


class Bed:
    """A test bed. `with Bed(["a", "b"]) as bed:` builds it and takes it down."""

    def __init__(self, names: Sequence[str], rate_mbit: float = RATE_MBIT, limits: Limits = NO_LIMITS) -> None:
        """Names at most 200 boxes, in at most 10 letters each. Raises BedError if no bed can be built here."""
        if reason := why_not(limits):
            raise BedError(reason)
        self.prefix = f"{PREFIX}{os.getpid()}.{next(_numbers)}-"
        self.rate_mbit, self.limits = rate_mbit, limits
        self.boxes = _boxes(self.prefix, names)

    @classmethod
    def found(cls, prefix: str) -> Bed:
        """Finds the test bed that another process built."""
        bed = cls.__new__(cls)
        bed.prefix, bed.rate_mbit, bed.limits = prefix, RATE_MBIT, Limits()
        bed.boxes = {}
        for path in sorted(NAMESPACES.glob(f"{prefix}*")):
            if (name := path.name.removeprefix(prefix)) != HUB:
                address = _run("ip", "-n", path.name, "-o", "-4", "addr", "show", "dev", "e0").split()
                bed.boxes[name] = _box(prefix, name, address[3].partition("/")[0])
        if not bed.boxes:
            raise BedError(f"there is no test bed {prefix}")
        return bed

    def __enter__(self) -> Bed:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave)  # so that the bed is taken down then, too
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Box:
        return self.boxes[name]

    def mend(self) -> None:
        """Restores all links, in both directions, and resumes all boxes."""
        for box in self.boxes.values():
            box.resume()
            box.link(up=True)
            box.rate(self.rate_mbit)
            for other in self.boxes.values():
                box.mend(other)

    def close(self) -> None:
        """Kills the boxes' processes and removes everything."""
        sweep(self.prefix)

    def _build(self) -> None:
        hub = self.prefix + HUB
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for box in self.boxes.values():
            _run("ip", "netns", "add", box.namespace)
            ends = f"to-{box.name} type veth peer name e0 netns {box.namespace}".split()
            _run("ip", "-n", hub, "link", "add", *ends)
            _run("ip", "-n", hub, "link", "set", f"to-{box.name}", "master", "bridge", "up")
            _run("ip", "-n", box.namespace, "addr", "add", f"{box.address}/24", "dev", "e0")
            for interface in ("e0", "lo"):
                _run("ip", "-n", box.namespace, "link", "set", interface, "up")
            box.rate(self.rate_mbit)
            box.group.make(self.limits)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def leftovers() -> set[str]:
    """Returns the prefixes of test beds whose maker is gone."""
    made = {path.name for path in NAMESPACES.glob(f"{PREFIX}*")} | groups(PREFIX)
    prefixes = {PREFIX + name.removeprefix(PREFIX).partition("-")[0] for name in made}
    return {f"{prefix}-" for prefix in prefixes if not Path("/proc", _maker(prefix)).exists()}


def sweep(prefix: str) -> None:
    """Removes a test bed by its prefix: processes, namespaces with their links, control groups."""
    names = {path.name for path in NAMESPACES.glob(f"{prefix}*")} | groups(prefix)
    for name in names:
        box = _box(prefix, name.removeprefix(prefix), "")
        if (NAMESPACES / name).exists():
            box.kill()
            _run("ip", "netns", "del", name)
        box.group.remove()


def _maker(prefix: str) -> str:
    """Returns the process id in a prefix."""
    return prefix.removeprefix(PREFIX).partition(".")[0]


def _boxes(prefix: str, names: Sequence[str]) -> dict[str, Box]:
    return {name: _box(prefix, name, f"10.77.0.{n}") for n, name in enumerate(names, 1)}


def _box(prefix: str, name: str, address: str) -> Box:
    return Box(name, address, prefix + name, prefix + HUB, Group(prefix + name))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
