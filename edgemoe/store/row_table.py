"""The tier of rows: a table on disk, of which rows are read ahead and kept in bounded memory.

Each row is read with the pages that it lies in, around the page cache where the file system lets it. It is compared
with the checksum behind it. The rows used last stay in memory. Imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CheckpointError, CorruptRow, StoreError
from edgemoe.families.spec import ModelSpec, row_tables
from edgemoe.store.checkpoint import CheckpointTensor, read_header
from edgemoe.store.files import SEAL_BYTES, PageFile, page_memory, row_seal
from edgemoe.store.manifest import rows_file
from edgemoe.types.arrays import IntArray
from edgemoe.types.encoding import BFLOAT16, ENCODINGS, FLOAT32
from edgemoe.types.experts import PAGE_BYTES, padded

Bytes = npt.NDArray[np.uint8]
READERS = 8  # threads
READ_BYTES = 128 << 10  # of one read of neighbouring rows, if one row is not larger
CACHE_BYTES = 64 << 20  # of rows in memory, where nothing else is said
LEAST_SLOTS = 16  # rows in memory
CACHED, AHEAD, WAITED = "cached", "ahead", "waited"  # how a wanted row was found


class _Placed(NamedTuple):
    """A row, and the slot that it is read into."""

    number: int
    slot: int


class RowTable:
    """Rows of one table; implements `types.RowSource`. The numbers that it counts may be read on any thread."""

    def __init__(self, tensor: CheckpointTensor, cache_bytes: int = CACHE_BYTES) -> None:
        """Opens the file of a table of sealed rows, uint8 [R, row_bytes + SEAL_BYTES]. Raises StoreError."""
        self.rows, self._stored_bytes = tensor.shape
        self.row_bytes = self._stored_bytes - SEAL_BYTES
        self.slots = min(self.rows, max(LEAST_SLOTS, cache_bytes // self.row_bytes))
        self.found = dict.fromkeys((CACHED, AHEAD, WAITED), 0)  # rows, by how they were found
        self.read_bytes, self.wait_s = 0, 0.0
        try:
            self._file = PageFile(tensor.file)
        except OSError as error:
            raise StoreError(f"{tensor.file} cannot be opened: {error.strerror}") from error
        self._offset, self._arena = tensor.offset, np.empty((self.slots, self.row_bytes), np.uint8)
        self._slot_of: dict[int, int] = {}  # row -> slot, the row used longest ago first
        self._free = list(range(self.slots))
        self._reading: dict[int, Future[dict[int, StoreError]]] = {}  # rows that nobody has taken since they were begun
        self._readers, self._own = ThreadPoolExecutor(READERS, "row-reader"), threading.local()
        self._counting = threading.Lock()

    @property
    def table_bytes(self) -> int:
        """Returns the bytes of all rows on disk."""
        return self.rows * self._stored_bytes

    @property
    def held(self) -> int:
        """Counts the rows in memory, or on their way there."""
        return len(self._slot_of)

    def close(self) -> None:
        """Waits for the reads under way, then frees threads and file."""
        self._readers.shutdown(cancel_futures=True)
        self._file.close()

    def begin_reads(self, numbers: IntArray) -> None:
        """Begins to read rows that will be taken soon. Of many, as many as half the memory holds."""
        self._begin(np.unique(numbers)[: self.slots // 2])

    def take_rows(self, numbers: IntArray) -> Bytes:
        """Returns these rows, [n, row_bytes]; waits for the ones that are not in memory.

        Raises CorruptRow where a row's checksum is wrong, and StoreError where it cannot be read.
        """
        wanted, places = np.unique(numbers, return_inverse=True)
        rows = np.empty((len(wanted), self.row_bytes), np.uint8)
        for first in range(0, len(wanted), self.slots):
            some = wanted[first : first + self.slots]
            self._begin(some)
            for number in some.tolist():
                self._await(number)
            rows[first : first + len(some)] = self._arena[[self._slot_of[number] for number in some.tolist()]]
        return rows[places.reshape(-1)]

    def _begin(self, numbers: IntArray) -> None:
        """Begins to read the rows, at most `slots` different ones, that are not in memory. Keeps the others there."""
        missing = []
        for number in numbers.tolist():
            if (slot := self._slot_of.pop(number, None)) is None:
                missing.append(number)
            else:
                self._slot_of[number] = slot
        placed = []
        for number in missing:
            slot = self._slot_of[number] = self._free.pop() if self._free else self._evicted()
            placed.append(_Placed(number, slot))
        step = -(-len(placed) // READERS) or 1
        for first in range(0, len(placed), step):
            some = placed[first : first + step]
            reading = self._readers.submit(self._read, some)
            self._reading.update((row.number, reading) for row in some)

    def _evicted(self) -> int:
        """Drops the row that was used longest ago. Returns its slot, into which nothing is read any more."""
        number = next(iter(self._slot_of))
        if (reading := self._reading.pop(number, None)) is not None:
            reading.result()
        return self._slot_of.pop(number)

    def _await(self, number: int) -> None:
        """Returns when the row is in memory. Raises StoreError."""
        if (reading := self._reading.pop(number, None)) is None:
            self.found[CACHED] += 1
            return
        if reading.done():
            self.found[AHEAD] += 1
        else:
            self.found[WAITED] += 1
            began_s = time.perf_counter()
            reading.result()
            self.wait_s += time.perf_counter() - began_s
        if (fault := reading.result().get(number)) is not None:
            self._free.append(self._slot_of.pop(number))
            raise fault

    # --- on the readers' threads --------------------------------------------------------------------------------

    def _read(self, placed: Sequence[_Placed]) -> dict[int, StoreError]:
        """Reads rows into their slots. Returns the faults of damaged rows, by row."""
        faults: dict[int, StoreError] = {}
        for some in self._neighbours(placed):
            start = self._place(some[0].number) // PAGE_BYTES * PAGE_BYTES
            size = self._place(some[-1].number + 1) - start
            room = self._room(padded(size))
            try:
                self._file.fill(room[: padded(size)], size, start)
            except (OSError, EOFError) as error:
                fault = StoreError(f"{self._file.path} cannot be read: {error}")
                faults.update((row.number, fault) for row in some)
                continue
            with self._counting:
                self.read_bytes += padded(size)
            for number, slot in some:
                at = self._place(number) - start
                row, seal = room[at : at + self.row_bytes], room[at + self.row_bytes : at + self._stored_bytes]
                if row_seal(row, number) == int.from_bytes(seal, "little"):
                    self._arena[slot] = np.frombuffer(row, np.uint8)
                else:
                    faults[number] = CorruptRow(str(self._file.path), number)
        return faults

    def _neighbours(self, placed: Sequence[_Placed]) -> Iterator[Sequence[_Placed]]:
        """Divides rows, in their order, into ones whose pages follow one another, of READ_BYTES at most."""
        first = 0
        for end in range(1, len(placed) + 1):
            if end < len(placed):
                gap = self._place(placed[end].number) - self._place(placed[end - 1].number + 1)
                size = self._place(placed[end].number + 1) - self._place(placed[first].number)
                if gap < PAGE_BYTES and size <= READ_BYTES:
                    continue
            yield placed[first:end]
            first = end

    def _place(self, number: int) -> int:
        """Returns the offset of a row in the file."""
        return self._offset + number * self._stored_bytes

    def _room(self, size_bytes: int) -> memoryview:
        """Returns memory of this thread's own for one read."""
        room: memoryview | None = getattr(self._own, "room", None)
        if room is None:
            room = self._own.room = page_memory(padded(max(READ_BYTES, self._stored_bytes)) + PAGE_BYTES)
        assert size_bytes <= len(room)
        return room


