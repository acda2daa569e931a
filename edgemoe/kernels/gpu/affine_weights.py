"""Reads affine rows on a GPU (see `types.encoding`): codes of 4 to 8 bits, scales and minima.

A kind below 0 stands for such an encoding and its layout. Words with the low four bits of eight codes come in the
order of int4's; the bits above are in words of their own. Parameters of Triton functions have no annotations, because
Triton would evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from edgemoe.encodings.rows import LEVELS
from edgemoe.types.encoding import MIDDLE, MINIMUM, ZERO, Encoding

jit: Callable[[Any], Any] = triton.jit
UNEVEN: Any = tl.constexpr(tuple(float(level) for level in LEVELS))


def affine_kind(encoding: Encoding) -> int:
    """Returns the kind of an affine encoding: -1 less its fields, see `code_bits` and `lane_factors`."""
    fields = (
        (encoding.bits - 4 if encoding.bits < 8 else 3, 4),
        ((MIDDLE, MINIMUM, ZERO).index(encoding.offset), 4),
        (encoding.group.bit_length() - 6, 4),
        ((0, 32, 16).index(encoding.part), 4),
        (int(encoding.levels), 2),
    )
    kind, unit = -1, 1
    for value, size in fields:
        kind -= value * unit
        unit *= size
    return kind


@jit
def code_words(at, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the places in a row of its words `at` of the low bits."""
    bits: tl.constexpr = 4 + (-1 - KIND) % 4
    index = at
    if bits == 5 or bits == 6:
        index = at // 64 * (16 * bits) + at % 64
    return tl.max_contiguous(tl.multiple_of(index, [4]), [4])


@jit
def word_in_lane(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns which word of its lane each word `at` of the low bits is, or of whole bytes."""
    per: tl.constexpr = 128 if (-1 - KIND) % 4 == 3 else 64  # words of a run
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    which = at % per // 16
    if rest > 0:
        which = tl.where(at // per < full, which, (at - full * per) // rest)
    return which


@jit
def words_above(at, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the places in a row of the words with the upper bits of the codes in words `at`."""
    bits: tl.constexpr = 4 + (-1 - KIND) % 4
    full: tl.constexpr = n // 512
    rest: tl.constexpr = n % 512 // 32
    run = at // 64
    lanes = tl.where(run < full, 16, rest)
    inside = at - run * 64
    index = run * (16 * bits) + 4 * lanes + inside % 16
    if rest > 0:
        index = run * (16 * bits) + 4 * lanes + inside % lanes
    if bits == 6:
        index += word_in_lane(at, n, KIND) // 2 * lanes
    return index


@jit
def affine_number(word, above, which, J: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns number j of each word, float32, without its scale; `which` word of its lane it is."""
    fields: tl.constexpr = -1 - KIND
    if fields % 4 == 3:
        return (((word >> (8 * J)) & 0xFF) ^ 0x80).to(tl.float32)
    place: tl.constexpr = 8 * J if J < 4 else 8 * J - 28
    code = (word >> place) & 15
    if fields % 4 == 1:
        code |= ((above >> (8 * (J % 4) + J // 4 + 2 * which)) & 1) << 4
    if fields % 4 == 2:
        code |= ((above >> (8 * (J % 4) + J // 4 * 2 + which % 2 * 4)) & 3) << 4
    return affine_value(code, KIND)


@jit
def affine_value(code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns codes as numbers, float32."""
    value = code.to(tl.float32)
    if (-1 - KIND) // 256 == 1:
        for level in tl.static_range(16):
            value = tl.where(code == level, UNEVEN[level], value)
    return value


@jit
def bytes_at(places, wanted):  # type: ignore[no-untyped-def]
    """Loads from places; zero where it is not `wanted`. All are if that is None."""
    if wanted is None:
        result = tl.load(places)
    else:
        result = tl.load(places, mask=wanted, other=0)
    return result


@jit
def wide_numbers(rows, at, wanted):  # type: ignore[no-untyped-def]
    """Returns the float16 numbers at bytes `at` of rows, float32."""
    return bytes_at((rows + at).to(tl.pointer_type(tl.float16)), wanted).to(tl.float32)


@jit
def lane_factors(rows, lane, half, wanted, n: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scale and minimum of lanes of rows, which may be in two parts; all are broadcast. A weight is
    code * scale + minimum."""
    fields: tl.constexpr = -1 - KIND
    bits: tl.constexpr = 8 if fields % 4 == 3 else 4 + fields % 4
    offset: tl.constexpr = fields // 4 % 4
    group: tl.constexpr = 1 << (5 + fields // 16 % 4)
    part: tl.constexpr = fields // 64 % 4
    groups: tl.constexpr = (n + group - 1) // group
    lanes: tl.constexpr = n // 32
    begin: tl.constexpr = n // 8 * bits
    numbers: tl.constexpr = 2 if offset > 0 else 1
    which = lane // (group // 32)
    scale = wide_numbers(rows, begin + 2 * which, wanted)
    if offset > 0:
        minimum = wide_numbers(rows, begin + 2 * groups + 2 * which, wanted)
    if part > 0:
        at = rows + begin + 2 * numbers * groups + half * lanes + lane
        scale *= bytes_at(at.to(tl.pointer_type(tl.int8)), wanted).to(tl.float32)
        if offset == 1:
            below = at + part * lanes
            minimum *= bytes_at(below.to(tl.pointer_type(tl.int8)), wanted).to(tl.float32)
    if offset == 2:
        minimum *= scale
    if offset == 0:
        minimum = scale * (0.0 if fields // 256 == 1 else -(1 << (bits - 1)))
    return scale, minimum
