"""Encodes and decodes rows of affine encodings, in NumPy.

Factors are a dictionary of the arrays that `Encoding.factors` names. Scales and minima are the bits of float16 numbers,
whole numbers of parts int8. Scales and minima are searched by least squares [GGML,
make_qkx2_quants].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.rows import LEVELS
from edgemoe.types.encoding import LANE_COLUMNS, MIDDLE, ZERO, Encoding

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Factors = Mapping[str, npt.NDArray[np.generic]]  # [R, n] by name
MOST_PART = 127  # the largest whole number of a part
SPREADS = np.linspace(0.75, 1.05, 13, dtype=np.float32)  # tried, of the range that the codes span
TYPES = {"scale": np.uint16, "minimum": np.uint16}


def join_factors(factors: Factors, encoding: Encoding) -> Bytes:
    """Returns the factors as they lie behind the codes of rows, uint8 [R, factor_bytes]."""
    return np.concatenate([np.ascontiguousarray(factors[array.name]).view(np.uint8) for array in encoding.factors], 1)


def split_factors(laid: Bytes, encoding: Encoding, columns: int) -> dict[str, npt.NDArray[np.generic]]:
    """Takes the bytes apart that `join_factors` returns."""
    found: dict[str, npt.NDArray[np.generic]] = {}
    at = 0
    for array in encoding.factors:
        size = array.count(columns) * array.bytes
        some = np.ascontiguousarray(laid[:, at : at + size])
        found[array.name] = some.view(TYPES.get(array.name, np.int8))
        at += size
    return found


def numbers_of(bits: npt.NDArray[np.generic]) -> Floats:
    """Returns scales or minima as float32."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def bits_of_numbers(values: Floats) -> npt.NDArray[np.uint16]:
    """Returns scales or minima as the bits of float16, rounded; infinite ones stay so."""
    held = np.where(np.isinf(values), values, np.clip(values, -65504, 65504))
    return held.astype(np.float16).view(np.uint16)


def lines(factors: Factors, encoding: Encoding, columns: int) -> tuple[Floats, Floats]:
    """Returns scale and minimum of each column, float32 [R, C]: a weight is code * scale + minimum."""
    scale = _by_column(numbers_of(factors["scale"]), encoding.group, columns)
    scale = scale * _parts(factors, "scale", encoding, columns)
    if encoding.offset != MIDDLE:
        minimum = _by_column(numbers_of(factors["minimum"]), encoding.group, columns)
        of = scale if encoding.offset == ZERO else _parts(factors, "minimum", encoding, columns)
        return scale, minimum * of
    return scale, -scale * np.float32(0 if encoding.levels else encoding.middle)


def _by_column(values: Floats, group: int, columns: int) -> Floats:
    return np.repeat(values, group, axis=1)[:, :columns]


def _parts(factors: Factors, name: str, encoding: Encoding, columns: int) -> Floats:
    if not encoding.part:
        return np.ones((1, 1), np.float32)
    halves = [factors[f"{name}_part{half}"].astype(np.float32) for half in range(encoding.halves)]
    return np.repeat(np.stack(halves, 2).reshape(len(halves[0]), -1), encoding.part, axis=1)[:, :columns]


def decode_affine(codes: Bytes, factors: Factors, encoding: Encoding) -> Floats:
    """Returns the weights, float32 [R, C], of codes [R, C]. Products are exact, so that each is rounded once."""
    scale, minimum = lines(factors, encoding, codes.shape[1])
    made: Floats = (LEVELS[codes] if encoding.levels else codes.astype(np.float32)) * scale + minimum
    return made


def encode_affine(weights: Floats, encoding: Encoding) -> tuple[Bytes, dict[str, npt.NDArray[np.generic]]]:
    """Returns codes [R, C] and factors of weights, float32 [R, C]."""
    rows, columns = weights.shape
    whole = np.pad(weights, ((0, 0), (0, -columns % encoding.group)), mode="edge")
    shared = whole.reshape(rows, -1, encoding.part or encoding.group)
    if encoding.offset != MIDDLE:
        scale, minimum = _searched_line(shared, (1 << encoding.bits) - 1)
    else:
        scale, minimum = _searched_scale(shared, encoding), np.zeros(shared.shape[:2], np.float32)
    factors: dict[str, npt.NDArray[np.generic]] = {}
    _put(factors, "scale", scale, encoding, columns)
    if encoding.offset == ZERO:
        stored = numbers_of(factors["scale"])
        minimum = np.rint(np.divide(minimum, stored, out=np.zeros_like(minimum), where=stored != 0))
    if encoding.offset != MIDDLE:
        _put(factors, "minimum", minimum, encoding, columns)
    line, below = lines(factors, encoding, columns)
    return _nearest_codes(weights, line, below, encoding), factors


