"""Lists the parts of machine code that an engine links.

`python -m edgemoe.experts.compiled_parts DIRECTORY` compiles all for the processor of EDGEMOE_PROCESSOR, for a wheel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from edgemoe.experts.activity import CODES as ACTIVITY_CODES
from edgemoe.experts.predict.gate_lookahead import CODES as HINT_CODES
from edgemoe.experts.predict.next_use import PREDICTOR
from edgemoe.experts.tiers.assignments import CODES as ASSIGNMENT_CODES
from edgemoe.experts.tiers.device_exchange import CODES as EXCHANGE_CODES
from edgemoe.experts.tiers.residency_ops import CODES as TIER_CODES
from edgemoe.jit.object_cache import CompiledPart, build
from edgemoe.kernels.cpu.encoded.row_code import row_parts
from edgemoe.kernels.cpu.runtime import kernel_part, stage_parts
from edgemoe.types.encoding import AFFINE, BFLOAT16, ENCODINGS, FLOAT32, FP8, INT4, INT8, MXFP4

TIERS = CompiledPart((*TIER_CODES, *ASSIGNMENT_CODES, *ACTIVITY_CODES, *HINT_CODES, *EXCHANGE_CODES))


def model_parts(bf16: bool) -> Iterator[CompiledPart]:
    """Yields all parts that models of one weight type may link. Some gates are float32 in models of bfloat16."""
    yield kernel_part(bf16)
    yield from stage_parts(bf16)
    for encoding in (*((BFLOAT16,) if bf16 else ()), FLOAT32, INT8, INT4, MXFP4, FP8, *AFFINE):
        yield from row_parts(encoding, bf16)


def kernels_of(dtype: str) -> list[CompiledPart]:
    """Returns the kernels for a weight type by its name."""
    return [kernel_part(dtype == BFLOAT16.name)]


def tiers_and_rows(dtype: str, *encodings: str) -> list[CompiledPart]:
    """Returns the tiers, and the rows of encodings by their names, for a weight type."""
    rows = (row_parts(ENCODINGS[name], dtype == BFLOAT16.name) for name in encodings)
    return [TIERS, *chain.from_iterable(rows)]


def every_part() -> Iterator[CompiledPart]:
    """Yields all parts that some engine may link."""
    yield from dict.fromkeys((*model_parts(True), *model_parts(False), TIERS, PREDICTOR))


def main(directory: Path) -> None:
    for part in every_part():
        build(part.codes, directory, part.variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