def open_table(path: Path, name: str, rows: int, row_sizes: Sequence[int], cache_bytes: int = CACHE_BYTES) -> RowTable:
    """Opens the file of a table of `rows` rows, each of one of these sizes in bytes. Raises StoreError."""
    try:
        found = read_header(path)
    except CheckpointError as error:
        raise StoreError(f"{error}; pack the checkpoint again") from error
    tensor = found.get(name)
    sizes = [size + SEAL_BYTES for size in row_sizes]
    if tensor is None or tensor.dtype != "U8" or tensor.shape not in [(rows, size) for size in sizes]:
        held = "no such table" if tensor is None else f"a table {list(tensor.shape)} of {tensor.dtype}"
        raise StoreError(
            f"{path} has {held}; {name} of this model has {rows} rows of {' or '.join(map(str, sizes))} bytes; "
            "pack the checkpoint again"
        )
    return RowTable(tensor, cache_bytes)


def open_row_table(spec: ModelSpec, store: Path, cache_bytes: int = CACHE_BYTES) -> RowTable | None:
    """Opens the table of a packed model; None if it has none. Raises StoreError."""
    for number, (name, (rows, columns)) in enumerate(row_tables(spec).items()):
        known = (ENCODINGS[spec.dense_encoding or spec.dtype], FLOAT32, BFLOAT16)
        sizes = [each.row_bytes(columns) for each in known]
        return open_table(store / rows_file(number), name, rows, sizes, cache_bytes)
    return None
