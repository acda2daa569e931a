"""Finds the memory, cores and GPUs that this process may use. No other module asks psutil or NVML.

Limits of a container or a service (cgroup v1 and v2, CPU affinity and quota) count as well as the hardware.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from edgemoe.types.bounds import is_number
from edgemoe.types.machine import Gpu, Machine, PcieLink

_FASTEST_STATES = 2  # of 16; in the slower ones a GPU has little or nothing to do
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


def probe_machine(root: Path = Path("/"), visible_devices: str | None = None) -> Machine:
    """Returns the memory, processors and GPUs that this process may use.

    `visible_devices` is the value of CUDA_VISIBLE_DEVICES, if set.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _memory_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        ram_total_bytes=total,
        ram_available_bytes=available,
        cpus=_usable_cpus(root),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        gpus=tuple(_gpus(visible_devices)),
    )


def _usable_cpus(root: Path) -> int:
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            cpus = min(cpus, max(1, int(quota)))
    return cpus


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups for `controller`, from its own up to the mount."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = base
        elif controller in controllers.split(","):
            mount = base / controller
        else:
            continue
        own = mount / path.lstrip("/")
        if not own.is_dir():  # inside a container the path is the host's
            own = mount
        yield own
        yield from (parent for parent in own.parents if parent.is_relative_to(mount))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, used) in bytes of each control group with a limit. Droppable page cache does not count as used."""
    for folder in _cgroups(root, "memory"):
        for limit_name, used_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, max(0, used - _stat(folder / "memory.stat", cache_key))


class MemoryKills(NamedTuple):
    """Counts processes that the kernel killed for want of memory, of this control group and of the whole machine."""

    group: int
    machine: int


def count_memory_kills() -> MemoryKills:
    """Returns the numbers so far; 0 where the kernel does not tell."""
    root = Path("/")
    own = next(_cgroups(root, "memory"), root)
    group = max(_stat(own / name, "oom_kill") for name in ("memory.events", "memory.oom_control"))
    return MemoryKills(group, _stat(root / "proc/vmstat", "oom_kill"))


def memory_limit() -> int | None:
    """Returns the lowest limit of this process's control groups, in bytes; None without one."""
    return min((limit for limit, _ in _memory_limits(Path("/"))), default=None)


def _cpu_quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()  # v2: "QUOTA PERIOD" or "max PERIOD"
    if len(words) == 2:
        return (
            float(words[0]) / float(words[1]) if all(is_number(word, 18) for word in words) and int(words[1]) else None
        )
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except ValueError:  # absent, or the word "max"
        return None


def _stat(path: Path, key: str) -> int:
    fields = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in fields if words[0] == key), 0)


def _gpus(visible_devices: str | None) -> Iterator[Gpu]:
    """Yields NVIDIA GPUs in CUDA's numbering under CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        for index, physical in enumerate(_visible(uuids, visible_devices)):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handles[physical])
            name = str(pynvml.nvmlDeviceGetName(handles[physical]))
            yield Gpu(index, name, int(memory.total), int(memory.free), _link(handles[physical]))
    except pynvml.NVMLError:
        return
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _link(handle: Any) -> PcieLink | None:
    import pynvml

    try:
        return PcieLink(
            generation=int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            lanes=int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            most_generation=int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            most_lanes=int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            idle=int(pynvml.nvmlDeviceGetPerformanceState(handle)) > _FASTEST_STATES,
        )
    except pynvml.NVMLError:  # virtual machines and boards without PCIe do not say
        return None


def _visible(uuids: Sequence[str], visible_devices: str | None) -> list[int]:
    """Returns physical indices in CUDA's order. Stops at the first unknown name, as CUDA does."""
    if visible_devices is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (word.strip() for word in visible_devices.split(",")):
        if is_number(word) and int(word) < len(uuids):
            chosen.append(int(word))
            continue
        matches = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return chosen
