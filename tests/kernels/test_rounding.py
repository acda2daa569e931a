"""Rounding of float32 to bfloat16 by integer operations, against torch and against the processor's own instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir

from edgemoe.jit.compile_target import TARGET
from edgemoe.jit.intrinsics import F32, INT, BFloat, f32_at, intrinsic, round_bf16, store_bf16, types
from edgemoe.jit.object_cache import Code, code

LANES = 8
# Every upper half, with lower halves at which rounding can differ: ties and their neighbours.
LOWER = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
BITS = (np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16) | LOWER).ravel()
VALUES = BITS.view(np.float32)


def _vectors(narrow: Callable[[Any, Any], Any]) -> Code:
    """Compiles round(values, count, out), which rounds vectors of LANES numbers with the LLVM code of `narrow`."""

    @intrinsic
    def one(typing: Any, source: Any, to: Any) -> Any:
        def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], ir.VectorType(F32, LANES).as_pointer()), align=4)
            halves = narrow(builder, value)
            builder.store(halves, builder.inttoptr(args[1], halves.type.as_pointer()), align=2)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), emit

    @code(INT, INT, INT)
    def round_vectors(values: int, count: int, out: int) -> None:
        for k in range(0, count, LANES):
            one(values + 4 * k, out + 2 * k)

    return round_vectors


def _by_integers(builder: Any, value: Any) -> Any:
    upper = builder.lshr(round_bf16(builder, value), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [16] * LANES))
    return builder.trunc(upper, ir.VectorType(ir.IntType(16), LANES))


def _by_instruction(builder: Any, value: Any) -> Any:
    return builder.fptrunc(value, ir.VectorType(BFloat(), LANES))


@code(INT, INT, INT)
def round_each(values: int, count: int, out: int) -> None:
    for k in range(count):
        store_bf16(out, k, f32_at(values)[k])


def _rounded(by: Code) -> np.ndarray:
    out = np.zeros(len(VALUES), np.uint16)
    by.call(VALUES.ctypes.data, len(VALUES), out.ctypes.data)
    return out


@pytest.mark.parametrize("by", [round_each, _vectors(_by_integers)], ids=["numbers", "vectors"])
def test_bfloat16_is_rounded_as_torch_rounds_it(by: Code) -> None:
    got = _rounded(by)
    expected = torch.from_numpy(VALUES).bfloat16().view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(VALUES)
    np.testing.assert_array_equal(got[numbers], expected[numbers])
    nan = got[~numbers]
    assert (nan & 0x7FFF > 0x7F80).all(), "a NaN became a number"
    np.testing.assert_array_equal(nan, (BITS[~numbers] >> 16) | 0x40, "the sign and the upper bits of a NaN are kept")


@pytest.mark.skipif(not TARGET.has("avx512bf16"), reason="the processor has no AVX-512 BF16")
def test_bfloat16_is_rounded_as_the_instruction_of_avx512_bf16_rounds_it() -> None:
    """Except subnormal numbers, which the instruction treats as 0."""
    normal = (np.abs(VALUES) >= np.finfo(np.float32).tiny) | (VALUES == 0) | np.isnan(VALUES)
    got, expected = _rounded(_vectors(_by_integers)), _rounded(_vectors(_by_instruction))
    np.testing.assert_array_equal(got[normal], expected[normal])
