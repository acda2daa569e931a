"""Rows of a table on disk are the ones that were written, however few fit into memory, or are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgemoe.errors import CorruptRow, StoreError
from edgemoe.store.files import SEAL_BYTES
from edgemoe.store.row_table import LEAST_SLOTS, READ_BYTES, RowTable, open_table
from edgemoe.store.writer import RowSealer
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select
from edgemoe.types.experts import PAGE_BYTES
from edgemoe.worker.service import row_metrics

NAME, ROWS, WIDTH = "model.table.weight", 300, 136
SIZES = [1, 24, WIDTH, PAGE_BYTES - SEAL_BYTES, PAGE_BYTES + 1, READ_BYTES + 100]  # bytes of a row


def written(path: Path, rows: int, width: int) -> np.ndarray:
    """Writes a table of random rows. Returns these."""
    made = np.random.default_rng(width).integers(0, 256, (rows, width), np.uint8)
    sealer, data = RowSealer(width), made.tobytes()
    cuts = sorted({0, len(data), *random.Random(1).choices(range(len(data)), k=9)})
    sealed = b"".join(sealer.sealed(data[a:b]) for a, b in itertools.pairwise(cuts))
    save_file({NAME: torch.frombuffer(bytearray(sealed), dtype=torch.uint8).view(rows, -1)}, path)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows_000.safetensors"


@pytest.fixture
def rows(path: Path) -> np.ndarray:
    return written(path, ROWS, WIDTH)


@pytest.fixture
def small(path: Path, rows: np.ndarray) -> Iterator[RowTable]:
    """A table of which LEAST_SLOTS rows fit into memory."""
    with closing(open_table(path, NAME, ROWS, [WIDTH], 0)) as table:
        yield table


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("cache", [0, 100, 1 << 30])
def test_rows_are_the_ones_that_were_written(path: Path, width: int, cache: int) -> None:
    count = 300 if width < READ_BYTES else 40
    expected, draw = written(path, count, width), np.random.default_rng(2)
    with closing(open_table(path, NAME, count, [width], cache * width)) as table:
        assert table.slots == min(count, max(LEAST_SLOTS, cache))
        for wanted in (1, 2, 7, 90, 500):
            numbers = draw.integers(0, count, wanted)
            table.begin_reads(draw.integers(0, count, wanted))
            table.begin_reads(numbers[: wanted // 2])
            assert (table.take_rows(numbers) == expected[numbers]).all()
        assert table.held <= table.slots
        assert table._arena.nbytes == table.slots * width


def test_a_row_is_read_once_while_it_is_used_and_those_used_longest_ago_go(small: RowTable) -> None:
    for number in range(200):
        small.take_rows(np.array([7, number]))
    waited_or_ahead = small.found["waited"] + small.found["ahead"]
    assert waited_or_ahead == 200, "row 7 is read with the first ones, and never again"
    assert small.found["cached"] == 200 - 1
    small.take_rows(np.array([7, 199, 198]))
    assert small.found["cached"] == 202


def test_rows_that_were_begun_are_there_in_time(small: RowTable) -> None:
    small.begin_reads(np.arange(100, 100 + LEAST_SLOTS))
    begun = list(small._reading.values())
    assert len(begun) == LEAST_SLOTS // 2, "half the memory: the rows of the present step keep the other half"
    for reading in begun:
        reading.result()
    small.take_rows(np.arange(100, 100 + LEAST_SLOTS // 2))
    assert (small.found["ahead"], small.found["waited"]) == (LEAST_SLOTS // 2, 0)
    assert small.wait_s == 0


def test_neighbours_are_read_together(path: Path, rows: np.ndarray) -> None:
    with closing(open_table(path, NAME, ROWS, [WIDTH], 1 << 20)) as table:
        table.take_rows(np.arange(ROWS))
        least = ROWS * (WIDTH + SEAL_BYTES)
        assert least <= table.read_bytes < least + 20 * PAGE_BYTES


def test_metrics_have_every_number_of_the_tier(small: RowTable) -> None:
    small.take_rows(np.arange(10))
    small.take_rows(np.arange(5))
    metrics = row_metrics(small)
    assert select(metrics, names.ROWS_FOUND) == 15
    assert select(metrics, names.ROWS_FOUND, where="cached") == 5
    assert (metrics[names.ROW_SLOTS], metrics[names.ROWS_HELD]) == (LEAST_SLOTS, 10)
    assert metrics[names.ROW_TABLE_BYTES] == ROWS * (WIDTH + SEAL_BYTES)
    assert metrics[names.ROW_READ_BYTES] >= 10 * WIDTH
    assert metrics[names.ROW_WAIT_SECONDS] >= 0


def place(path: Path, number: int) -> int:
    """Returns the offset of a row."""
    return path.stat().st_size - (ROWS - number) * (WIDTH + SEAL_BYTES)


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("at", [0, WIDTH - 1, WIDTH, WIDTH + SEAL_BYTES - 1])
def test_a_flipped_row_is_refused_by_its_number_and_its_neighbours_are_not(
    path: Path, rows: np.ndarray, small: RowTable, at: int
) -> None:
    flip(path, place(path, 40) + at)
    around = np.array([39, 41, 42])
    small.begin_reads(np.arange(39, 43))
    for _ in range(2):
        assert (small.take_rows(around) == rows[around]).all()
        with pytest.raises(CorruptRow, match=f"{path}: row 40 is damaged.*pack the checkpoint again"):
            small.take_rows(np.arange(39, 43))
    flip(path, place(path, 40) + at)
    assert (small.take_rows(np.arange(39, 43)) == rows[39:43]).all(), "a mended row is read again"


def test_rows_in_each_others_places_are_refused(path: Path, small: RowTable) -> None:
    raw, (one, two) = bytearray(path.read_bytes()), (place(path, 3), place(path, 4))
    size = WIDTH + SEAL_BYTES
    raw[one : one + size], raw[two : two + size] = raw[two : two + size], raw[one : one + size]
    path.write_bytes(raw)
    with pytest.raises(CorruptRow, match="row 3 "):
        small.take_rows(np.array([3]))


def test_rows_that_cannot_be_read_are_refused_and_push_no_other_out(
    path: Path, rows: np.ndarray, small: RowTable
) -> None:
    small.take_rows(np.arange(5))
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(place(path, 100))
    small.begin_reads(np.array([150, 160]))
    with pytest.raises(StoreError, match="cannot be read"):
        small.take_rows(np.array([150]))
    assert (small.take_rows(np.arange(5)) == rows[:5]).all()
    path.write_bytes(whole)
    for first in range(0, ROWS, 50):  # a row whose read failed may be thrown out, or read again
        assert (small.take_rows(np.arange(first, first + 50)) == rows[first : first + 50]).all()


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda raw: raw[:-1], "cut short"),
    "cut in its header": (lambda raw: raw[:60], "cut short"),
    "empty": (lambda raw: b"", "no safetensors file"),
    "doubled": (lambda raw: raw + raw, "belong to no tensor"),
    "a page of HTML": (lambda raw: b"<!DOCTYPE html><html></html>", "is a web page"),
    "a header of 2^63 bytes": (lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:], "no safetensors file"),
    "a table of another name": (lambda raw: raw.replace(NAME.encode(), b"model.tible.weight"), "no such table"),
    "rows of another type": (lambda raw: raw.replace(b'"U8"', b'"I8"'), "table"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_when_it_is_opened(path: Path, rows: np.ndarray, what: str) -> None:
    change, why = BAD[what]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StoreError, match=why) as caught:
        open_table(path, NAME, ROWS, [WIDTH])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("count", "width"), [(ROWS - 1, WIDTH), (ROWS + 1, WIDTH), (ROWS, WIDTH - 1), (1, 1)])
def test_a_table_of_another_shape_is_refused(path: Path, rows: np.ndarray, count: int, width: int) -> None:
    with pytest.raises(StoreError, match=rf"{count} rows of {width + SEAL_BYTES} bytes; pack"):
        open_table(path, NAME, count, [width])


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        open_table(path, NAME, ROWS, [WIDTH])
