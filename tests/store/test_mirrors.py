"""Stores with copies on other disks: both give experts, and one makes up for the losses of the other."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from heapq import heappop, heappush
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import CorruptExpert
from edgemoe.store.files import page_memory
from edgemoe.store.manifest import Manifest
from edgemoe.store.mirrors import FORGOTTEN_S, LEFT_ALONE_S, StoreCopies, StoreCopy
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import padded


@pytest.fixture
def second(store: Path, tmp_path: Path) -> Path:
    """A folder of another disk, with a copy of the store."""
    folder = tmp_path / "second"
    shutil.copytree(store, folder / store.name)
    return folder


def opened_with(store: Path, second: Path) -> ExpertStore:
    return ExpertStore(store, Manifest.load(store), mirrors=[second])


def all_experts(manifest: Manifest) -> list[tuple[int, int]]:
    return [(layer, entry.expert) for layer, part in enumerate(manifest.layers) for entry in part.experts]


async def contents(opened: ExpertStore, experts: list[tuple[int, int]]) -> list[bytes]:
    """Reads the experts side by side, as the loader's readers do."""
    rooms = [page_memory(padded(opened.expert_bytes(*expert))) for expert in experts]
    await asyncio.gather(*(opened.read(*expert, room) for expert, room in zip(experts, rooms, strict=True)))
    return [bytes(room[: opened.expert_bytes(*expert)]) for expert, room in zip(experts, rooms, strict=True)]


def damage(folder: Path, manifest: Manifest, layer: int, expert: int) -> None:
    path = folder / manifest.layers[layer].file
    raw = bytearray(path.read_bytes())
    raw[manifest.entry(layer, expert).offset + 77] ^= 4
    path.write_bytes(raw)


async def test_experts_come_from_both_disks_and_are_the_same(store: Path, second: Path) -> None:
    manifest = Manifest.load(store)
    experts = all_experts(manifest)
    with ExpertStore(store, manifest) as alone, opened_with(store, second) as both:
        expected = await contents(alone, experts)
        assert await contents(both, experts * 3) == expected * 3
        assert set(both.read_bytes) == {str(store), str(second / store.name)}
        assert sum(both.read_bytes.values()) == 3 * sum(alone.read_bytes.values())
        assert all(both.read_bytes.values())


