"""Rows of encoded weights, with each set of instructions, against the reference and against whole numbers in NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.gate import in_gate
from support.kept import KERNELS

from edgemoe.encodings.affine import bits_of_numbers, join_factors
from edgemoe.encodings.bfloat import from_bf16, to_bf16
from edgemoe.encodings.codec import pack, place, unpack
from edgemoe.encodings.rows import join, order
from edgemoe.jit.compile_target import TARGET
from edgemoe.jit.object_cache import Code, link
from edgemoe.kernels.cpu import amx
from edgemoe.kernels.cpu.encoded.instructions import AVX512, EVERY, Instructions, excess_of
from edgemoe.kernels.cpu.encoded.packing import make_pack_whole, make_unpack, pack_floats
from edgemoe.kernels.cpu.encoded.row_code import BYTES, FLOATS, WORDS, make_byte_rows, make_encoded_rows, make_row_code
from edgemoe.kernels.cpu.runtime import KernelContext
from edgemoe.types.encoding import (
    A8_64,
    AFFINE,
    BFLOAT16,
    FP8,
    INT4,
    INT8,
    IQ4_NL,
    MXFP4,
    Q4_K,
    Q6_K,
    Z4_128,
    Encoding,
)

ROWS, TOKENS = 5, 7
ROW_KERNELS = KERNELS.with_name("rows")  # apart from the engines' cache, which these many kernels would overflow
COLUMNS = [32, 96, 256, 512, 768, 1312, 2880]
BY_NAME = {"ids": lambda each: each.name}
IN_GATE = [INT8, INT4, MXFP4, FP8, Q4_K, Q6_K, IQ4_NL, Z4_128, A8_64]  # one of each way of reading codes and factors
each_instructions = pytest.mark.parametrize("instructions", [each for each in EVERY if each.is_available], **BY_NAME)
each_scaled = pytest.mark.parametrize("encoding", in_gate([INT8, INT4, MXFP4, FP8, *AFFINE], IN_GATE), **BY_NAME)
each_whole = pytest.mark.parametrize("encoding", in_gate([INT8, INT4, MXFP4, *AFFINE], IN_GATE), **BY_NAME)
# Products with bytes read codes as the others do: fewer encodings show them, for each takes three seconds to compile.
each_whole_in_bytes = pytest.mark.parametrize(
    "encoding", in_gate([INT8, INT4, MXFP4, *AFFINE], [INT8, INT4, MXFP4, Q4_K, Q6_K]), **BY_NAME
)


@cache
def _linked(make: object, *arguments: object) -> Code:
    code: Code = make(*arguments)  # type: ignore[operator]
    names = [str(getattr(each, "name", each)) for each in arguments]
    # A folder keeps 48 kernels: with fewer in each, no run deletes kernels of the next one.
    link((code,), ROW_KERNELS / f"{TARGET.name}-{names[0]}", f"test.{'.'.join(names)}")
    return code


def _pack_whole(encoding: Encoding, instructions: Instructions, parts: int = WORDS) -> Code:
    return _linked(make_pack_whole, excess_of(encoding, instructions), parts, encoding.halves)


def _weights(columns: int) -> np.ndarray:
    return np.random.default_rng(columns).normal(0, 0.02, (ROWS, columns)).astype(np.float32)


def _packed(x: np.ndarray, code: Code) -> np.ndarray:
    packed = np.zeros_like(x)
    for token, values in enumerate(x):
        code.call(values.ctypes.data, 0, len(values), len(values), packed[token].ctypes.data)
    return packed


def _multiply(rows: Code, weights: np.ndarray, packed: np.ndarray, index: np.ndarray) -> np.ndarray:
    out, columns = np.zeros((len(index), len(weights)), np.float32), packed.shape[1]
    w, stride = weights.ctypes.data, weights.shape[1]
    inputs = (packed.ctypes.data, 4 * columns, index.ctypes.data, len(index), columns)
    rows.call(w, stride, len(weights), w, *inputs, out.ctypes.data, 4 * len(weights))
    return out


@each_instructions
@each_scaled
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_with_float_activations_come_near(encoding: Encoding, instructions: Instructions, columns: int) -> None:
    rows, weights = _linked(make_encoded_rows, encoding, instructions, FLOATS), pack(_weights(columns), encoding)
    x = np.random.default_rng(0).standard_normal((TOKENS, columns)).astype(np.float32)
    index = np.arange(TOKENS)[::-1].copy()
    exact = unpack(weights, encoding, columns).astype(np.float64)
    error = np.abs(_multiply(rows, weights, _packed(x, pack_floats), index) - x[index] @ exact.T)
    assert (error <= 2e-6 * (np.abs(x[index]) @ np.abs(exact.T))).all()


def _whole_rows(codes: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Returns rows of codes whose factors are whole numbers: scales and minima of 1, and small ones of parts."""
    columns = codes.shape[1]
    if not encoding.is_affine:
        return place(codes, np.ones((ROWS, columns // 32), np.float32), encoding)
    one, random = bits_of_numbers(np.ones(1, np.float32))[0], np.random.default_rng(columns)
    factors = {
        array.name: np.full((ROWS, array.count(columns)), one)
        if array.bytes == 2
        else random.integers(0, 4, (ROWS, array.count(columns))).astype(np.int8)
        for array in encoding.factors
    }
    return join(codes, join_factors(factors, encoding), encoding)


@each_instructions
@each_whole
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_with_whole_activations_are_exact(encoding: Encoding, instructions: Instructions, columns: int) -> None:
    """With scales of 1 the results are whole numbers that float32 holds."""
    random = np.random.default_rng(columns)
    x = random.integers(-20, 21, (TOKENS, columns))
    x[:, ::32] = random.choice([-127, 127], (TOKENS, columns // 32))
    codes = random.integers(0, 1 << encoding.bits, (ROWS, columns)).astype(np.uint8)
    codes[:, 1] = 1 << encoding.bits - 1  # of int8 -128, which other packers write
    weights = _whole_rows(codes, encoding)
    rows, index = _linked(make_encoded_rows, encoding, instructions, WORDS), np.arange(TOKENS)
    packed = _packed(x.astype(np.float32), _pack_whole(encoding, instructions))
    got = _multiply(rows, weights, packed, index)
    np.testing.assert_array_equal(got, x @ unpack(weights, encoding, columns).T.astype(np.float64))


@each_whole
@pytest.mark.parametrize("columns", COLUMNS)
def test_whole_activations_equal_numpy(encoding: Encoding, columns: int) -> None:
    x = np.random.default_rng(3).standard_normal((TOKENS, columns)).astype(np.float32)
    x[0, :32] = 0
    groups = x.reshape(TOKENS, -1, 32)
    largest = np.abs(groups).max(2)
    inverse = np.divide(np.float32(32512), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups * inverse[:, :, None]).astype(np.int64)
    weights = pack(_weights(columns), encoding)
    plain = unpack(weights, encoding, columns).astype(np.float64).reshape(ROWS, -1, 32)
    scales = (largest / np.float32(32512)).astype(np.float64)
    expected = np.einsum("tgk,rgk,tg->tr", codes, plain, scales)
    instructions = next(each for each in EVERY if each.is_available)
    rows = _linked(make_encoded_rows, encoding, instructions, WORDS)
    got = _multiply(rows, weights, _packed(x, _pack_whole(encoding, instructions)), np.arange(TOKENS))
    bound = np.einsum("tgk,rgk,tg->tr", np.abs(codes), np.abs(plain), scales)
    assert (np.abs(got - expected) <= 1e-6 * bound).all()


@each_scaled
@pytest.mark.parametrize("columns", COLUMNS)
def test_float_activations_give_the_same_bits_by_all_instructions_and_in_any_batch(
    encoding: Encoding, columns: int
) -> None:
    x = np.random.default_rng(5).standard_normal((TOKENS, columns)).astype(np.float32)
    weights, first = pack(_weights(columns), encoding), None
    for each in (each for each in EVERY if each.is_available):
        rows, packed = _linked(make_encoded_rows, encoding, each, FLOATS), _packed(x, pack_floats)
        together = _multiply(rows, weights, packed, np.arange(TOKENS))
        first = together if first is None else first
        np.testing.assert_array_equal(together, first)
        for batch in (1, 2, 4):
            parts = np.split(np.arange(TOKENS), range(batch, TOKENS, batch))
            some = [_multiply(rows, weights, packed, part) for part in parts]
            np.testing.assert_array_equal(np.concatenate(some), first)


@each_whole
@pytest.mark.parametrize("columns", COLUMNS)
def test_whole_activations_give_the_same_bits_by_all_instructions_and_in_any_batch(
    encoding: Encoding, columns: int
) -> None:
    x = np.random.default_rng(5).standard_normal((TOKENS, columns)).astype(np.float32)
    weights, first = pack(_weights(columns), encoding), None
    for each in (each for each in EVERY if each.is_available):
        rows, packed = _linked(make_encoded_rows, encoding, each, WORDS), _packed(x, _pack_whole(encoding, each))
        together = _multiply(rows, weights, packed, np.arange(TOKENS))
        first = together if first is None else first
        np.testing.assert_array_equal(together, first)
        alone = [_multiply(rows, weights, packed, np.array([token]))[0] for token in range(TOKENS)]
        np.testing.assert_array_equal(np.array(alone), first)


@each_whole_in_bytes
@pytest.mark.parametrize("columns", COLUMNS)
def test_byte_activations_equal_numpy_and_give_the_same_bits_in_any_batch(encoding: Encoding, columns: int) -> None:
    x = np.random.default_rng(7).standard_normal((TOKENS, columns)).astype(np.float32)
    x[1, :32] = 0
    groups = x.reshape(TOKENS, -1, 32)
    largest = np.abs(groups).max(2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups.astype(np.float64) * inverse[:, :, None]).astype(np.int64)
    weights = pack(_weights(columns), encoding)
    plain = unpack(weights, encoding, columns).astype(np.float64).reshape(ROWS, -1, 32)
    scales = (largest / np.float32(127)).astype(np.float64)
    expected, first = np.einsum("tgk,rgk,tg->tr", codes, plain, scales), None
    bound = np.einsum("tgk,rgk,tg->tr", np.abs(codes), np.abs(plain), scales)
    for each in (each for each in EVERY if each.is_available):
        rows, packed = _linked(make_byte_rows, encoding, each), _packed(x, _pack_whole(encoding, each, BYTES))
        together = _multiply(rows, weights, packed, np.arange(TOKENS))
        assert (np.abs(together - expected) <= 1e-6 * bound).all()
        first = together if first is None else first
        np.testing.assert_array_equal(together, first)
        alone = [_multiply(rows, weights, packed, np.array([token]))[0] for token in range(TOKENS)]
        np.testing.assert_array_equal(np.array(alone), first)


@each_instructions
@each_scaled
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_rows_are_decoded_as_the_reference_does(encoding: Encoding, instructions: Instructions, bf16: bool) -> None:
    unpack_rows = _linked(make_unpack, encoding, instructions, bf16)
    for columns in COLUMNS:
        weights, out = pack(_weights(columns), encoding), np.zeros((ROWS, columns), np.uint16 if bf16 else np.float32)
        unpack_rows.call(weights.ctypes.data, weights.shape[1], ROWS, columns, out.ctypes.data)
        expected = unpack(weights, encoding, columns)[:, order(columns, 1)]
        if bf16:
            out, expected = from_bf16(out), from_bf16(to_bf16(np.ascontiguousarray(expected)))
        np.testing.assert_array_equal(out, expected)


@each_scaled
def test_nothing_outside_of_a_row_is_read(encoding: Encoding) -> None:
    """The bytes after the last row are NaN, and so are the ones after the activations."""
    for columns in COLUMNS:
        weights = pack(_weights(columns), encoding)
        room = np.full((ROWS + 1, weights.shape[1]), 255, np.uint8)
        room[:ROWS] = weights
        x = np.full((2, columns), np.nan, np.float32)
        x[0] = np.random.default_rng(0).standard_normal(columns)
        packed = _packed(x, pack_floats)
        for instructions in (each for each in EVERY if each.is_available):
            rows = _linked(make_encoded_rows, encoding, instructions, FLOATS)
            assert np.isfinite(_multiply(rows, room[:ROWS], packed, np.zeros(1, np.int64))).all()


def test_a_format_is_made_once_and_has_instructions_of_this_processor() -> None:
    form = make_row_code(INT4, True, KERNELS)
    assert form is make_row_code(INT4, True, KERNELS)
    assert form.unpack is not None
    assert form.rows.is_linked
    assert form.pack is not pack_floats
    assert make_row_code(FP8, True, KERNELS).pack is pack_floats  # whose codes are no whole numbers
    assert make_row_code(INT4, False, KERNELS).pack is pack_floats
    assert make_row_code(BFLOAT16, True, KERNELS).unpack is None


@each_scaled
def test_activations_of_bytes_are_for_models_in_bfloat16_and_can_be_left_out(encoding: Encoding) -> None:
    assert make_row_code(encoding, False, KERNELS).byte_rows is None
    is_fast = AVX512.is_available and not amx.HERE and encoding is not FP8
    kernels = KernelContext(1, True, KERNELS)
    others = kernels.clone_for_thread()
    assert (kernels.row_code(encoding).byte_rows is not None) == is_fast
    assert others.row_code(encoding).byte_rows is None
