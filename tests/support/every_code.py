"""Compiles all code of an engine for several processors, and prints its undefined symbols.

The code is compiled once, for EDGEMOE_PROCESSOR, to LLVM code, and from that for each processor named. Prints
{processor: {symbol: [codes]}}. Run as `python -m support.every_code KERNELS|ALL PROCESSOR...`. KERNELS are the ones of
bfloat16 and the rows of each encoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from edgemoe.experts.compiled_parts import every_part, model_parts
from edgemoe.jit.compile_target import CompileTarget, named
from edgemoe.jit.object_cache import Code, llvm_module, undefined_symbols


def every_code(part: str) -> Iterator[Code]:
    for each in every_part() if part == "ALL" else model_parts(True):
        yield from each.codes


def undefined(codes: Sequence[Code], target: CompileTarget) -> dict[str, list[str]]:
    """Returns the undefined symbols of machine code for a processor, each with the codes that use it."""
    machine, found = target.machine_code(), {}
    own = {code.symbol for code in codes}
    for code in codes:
        for symbol in undefined_symbols(machine.emit_object(llvm_module(code, target))):
            if symbol not in own:
                found.setdefault(symbol, []).append(code.name)
    return found


if __name__ == "__main__":
    every = tuple(dict.fromkeys(every_code(sys.argv[1])))
    print(json.dumps({name: undefined(every, named(name)) for name in sys.argv[2:]}))
