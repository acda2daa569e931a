"""Compiles all code of an engine for several processors, and prints its undefined symbols.

The code is compiled once, for EDGEMOE_PROCESSOR, to LLVM code, and from that for each processor named. Prints
{processor: {symbol: [codes]}}. Run as `python -m support.every_code SAMPLE|ALL PROCESSOR...`. The sample has one kernel
of bfloat16 from each file, and the rows of FP8, whose conversions processors lack most often.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from edgemoe.experts.compiled_parts import every_part
from edgemoe.jit.compile_target import CompileTarget, named
from edgemoe.jit.object_cache import Code, object_code, undefined_symbols
from edgemoe.kernels.cpu import decode_step
from edgemoe.kernels.cpu.encoded.row_code import row_parts
from edgemoe.kernels.cpu.runtime import kernel_part
from edgemoe.types.encoding import FP8

PACKAGE = "7edgemoe"  # in a mangled name


def every_code() -> Iterator[Code]:
    for part in every_part():
        yield from part.codes


def sample() -> Iterator[Code]:
    kernels = {file_of(code): code for code in reversed(kernel_part(True).codes)}
    kernels.pop(decode_step.__name__)  # which calls, and so compiles, most others
    yield from kernels.values()
    for part in row_parts(FP8, True):
        yield from part.codes


def file_of(code: Code) -> str:
    """Returns the module in which the code is written."""
    return code.name.partition(".<locals>")[0].rpartition(".")[0]


def undefined(codes: Sequence[Code], target: CompileTarget) -> dict[str, list[str]]:
    """Returns the undefined symbols of machine code for a processor, each with the codes that use it.

    Functions of edgemoe are left out: the linker finds them on every processor.
    """
    found: dict[str, list[str]] = {}
    for code in codes:
        for symbol in undefined_symbols(object_code((code,), target)):
            if PACKAGE not in symbol:
                found.setdefault(symbol, []).append(code.name)
    return found


if __name__ == "__main__":
    every = tuple(dict.fromkeys(every_code() if sys.argv[1] == "ALL" else sample()))
    print(json.dumps({name: undefined(every, named(name)) for name in sys.argv[2:]}))
