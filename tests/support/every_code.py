"""Compiles all code that an engine can ask for, once for the processor of EDGEMOE_PROCESSOR and from the same LLVM code
for each processor named, and prints the symbols that are left undefined: {processor: {symbol: [codes]}}.

Run as `python -m support.every_code ROWS|KERNELS|ALL PROCESSOR...`; ROWS are those of each encoding, KERNELS these and
all else of bfloat16, ALL everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice

from edgemoe.experts.compiled_parts import every_part, model_parts
from edgemoe.jit.compile_target import CompileTarget, named
from edgemoe.jit.object_cache import Code, llvm_module, undefined_symbols


def every_code(part: str) -> Iterator[Code]:
    parts = {
        "ALL": every_part,
        "KERNELS": lambda: model_parts(True),
        "ROWS": lambda: islice(model_parts(True), 1, None),
    }
    for each in parts[part]():
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
