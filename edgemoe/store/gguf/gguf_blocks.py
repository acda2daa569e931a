"""Takes blocks of GGUF's quantised types apart into the codes and factors of affine encodings, to the bit [GGML].

The order of bits in blocks: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import join_factors
from edgemoe.encodings.rows import join
from edgemoe.types.encoding import IQ4_NL, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Encoding

Bytes = npt.NDArray[np.uint8]
Fields = tuple[Bytes, dict[str, npt.NDArray[np.generic]]]  # codes [R, C], and factors as in `encodings.affine`
SIGN = np.uint16(1 << 15)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks: its bytes, how they are taken apart, and the encodings that hold the same weights."""

    block_bytes: int
    take_apart: Callable[[Bytes], Fields]  # of blocks [R, B, block_bytes]
    encodings: tuple[Encoding, ...]  # the closest one first


def affine_rows(lines: Bytes, kind: str, encoding: Encoding) -> Bytes:
    """Returns rows of a type, uint8 [R, bytes], as rows of an encoding that holds the same weights."""
    block = BLOCK_TYPES[kind]
    codes, factors = block.take_apart(lines.reshape(len(lines), -1, block.block_bytes))
    return join(codes, join_factors(factors, encoding), encoding)


def _numbers(blocks: Bytes, at: int) -> npt.NDArray[np.uint16]:
    """Returns the bits of the 16-bit numbers [R, B] at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.uint16)[:, :, 0]


def _nibbles(packed: Bytes, each: int) -> Bytes:
    """Returns codes of 4 bits [R, B, n]: of each run of `each` bytes the lower halves, then the upper ones."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, each)
    return np.concatenate([runs & 15, runs >> 4], axis=3).reshape(*packed.shape[:2], -1)


def _flat(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.reshape(len(values), -1)


def _k_factors(blocks: Bytes) -> dict[str, npt.NDArray[np.generic]]:
    """Returns the factors of Q4_K and Q5_K, whose scales and minima of 6 bits take 12 bytes. Minima are taken off."""
    packed = blocks[:, :, 4:16]
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=2)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=2)
    return {
        "scale": _numbers(blocks, 0),
        "minimum": _numbers(blocks, 2) ^ SIGN,
        "scale_part0": _flat(scale.astype(np.int8)),
        "minimum_part0": _flat(minimum.astype(np.int8)),
    }


def _q4_k(blocks: Bytes) -> Fields:
    return _flat(_nibbles(blocks[:, :, 16:], 32)), _k_factors(blocks)


def _q5_k(blocks: Bytes) -> Fields:
    above = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [R, B, 8, 32]
    codes = _nibbles(blocks[:, :, 48:], 32) | above.reshape(*blocks.shape[:2], -1) << np.uint8(4)
    return _flat(codes), _k_factors(blocks)


def _q6_k(blocks: Bytes) -> Fields:
    above = (
        blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    )
    codes = _nibbles(blocks[:, :, :128], 64) | above.reshape(*blocks.shape[:2], -1) << np.uint8(4)
    parts = _flat(np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8))
    return _flat(codes), {
        "scale": _numbers(blocks, 208),
        "scale_part0": np.ascontiguousarray(parts[:, ::2]),
        "scale_part1": np.ascontiguousarray(parts[:, 1::2]),
    }


def _q8_0(blocks: Bytes) -> Fields:
    return _flat(blocks[:, :, 2:] ^ np.uint8(128)), {"scale": _numbers(blocks, 0)}


def _q4_0(blocks: Bytes) -> Fields:
    return _flat(_nibbles(blocks[:, :, 2:], 16)), {"scale": _numbers(blocks, 0)}


def _q4_1(blocks: Bytes) -> Fields:
    return _flat(_nibbles(blocks[:, :, 4:], 16)), {"scale": _numbers(blocks, 0), "minimum": _numbers(blocks, 2)}


def _five_bits(blocks: Bytes) -> Bytes:
    """Returns codes [R, C] of a word with the upper bits of 32 codes, then their lower ones."""
    above = np.unpackbits(blocks[:, :, :4], axis=2, bitorder="little")
    return _flat(_nibbles(blocks[:, :, 4:], 16) | above << np.uint8(4))


def _q5_0(blocks: Bytes) -> Fields:
    return _five_bits(blocks[:, :, 2:]), {"scale": _numbers(blocks, 0)}


def _q5_1(blocks: Bytes) -> Fields:
    return _five_bits(blocks[:, :, 4:]), {"scale": _numbers(blocks, 0), "minimum": _numbers(blocks, 2)}


BLOCK_TYPES = {
    "Q8_0": BlockType(34, _q8_0, (Q8_0,)),
    "Q4_0": BlockType(18, _q4_0, (Q4_0,)),
    "IQ4_NL": BlockType(18, _q4_0, (IQ4_NL,)),
    "Q4_1": BlockType(20, _q4_1, (Q4_1,)),
    "Q5_0": BlockType(22, _q5_0, (Q5_0,)),
    "Q5_1": BlockType(24, _q5_1, (Q5_1,)),
    "Q4_K": BlockType(144, _q4_k, (Q4_K, Q5_K)),
    "Q5_K": BlockType(176, _q5_k, (Q5_K,)),
    "Q6_K": BlockType(210, _q6_k, (Q6_K,)),
}