@pytest.mark.parametrize("which", ["own", "mirror"])
async def test_a_damaged_expert_is_read_from_the_other_disk(
    store: Path, second: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = Manifest.load(store)
    experts = all_experts(manifest)
    with ExpertStore(store, manifest) as alone:
        expected = await contents(alone, experts)
    folder = store if which == "own" else second / store.name
    for expert in experts:
        damage(folder, manifest, *expert)
    with opened_with(store, second) as both, caplog.at_level(logging.WARNING):
        assert await contents(both, experts) == expected
        room = page_memory(padded(both.expert_bytes(1, 2)))
        both.read_into(1, 2, room)
        assert bytes(room[: both.expert_bytes(1, 2)]) == expected[experts.index((1, 2))]
        for _ in range(3):
            await contents(both, experts)
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all(str(folder) in text and "another disk has it" in text for text in told)
    assert len(told) == len(set(told))


async def test_what_both_disks_have_damaged_is_refused(store: Path, second: Path) -> None:
    manifest = Manifest.load(store)
    for folder in (store, second / store.name):
        damage(folder, manifest, 1, 2)
    with opened_with(store, second) as both:
        room = page_memory(padded(both.expert_bytes(1, 2)))
        with pytest.raises(CorruptExpert, match="expert 2 of layer 1"):
            await both.read(1, 2, room)
        with pytest.raises(CorruptExpert, match="expert 2 of layer 1"):
            both.read_into(1, 2, room)


@pytest.mark.parametrize("which", ["own", "mirror"])
async def test_a_disk_that_fails_is_left_alone_and_the_other_gives_all(
    store: Path, second: Path, which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = Manifest.load(store)
    experts = all_experts(manifest)
    with ExpertStore(store, manifest) as alone:
        expected = await contents(alone, experts)
    folder, real = store if which == "own" else second / store.name, os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with opened_with(store, second) as both, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(os, "preadv", broken)
        for _ in range(3):
            assert await contents(both, experts) == expected
        assert both.read_bytes[str(folder)] == 0
    assert 0 < len(caplog.records) <= 16  # the reads that were under way, not each of them all
    assert all("Input/output error; another disk is asked" in record.getMessage() for record in caplog.records)


def lacks_a_layer(copy: Path) -> None:
    (copy / Manifest.load(copy).layers[1].file).unlink()


def is_of_another_model(copy: Path) -> None:
    manifest = Manifest.load(copy)
    msgspec.structs.replace(manifest, digest=manifest.digest[::-1]).save(copy)


@pytest.mark.parametrize("spoil", [shutil.rmtree, lacks_a_layer, is_of_another_model])
async def test_a_mirror_that_cannot_be_used_is_named_and_costs_nothing(
    store: Path, second: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(second / store.name)
    with caplog.at_level(logging.WARNING), opened_with(store, second) as opened:
        await contents(opened, all_experts(opened.manifest))
        assert list(opened.read_bytes) == [str(store)]
    (record,) = caplog.records
    assert f"model.mirrors: {second / store.name} is not used" in record.getMessage()
    assert f"cp -r {store} {second}/" in record.getMessage()


def test_the_store_is_no_mirror_of_itself(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "link").symlink_to(store.parent)
    with caplog.at_level(logging.WARNING), opened_with(store, tmp_path / "link") as opened:
        assert list(opened.read_bytes) == [str(store)]
    assert "it is the store itself" in caplog.text


# --- which disk, in virtual time -----------------------------------------------------------------------------------


class Disks:
    """Disks of given speeds that serve one read after the other."""

    def __init__(self, *bytes_per_s: float) -> None:
        self.now = 0.0
        self.speeds = list(bytes_per_s)
        self.copies = StoreCopies([StoreCopy(Path(str(i)), []) for i in range(len(self.speeds))], lambda: self.now)
        self._free_at = [0.0] * len(self.speeds)

    def read(self, sizes: list[int], readers: int) -> float:
        """Reads blocks by as many readers as said; returns the seconds that it takes."""
        began, waiting = self.now, list(reversed(sizes))
        running: list[tuple[float, int, int]] = []
        while waiting or running:
            while waiting and len(running) < readers:
                size = waiting.pop()
                copy = self.copies.soonest(size)[0]
                index = self.copies.copies.index(copy)
                copy.begin(size, self.now)
                self._free_at[index] = max(self._free_at[index], self.now) + size / self.speeds[index]
                heappush(running, (self._free_at[index], index, size))
            self.now, index, size = heappop(running)
            self.copies.copies[index].end(size, self.now, failed=False)
        return self.now - began


@given(st.floats(1, 8), st.integers(8, 16))
def test_disks_share_the_work_by_their_speeds(ratio: float, readers: int) -> None:
    disks = Disks(ratio * 1e6, 1e6)
    taken = disks.read([100_000] * 400, readers)
    ideal = 400 * 100_000 / ((ratio + 1) * 1e6)
    assert taken <= ideal * 1.15 + 0.3  # one block of the slower disk is .1 s


def test_a_disk_that_becomes_fast_again_is_noticed() -> None:
    disks = Disks(1e6, 1e6)
    disks.read([100_000] * 100, 8)
    disks.speeds[1] = 1e4
    disks.read([100_000] * 200, 8)
    disks.speeds[1] = 1e6
    disks.now += 2 * FORGOTTEN_S
    disks.read([100_000] * 100, 8)  # finds out
    before = [copy.read_bytes for copy in disks.copies.copies]
    disks.read([100_000] * 200, 8)
    gained = [copy.read_bytes - old for copy, old in zip(disks.copies.copies, before, strict=True)]
    assert min(gained) > 0.35 * sum(gained)


def test_a_disk_that_failed_is_asked_last_for_a_while() -> None:
    disks = Disks(1e6, 1e6)
    first, second = disks.copies.copies
    with pytest.raises(EOFError), disks.copies.reading(first, 10):
        raise EOFError
    assert first.read_bytes == first.reading_bytes == 0
    for _ in range(10):
        assert disks.copies.soonest(10) == [second, first]
        with disks.copies.reading(second, 10):
            disks.now += 1e-5
    disks.now += LEFT_ALONE_S
    assert disks.copies.soonest(10)[0] is first
