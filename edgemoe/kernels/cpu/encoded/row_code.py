"""Chooses the code that multiplies and decodes rows of one encoding: the fastest that this processor has.

In bfloat16 models activations are whole numbers of 16 bits. They give the same bits whichever instructions multiply
them, so these are chosen by measurement. In float32 models, and for fp8, activations are float32, and the widest
vectors are taken.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from edgemoe.jit.object_cache import Code, link
from edgemoe.kernels.cpu.encoded.dots import make_encoded_rows
from edgemoe.kernels.cpu.encoded.packing import make_pack_whole, pack_floats
from edgemoe.kernels.cpu.encoded.unpacking import make_unpack
from edgemoe.kernels.cpu.encoded.vectors import EVERY, PORTABLE, Instructions, excess_of
from edgemoe.kernels.cpu.gemv import make_pack_some, make_rows
from edgemoe.types.encoding import Encoding

TRIAL_COLUMNS, TRIAL_BYTES = 2048, 1 << 20


@dataclass(frozen=True, slots=True)
class RowCode:
    """Gives the code for rows of one encoding."""

    encoding: Encoding
    rows: Code  # as `gemv.make_rows` makes it
    pack: Code  # pack(values, first, count, n, out): elements first:first + count of a vector of n, from float32
    unpack: Code | None  # as `make_unpack` makes it, into the model's type; None where tiles read the rows as they are


def usable(whole: bool) -> list[Instructions]:
    """Returns the instructions among which the fastest is chosen, the widest first; for floats one."""
    here = [each for each in EVERY if each.here]
    candidates = [each for each in here if each is not PORTABLE] or here
    return candidates if whole else candidates[:1]


def row_codes(encoding: Encoding, bf16: bool) -> tuple[Code, ...]:
    """Returns all code that `make_row_code` may choose from."""
    if not encoding.group:
        is_bf16 = encoding.name == "bfloat16"
        return make_rows(is_bf16), make_pack_some(is_bf16)
    whole = bf16 and encoding.name != "fp8"
    packs = [make_pack_whole(excess_of(encoding, each)) for each in usable(whole)] if whole else [pack_floats]
    rows = [make_encoded_rows(encoding, each, whole) for each in usable(whole)]
    return (*rows, make_unpack(encoding, usable(whole)[0], bf16), *packs)


@cache
def make_row_code(encoding: Encoding, bf16: bool, directory: Path | None) -> RowCode:
    """Returns the format for a model whose type is bfloat16 or float32; compiles it at the first use."""
    if not encoding.group:
        is_bf16 = encoding.name == "bfloat16"
        rows, pack = make_rows(is_bf16), make_pack_some(is_bf16)
        link((rows, pack), directory, encoding.name)
        return RowCode(encoding, rows, pack, None)
    whole = bf16 and encoding.name != "fp8"
    candidates = usable(whole)
    codes = {each: make_encoded_rows(encoding, each, whole) for each in candidates}
    for each, rows in codes.items():
        link((rows,), directory, f"{encoding.name}.{each.name}.{whole}")
    chosen = min(codes, key=lambda each: _seconds(codes[each], encoding)) if len(codes) > 1 else candidates[0]
    unpack, pack = make_unpack(encoding, candidates[0], bf16), pack_floats
    if whole:
        pack = make_pack_whole(excess_of(encoding, chosen))
    link((unpack, pack), directory, f"{encoding.name}.{candidates[0].name}.{chosen.name}.{bf16}")
    return RowCode(encoding, codes[chosen], pack, unpack)


def _seconds(rows: Code, encoding: Encoding) -> float:
    """Returns the shortest of some runs over rows that fit the second-level cache."""
    stride = encoding.row_bytes(TRIAL_COLUMNS)
    count = TRIAL_BYTES // stride // 2
    weights, x = np.zeros(count * stride, np.uint8), np.zeros(TRIAL_COLUMNS, np.float32)
    index, out, taken = np.zeros(1, np.int64), np.zeros(count, np.float32), []
    w, inputs = weights.ctypes.data, (x.ctypes.data, 0, index.ctypes.data, 1, TRIAL_COLUMNS)
    for _ in range(7):
        start = time.perf_counter()
        rows.call(w, stride, count, w, *inputs, out.ctypes.data, 0)
        taken.append(time.perf_counter() - start)
    return min(taken)
