"""Compiles all code of an engine for several processors, and prints the undefined symbols that are not linked.

The code is compiled once, for EDGEMOE_PROCESSOR, to LLVM code, and from that for each processor named. Prints
{processor: {symbol: [codes]}}. Run as `python -m support.every_code SAMPLE|ALL PROCESSOR...`. The sample has one kernel
of bfloat16 from each file, and the packing of FP8, whose conversions processors lack most often. The products with its
rows, which have the same conversions, take LLVM fourteen seconds for a processor with short vectors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from edgemoe.experts.compiled_parts import every_part
from edgemoe.jit.compile_target import CompileTarget, named
from edgemoe.jit.object_cache import Code, object_code, undefined_symbols
from edgemoe.kernels.cpu import decode_step, gemv
from edgemoe.kernels.cpu.encoded.row_code import row_parts
from edgemoe.kernels.cpu.runtime import kernel_part
from edgemoe.types.encoding import FP8

PACKAGE = "7edgemoe"  # in a mangled name
LIBC = {"memcpy", "memmove", "memset", "sched_yield", "sem_post", "sem_timedwait", "sem_wait"}
LIBM = {"expf", "log10", "logf", "pow", "sqrtf"}  # the last for Arm by LLVM 20, of the lowest Numba
PYTHON = {
    *("PyBytes_FromStringAndSize", "PyErr_Clear", "PyErr_SetNone", "PyErr_SetString", "PyErr_WriteUnraisable"),
    *("PyExc_RuntimeError", "PyExc_StopIteration", "PyExc_SystemError", "PyObject_Hash", "PyTuple_Pack"),
    *("PyUnicode_FromKindAndData", "PyUnicode_FromString", "Py_DecRef"),
}
NUMBA = {
    *("numba_do_raise", "numba_gil_ensure", "numba_gil_release", "numba_unpickle"),
    "numba_runtime_build_excinfo_struct",
}
LINKED = LIBC | LIBM | PYTHON | NUMBA


def every_code() -> Iterator[Code]:
    for part in every_part():
        yield from part.codes


def sample() -> Iterator[Code]:
    kernels = {file_of(code): code for code in reversed(kernel_part(True).codes)}
    kernels.pop(decode_step.__name__)  # which calls, and so compiles, most others
    yield from kernels.values()
    for part in row_parts(FP8, True):
        yield from (code for code in part.codes if file_of(code) != gemv.__name__)


def file_of(code: Code) -> str:
    """Returns the module in which the code is written."""
    return code.name.partition(".<locals>")[0].rpartition(".")[0]


def undefined(codes: Sequence[Code], target: CompileTarget) -> dict[str, list[str]]:
    """Returns the symbols that machine code for a processor calls and no linker finds, each with the codes that do."""
    if not _unknown(codes, target):  # all at once: inner functions are optimised once
        return {}
    found: dict[str, list[str]] = {}
    for code in codes:
        for symbol in _unknown((code,), target):
            found.setdefault(symbol, []).append(code.name)
    return found


def _unknown(codes: Sequence[Code], target: CompileTarget) -> set[str]:
    """Returns undefined symbols outside `LINKED`. The linker finds functions of edgemoe on every processor."""
    symbols = set(undefined_symbols(object_code(codes, target))) - LINKED
    return {symbol for symbol in symbols if PACKAGE not in symbol}


if __name__ == "__main__":
    every = tuple(dict.fromkeys(every_code() if sys.argv[1] == "ALL" else sample()))
    print(json.dumps({name: undefined(every, named(name)) for name in sys.argv[2:]}))
