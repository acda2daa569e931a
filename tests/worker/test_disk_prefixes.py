"""The prefix cache on disk gives the same tokens after a restart and after damage, in bounded files."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support.engine_kit import Drive, Model, plain_model, prompt
from support.kv_kinds import KV_KINDS, kv_kind
from support.waiting import until

from edgemoe.durable import open_kept
from edgemoe.ipc.messages import Submit
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.types.step import EntryKind
from edgemoe.worker import disk_prefixes, prefix_files
from edgemoe.worker.disk_prefixes import LEAST_BLOCKS, DiskPrefixes
from edgemoe.worker.prefix_files import ALIGNMENT, EntryName, PrefixFiles

LENGTH, TOKENS, BLOCKS = 200, 24, 32
PROMPT = prompt(LENGTH, 1, 96)
WHOLE = (LENGTH - 1) // 16  # blocks of the prompt that can be reused


@pytest.fixture(scope="module", params=KV_KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Model]]:
    with kv_kind(request.param, tmp_path_factory.mktemp("kv")) as make:
        yield make


class Served:
    """An engine on its own thread, with files."""

    def __init__(self, model: Model, folder: Path, most_bytes: int, blocks: int) -> None:
        self.drive = Drive(blocks, model=model, step_tokens=64)
        prefixes = self.drive.engine.prefixes
        encoding = prefixes.encoding("model")
        self.files = PrefixFiles(folder, encoding, most_bytes, prefixes.entry_bytes)
        self.files.open()
        self.disk = DiskPrefixes(self.drive.engine, self.files, self._submit)
        self.drive.engine.loop._emit = self._emit  # type: ignore[method-assign]
        self.ended = self.saved = 0  # requests
        self._note_ended, self.disk._note_ended = self.disk._note_ended, self._ended  # type: ignore[method-assign]
        self._save, self.disk._save = self.disk._save, self._saved  # type: ignore[method-assign]
        self._ends: dict[str, asyncio.Future[Emission]] = {}
        self._loop = asyncio.get_running_loop()

    def _submit(self, message: Submit) -> None:
        left_s, waited_s = message.remaining_ms / 1e3, message.waited_ms / 1e3
        self.drive.engine.loop.submit(message.request, message.emitted, message.attempt, left_s, waited_s)

    def _ended(self, running: disk_prefixes._Running) -> None:
        self.ended += 1
        self._note_ended(running)

    def _saved(self, running: disk_prefixes._Running) -> int:
        try:
            return self._save(running)
        finally:
            self.saved += 1

    def _emit(self, items: list[Emission]) -> None:
        self.disk.on_emissions(items)
        self.drive.emitted.extend(items)
        for item in items:
            if item.finish:
                self._loop.call_soon_threadsafe(self._ends[item.request].set_result, item)

    async def answer(self, tokens: Sequence[int] = PROMPT, name: str = "r", salt: bytes = b"") -> list[int]:
        """Returns the tokens of an answer."""
        self._ends[name] = self._loop.create_future()
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS)
        self.disk.accept(Submit(request=Request(id=name, prompt=tuple(tokens), sampling=sampling, seed=7, salt=salt)))
        await self._ends[name]
        return self.drive.tokens(name)

    @property
    def reused(self) -> int:
        return self.drive.engine.scheduler.prefix_tokens["hit"]


@asynccontextmanager
async def served(model: Model, folder: Path, most_bytes: int = 1 << 30, blocks: int = BLOCKS) -> AsyncIterator[Served]:
    """Runs an engine; at the end all that has ended is saved."""
    one, ended = Served(model, folder, most_bytes, blocks), asyncio.Event()
    loop = asyncio.get_running_loop()
    failed: list[BaseException | None] = []

    def note(error: BaseException | None) -> None:
        failed.append(error)
        loop.call_soon_threadsafe(ended.set)

    one.drive.engine.start(1, note)
    running = asyncio.ensure_future(one.disk.run())
    await asyncio.sleep(0)  # it has begun
    try:
        yield one
        await saved(one)
    finally:
        one.drive.engine.loop.stop()
        await ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert failed == [None]
    one.drive.engine.check_integrity()


async def saved(one: Served) -> None:
    """Waits until nothing is left to save."""
    await until(lambda: one.saved == one.ended)


async def test_a_restarted_engine_reuses_what_the_former_one_computed(
    make: Callable[[], Model], tmp_path: Path
) -> None:
    async with served(make(), tmp_path) as first:
        whole = await first.answer()
        assert first.reused == 0
    async with served(make(), tmp_path) as second:
        assert await second.answer() == whole
        assert second.reused == WHOLE * 16
        assert second.disk.figures.restored_tokens == WHOLE * 16
        assert second.drive.engine.blocks.free == BLOCKS
        assert await second.answer([*PROMPT, *whole, 5, 6, 7], "next")  # and the answer's blocks
        assert second.reused == WHOLE * 16 + (LENGTH + TOKENS - 1) // 16 * 16
    async with served(make(), tmp_path) as third:
        assert await third.answer(salt=b"another's") == whole
        assert third.reused == 0, "blocks of another salt are another's"


async def test_blocks_that_are_damaged_or_gone_are_computed(make: Callable[[], Model], tmp_path: Path) -> None:
    async with served(make(), tmp_path) as first:
        whole = await first.answer()
        block_bytes = first.drive.engine.prefixes.entry_bytes[EntryKind.BLOCK]
    (file,) = tmp_path.glob("*/*.kv")
    sound = file.read_bytes()
    sizes = {"empty": 0, "cut": len(sound) // 2, "header": 20}
    cases = {name: sound[:size] for name, size in sizes.items()}
    for name, at in {
        "magic": 0,
        "count": 16,
        "table": 70,
        "first": ALIGNMENT + 5,
        "last": ALIGNMENT + WHOLE * block_bytes - 5,
    }.items():
        cases[name] = sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :]
    cases["lies"] = sound[:16] + b"\xff" * 24 + sound[40:]
    for name, data in cases.items():
        file.write_bytes(data)
        async with served(make(), tmp_path) as one:
            assert await one.answer() == whole, name
            assert one.disk.metrics()["edgemoe_kv_disk_failures_total"] == 1, name
            assert one.reused < WHOLE * 16


async def test_files_are_bounded_and_the_least_used_go_first(tmp_path: Path) -> None:
    model = plain_model()
    async with served(model, tmp_path) as one:
        block_bytes = one.drive.engine.prefixes.entry_bytes[EntryKind.BLOCK]
    most_bytes = 40 * block_bytes + 3 * ALIGNMENT  # three prompts
    async with served(model, tmp_path, most_bytes, 256) as one:
        for number in range(4):
            await one.answer(prompt(LENGTH, 10 + number, 96), f"r{number}")
            await saved(one)
            if number == 2:
                os.utime(one.files._entries[one.drive.engine.prefixes.keys(prompt(LENGTH, 10, 96), b"")[0], False].file)
        assert one.files.total_bytes <= most_bytes
        first = [one.drive.engine.prefixes.keys(prompt(LENGTH, 10 + number, 96), b"")[0] for number in range(4)]
        assert [one.files.has((key, EntryKind.BLOCK)) for key in first] == [True, False, True, True]


async def test_a_cancelled_request_is_not_submitted_and_what_it_computed_is_kept(tmp_path: Path) -> None:
    model = plain_model()
    async with served(model, tmp_path) as first:
        whole = await first.answer()
    async with served(model, tmp_path) as one:
        message = Submit(request=Request(id="x", prompt=tuple(PROMPT), sampling=Sampling(), seed=7))
        one.disk.accept(message)
        one.disk.cancel("x", 1)
        assert await one.answer() == whole
        assert not [each for each in one.drive.emitted if each.request == "x"]


async def test_saved_blocks_that_may_be_wrong_are_deleted(tmp_path: Path) -> None:
    async with served(plain_model(), tmp_path) as first:
        whole = await first.answer()
    assert list(tmp_path.glob("*/*.kv"))
    async with served(plain_model(), tmp_path) as second:
        await second.disk.forget_all()
        assert not list(tmp_path.glob("*/*.kv"))
        assert await second.answer() == whole
        assert second.reused == 0


async def test_a_prompt_that_is_not_on_disk_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model()
    async with served(model, tmp_path) as first:
        await first.answer()
    async with served(model, tmp_path, blocks=128) as one:
        held = threading.Event()
        monkeypatch.setattr(one.disk, "_restore", lambda _: held.wait(60))
        waiting = [asyncio.ensure_future(one.answer(PROMPT, f"w{n}")) for n in range(4)]
        assert await one.answer(prompt(LENGTH, 77, 96), "other")
        assert not any(each.done() for each in waiting)
        held.set()
        await asyncio.gather(*waiting)


async def test_a_disk_that_hangs_costs_its_prompts_a_bounded_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model()
    async with served(model, tmp_path) as first:
        whole = await first.answer()
    monkeypatch.setattr(disk_prefixes, "RESTORE_S", 0.05)
    async with served(model, tmp_path) as one:
        held = threading.Event()
        monkeypatch.setattr(one.disk, "_restore", lambda _: held.wait(60))
        assert await one.answer() == whole
        assert one.disk.figures.failures == 1
        held.set()


async def test_short_prompts_do_not_wait_and_few_blocks_are_not_written(tmp_path: Path) -> None:
    async with served(plain_model(), tmp_path) as one:
        await one.answer(prompt(LEAST_BLOCKS * 16 - TOKENS, 3, 96))
        await saved(one)
        assert not list(tmp_path.glob("*/*.kv"))


async def test_a_cache_without_free_blocks_takes_in_as_many_as_it_has(tmp_path: Path) -> None:
    model = plain_model()
    async with served(model, tmp_path) as first:
        whole = await first.answer()
    async with served(model, tmp_path, blocks=16) as one:
        busy = asyncio.ensure_future(one.answer(prompt(60, 5, 96), "busy"))
        await busy
        assert await one.answer() == whole


def test_a_disk_that_is_full_or_read_only_costs_nothing_else(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path, "m", 1 << 20, {EntryKind.BLOCK: 64, EntryKind.STATE: 0})
    files.open()
    names = [(bytes([n]) * 16, EntryKind.BLOCK) for n in range(8)]
    with pytest.raises(OSError, match="No space"):
        files.save(names, lambda _: _raise(OSError(28, "No space left on device")))
    assert not list(tmp_path.rglob("*.*"))
    assert files.save(names, lambda name: np.full(64, name[0][0], np.uint8)) == 8 * 64
    assert [int(data[0]) for name in names if (data := files.read(name)) is not None] == list(range(8))
    assert files.read((b"?" * 16, EntryKind.BLOCK)) is None


def named(numbers: Iterable[int]) -> list[EntryName]:
    return [(bytes([n]) * 16, EntryKind.BLOCK) for n in numbers]


def test_neighbours_in_a_file_are_read_at_once_and_each_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PrefixFiles(tmp_path, "m", 1 << 20, {EntryKind.BLOCK: 64, EntryKind.STATE: 0})
    files.open()
    for numbers in (range(8), range(8, 12)):
        files.save(named(numbers), lambda name: np.full(64, name[0][0], np.uint8))
    opened: list[Path] = []

    def noted(path: Path, **how: bool) -> int:
        opened.append(path)
        return open_kept(path, **how)

    monkeypatch.setattr(prefix_files, "open_kept", noted)

    def read(numbers: Sequence[int]) -> list[int | None]:
        opened.clear()
        found = files.read_run(named(numbers), list(np.empty((len(numbers), 64), np.uint8)))
        return [None if row is None else int(row[0]) for row in found]

    cases: list[tuple[list[int], int]] = [
        ([*range(12)], 2),
        ([3, 4, 5, 6], 1),
        ([5, 4, 6], 3),
        ([0, 1, 9, 10], 2),
        ([], 0),
    ]
    for wanted, opens in cases:
        assert (read(wanted), len(opened)) == (wanted, opens)
    assert (read([6, 99, 7, 8]), len(opened)) == ([6, None, 7, 8], 3)
    monkeypatch.setattr(prefix_files, "MOST_AT_ONCE", 3)
    assert (read([*range(8)]), len(opened)) == ([*range(8)], 3)
    first, _ = sorted(tmp_path.glob("m/*.kv"), key=lambda path: -path.stat().st_size)
    with first.open("r+b") as file:
        file.seek(-64 * 3, os.SEEK_END)
        file.write(b"?")
    assert read([4, 5, 6, 8]) == [4, None, None, 8], "the entries behind a damaged one are in a file that is gone"
    assert (files.corrupt, first.exists()) == (1, False)


def _raise(error: OSError) -> None:
    raise error
