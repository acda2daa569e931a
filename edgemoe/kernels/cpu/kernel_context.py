"""The base of all kernels for Python: threads, scratch memory and the code of encoded rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgemoe.jit.thread_pool import ThreadPool
from edgemoe.kernels.cpu.encoded.row_code import RowCode, make_row_code
from edgemoe.types.encoding import BFLOAT16, FLOAT32, Encoding

MOST_TOKENS = 1024  # of one call of a kernel for single tokens


class KernelContext:
    """Holds threads and scratch memory of the kernels for one weight type. `threads` include the caller's.

    Only one thread may call at a time, because the scratch memory is shared. Close it, or let it be collected.
    """

    def __init__(self, threads: int, bf16: bool, directory: Path | None = None, byte_activations: bool = True) -> None:
        """Keeps compiled code of rows in `directory`, if one is given.

        With `byte_activations`, many tokens are multiplied with encoded rows in whole numbers of 8 bits.
        """
        self.bf16, self._directory, self._byte_activations = bf16, directory, byte_activations
        self.dtype = BFLOAT16 if bf16 else FLOAT32
        self.pool = ThreadPool(threads)
        self.close = self.pool.close
        self.scratch_changes = 0  # scratch arrays that were replaced by larger ones
        self._scratch: dict[str, tuple[int, npt.NDArray[Any]]] = {}  # by name: address and memory
        self._iota = np.arange(MOST_TOKENS, dtype=np.int64)
        self.iota = self._iota.ctypes.data
        self._borrowed = np.zeros(threads, np.int64)

    def clone_for_thread(self) -> Self:
        """Returns another one for the thread that computes for peers, with threads and scratch memory of its own.

        It rounds no activations to 8 bits, because boxes compare each other's results closely.
        """
        return type(self)(self.pool.threads, self.bf16, self._directory, byte_activations=False)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike = np.float32) -> int:
        """Returns the address of an array of at least `count` elements, aligned to 64 bytes.

        The array stays until a larger one of this name is asked for.
        """
        size = count * np.dtype(dtype).itemsize + 64
        if name not in self._scratch or self._scratch[name][1].nbytes < size:
            memory = np.zeros(size, np.uint8)
            self.scratch_changes += 1
            self._scratch[name] = (memory.ctypes.data + 63) & ~63, memory
        return self._scratch[name][0]

    def row_code(self, encoding: Encoding) -> RowCode:
        """Returns the code for rows of an encoding; compiles it, or reads it from disk, at the first use."""
        code = make_row_code(encoding, self.bf16, self._directory)
        return code if self._byte_activations else replace(code, byte_rows=None, byte_pack=None)

    def decode_rows(self, job: npt.NDArray[np.void], rows: RowCode, floats: int) -> None:
        """Sets a record's fields for encoded rows, with room for `floats` decoded float32 in each thread."""
        assert rows.unpack is not None
        each = -(-floats // 16) * 16
        job["unpack"], job["threads"] = rows.unpack.address, self.pool.threads
        job["decoded"], job["decoded_bytes"] = self.scratch("decoded", each * self.pool.threads), 4 * each
        job["borrowed"] = self._borrowed.ctypes.data
