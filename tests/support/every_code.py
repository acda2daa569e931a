"""Compiles all code that an engine can ask for, once for the processor of EDGEMOE_PROCESSOR and from the same LLVM code
for each processor named, and prints the symbols that are left undefined: {processor: {symbol: [codes]}}.

Run as `python -m support.every_code ROWS|KERNELS|ALL PROCESSOR...`; ROWS are those of each encoding, KERNELS these and
all else of bfloat16, ALL everything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence

import llvmlite.binding as llvm

from edgemoe.experts.build import CODES
from edgemoe.experts.predict.next_use import CODES as PREDICTOR
from edgemoe.jit.compile_target import CompileTarget, named
from edgemoe.jit.object_cache import Code, undefined_symbols
from edgemoe.kernels.cpu.encoded.row_code import row_codes
from edgemoe.kernels.cpu.runtime import kernel_codes
from edgemoe.types.encoding import BFLOAT16, FLOAT32, FP8, INT4, INT8, MXFP4


def every_code(part: str) -> Iterator[Code]:
    for bf16 in (True, False) if part == "ALL" else (True,):
        if part != "ROWS":
            yield from kernel_codes(bf16)
        for encoding in (BFLOAT16 if bf16 else FLOAT32, INT8, INT4, MXFP4, FP8):
            yield from row_codes(encoding, bf16)
    if part == "ALL":
        yield from (*CODES, *PREDICTOR)


def undefined(codes: Sequence[Code], target: CompileTarget) -> dict[str, list[str]]:
    """Returns the undefined symbols of machine code for a processor, each with the codes that use it."""
    machine, found = target.machine_code(), {}
    own = {code.symbol for code in codes}
    for code in codes:
        text = code.compiled.inspect_llvm()
        if not target.is_native:
            text = re.sub(r'target triple = ".*"', f'target triple = "{machine.triple}"', text)
            text = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', text)
        for symbol in undefined_symbols(machine.emit_object(llvm.parse_assembly(text))):
            if symbol not in own:
                found.setdefault(symbol, []).append(code.name)
    return found


if __name__ == "__main__":
    every = tuple(dict.fromkeys(every_code(sys.argv[1])))
    print(json.dumps({name: undefined(every, named(name)) for name in sys.argv[2:]}))
