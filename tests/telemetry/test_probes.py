from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgemoe.telemetry.probes import _visible, probe_machine

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_the_machine_is_the_hardware(tmp_path: Path) -> None:
    machine = probe_machine(tmp_path)
    assert machine.cpus == len(os.sched_getaffinity(0))
    assert machine.ram_available_bytes <= machine.ram_total_bytes


def test_a_v2_memory_limit_counts_without_droppable_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice/edgemoe.service"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/edgemoe.service\n",
            f"{group}/memory.max": f"{100 * MIB}\n",
            f"{group}/memory.current": f"{60 * MIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {20 * MIB}\n",
        },
    )
    machine = probe_machine(root)
    assert machine.ram_total_bytes == 100 * MIB
    assert machine.ram_available_bytes == 60 * MIB


def test_a_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{50 * MIB}",
            "sys/fs/cgroup/a/memory.current": f"{10 * MIB}",
        },
    )
    assert probe_machine(root).ram_available_bytes == 40 * MIB


@pytest.mark.parametrize(("used", "available"), [(20, 30), (60, 0)])
def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path, used: int, available: int) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": f"{50 * MIB}",
            "sys/fs/cgroup/a/b/memory.current": f"{used * MIB}",
            "sys/fs/cgroup/a/memory.max": f"{100 * MIB}",
            "sys/fs/cgroup/a/memory.current": f"{20 * MIB}",
        },
    )
    machine = probe_machine(root)
    assert (machine.ram_total_bytes, machine.ram_available_bytes) == (50 * MIB, available * MIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_a_v1_memory_limit_counts_also_where_the_path_is_the_hosts(tmp_path: Path, path: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": f"5:devices:{path}\n4:memory:{path}\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{80 * MIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * MIB}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {10 * MIB}\n",
        },
    )
    assert probe_machine(root).ram_available_bytes == 60 * MIB


def test_no_v1_limit_is_a_number_too_large_to_mean_one(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        },
    )
    assert probe_machine(root).ram_total_bytes < 1 << 60


@pytest.mark.parametrize(("quota", "cpus"), [(350_000, 3), (900_000, 8), (20_000, 1)])
def test_a_quota_of_several_processors_counts_up_to_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    root = write(tmp_path, {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": f"{quota} 100000\n"})
    assert probe_machine(root).cpus == cpus


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_cpu_quota_counts_in_whole_cores(tmp_path: Path, files: dict[str, str]) -> None:
    assert probe_machine(write(tmp_path, files)).cpus == 1


def test_visible_devices_are_numbered_as_cuda_does() -> None:
    uuids = ["GPU-aa11", "GPU-bb22", "GPU-bb33"]
    assert _visible(uuids, None) == [0, 1, 2]
    assert _visible(uuids, "2,0") == [2, 0]
    assert _visible(uuids, "GPU-aa,1") == [0, 1]
    assert _visible(uuids, "1,-1,0") == [1]
    assert _visible(uuids, "GPU-bb") == []
    assert _visible(uuids, "") == []
