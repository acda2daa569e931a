"""Files that survive a power loss after a writer has reported its end."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support.power import Disk

from edgemoe.durable import MAX_LINKS, open_folder, open_kept, private_folder, replace_file
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


def test_a_small_file_gets_its_intended_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda fd, *owner: asked.append((os.readlink(f"/proc/self/fd/{fd}"), *owner)))
    replace_file(tmp_path / "file", b"x", owner=(12, 34))
    replace_file(tmp_path / "nobodys", b"x")
    ((name, *owner),) = asked
    assert owner == [12, 34]
    assert Path(name).parent == tmp_path
    assert Path(name).match("file.*.tmp")


def test_small_files_that_are_replaced_leave_none_open(tmp_path: Path) -> None:
    def ours() -> list[str]:
        paths = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [path for path in paths if path.startswith(os.path.realpath(tmp_path))]

    replace_file(tmp_path / "file", b"x")
    assert not ours()
    with (tmp_path / "file").open():
        assert ours() == [os.path.realpath(tmp_path / "file")]


def test_public_files_are_readable_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "file", b"x", 0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_with_a_second_name_is_taken_in_a_folder_of_ones_own_only(tmp_path: Path, shared: bool) -> None:
    for name in ("one", "two"):
        (tmp_path / name).touch()
    os.link(tmp_path / "two", tmp_path / "three")
    tmp_path.chmod(0o777 if shared else 0o700)
    os.close(open_kept(tmp_path / "one"))
    with pytest.raises(OSError, match="second name") if shared else contextlib.nullcontext():
        os.close(open_kept(tmp_path / "two"))


@pytest.mark.parametrize("there", [False, True])
def test_a_private_folder_is_entered_by_its_user_alone(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "folder").mkdir(mode=0o755)
    assert private_folder(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


@pytest.mark.parametrize("links", [MAX_LINKS, MAX_LINKS + 1])
def test_links_are_followed_up_to_a_number(tmp_path: Path, links: int) -> None:
    (tmp_path / "0").mkdir()
    for number in range(1, links + 1):
        (tmp_path / str(number)).symlink_to(str(number - 1))
    with pytest.raises(OSError, match="name the folder itself") if links > MAX_LINKS else contextlib.nullcontext():
        os.close(open_folder(tmp_path / str(links)))