def _put(
    factors: dict[str, npt.NDArray[np.generic]], name: str, values: Floats, encoding: Encoding, columns: int
) -> None:
    """Stores values [R, n], one for each part or group, as numbers of groups and whole numbers of parts."""
    if not encoding.part:
        factors[name] = bits_of_numbers(values)
        return
    each = encoding.group // encoding.part
    grouped = values.reshape(len(values), -1, each)
    place = np.abs(grouped).argmax(2)[:, :, None]
    largest = np.take_along_axis(grouped, place, 2)[:, :, 0]
    factors[name] = bits_of_numbers(largest / np.float32(MOST_PART))
    number = np.repeat(numbers_of(factors[name]), each, axis=1)
    whole = np.divide(values, number, out=np.zeros_like(values), where=number != 0)
    parts = np.clip(np.rint(whole), -MOST_PART, MOST_PART).astype(np.int8)
    parts = parts[:, : -(-columns // LANE_COLUMNS) * encoding.halves].reshape(len(values), -1, encoding.halves)
    for half in range(encoding.halves):
        factors[f"{name}_part{half}"] = np.ascontiguousarray(parts[:, :, half])


def _nearest_codes(weights: Floats, scale: Floats, minimum: Floats, encoding: Encoding) -> Bytes:
    above = np.divide(weights - minimum, scale, out=np.zeros_like(weights), where=scale != 0)
    if encoding.levels:
        return _nearest_levels(above)
    codes: Bytes = np.clip(np.rint(above), 0, (1 << encoding.bits) - 1).astype(np.uint8)
    return codes


def _nearest_levels(values: Floats) -> Bytes:
    return np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, values).astype(np.uint8)


def _searched_line(groups: Floats, most: int) -> tuple[Floats, Floats]:
    """Returns scale and minimum [R, n] of groups [R, n, k] with the smallest square error; no minimum is positive."""
    low = np.minimum(groups.min(2), 0)
    span = groups.max(2) - low
    total, count = groups.sum(2), np.float32(groups.shape[2])
    best = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), low
    for spread in SPREADS:
        step = span * spread / np.float32(most)
        codes = np.divide(groups - low[:, :, None], step[:, :, None], out=np.zeros_like(groups), where=_over(step))
        codes = np.clip(np.rint(codes), 0, most)
        sums, squares = codes.sum(2), np.einsum("rgk,rgk->rg", codes, codes)
        both = np.einsum("rgk,rgk->rg", codes, groups)
        divisor = count * squares - sums * sums
        slope = np.divide(count * both - sums * total, divisor, out=step.copy(), where=divisor > 0)
        start = (total - slope * sums) / count
        above = start > 0
        through = np.divide(both, squares, out=step.copy(), where=squares > 0)
        slope, start = np.where(above, through, slope), np.where(above, np.float32(0), start)
        error = np.square(groups - codes * slope[:, :, None] - start[:, :, None]).sum(2)
        better = (error < best) & (slope >= 0)
        best, scale, minimum = (
            np.where(better, new, old) for new, old in ((error, best), (slope, scale), (start, minimum))
        )
    return scale.astype(np.float32), minimum.astype(np.float32)


def _over(step: Floats) -> npt.NDArray[np.bool_]:
    return (step > 0)[:, :, None]


def _searched_scale(groups: Floats, encoding: Encoding) -> Floats:
    """Returns the scales [R, n] of groups [R, n, k] with the smallest square error, around a middle or by levels."""
    place = np.abs(groups).argmax(2)[:, :, None]
    end = LEVELS[0] if encoding.levels else np.float32(-encoding.middle)
    largest = np.take_along_axis(groups, place, 2)[:, :, 0] / end
    best, scales = np.full(largest.shape, -1, np.float32), np.zeros_like(largest)
    for factor in np.linspace(0.8, 1.2, 17, dtype=np.float32):
        tried = largest * factor
        scaled = np.divide(groups, tried[:, :, None], out=np.zeros_like(groups), where=(tried != 0)[:, :, None])
        if encoding.levels:
            values = LEVELS[_nearest_levels(scaled)]
        else:
            values = np.clip(np.rint(scaled), -encoding.middle, encoding.middle - 1)
        both, square = np.einsum("rgk,rgk->rg", values, groups), np.einsum("rgk,rgk->rg", values, values)
        scale = np.divide(both, square, out=np.zeros_like(both), where=square > 0)
        better = both * scale > best
        best, scales = np.where(better, both * scale, best), np.where(better, scale, scales)
    return scales
