"""What is on the disk for good when a writer says that it is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.power import Disk

from edgemoe.durable import replace_file
from edgemoe.store.packer import pack


def test_a_packed_store_survives_a_power_loss(checkpoint: Callable[..., Path], tmp_path: Path, disk: Disk) -> None:
    pack(checkpoint(family="qwen3_moe"), tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for path in files:
        assert disk.after_power_loss(path) == path.read_bytes(), path


def test_a_small_file_that_is_replaced_survives_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    for data in (b"before", b"after"):
        replace_file(tmp_path / "file", data)
        assert disk.after_power_loss(tmp_path / "file") == data
