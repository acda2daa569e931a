"""Decodes tensors of GGUF files to float32, and undoes the changes that converters to GGUF make.

Blocks of quantised types are taken apart into the codes and factors of affine encodings, to the bit [GGML]. The order
of bits in blocks: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import join_factors
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.codec import place
from edgemoe.encodings.rows import join
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.sources import PLAIN, Bytes, Floats, ReadBytes, SourceTensor
from edgemoe.types.encoding import INT4, IQ4_NL, MXFP4, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Encoding

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


MXFP4_BLOCK_BYTES = 17  # an exponent, then 32 codes: byte j has code j below and code j + 16 above
Undo = Callable[..., Floats]  # of the decoded parts, as they lie in the file


def decode(rows: Bytes, kind: str) -> Floats:
    """Returns rows of a type, uint8 [R, row_bytes], as float32 [R, C]."""
    rows = np.ascontiguousarray(rows)
    if kind == "F32":
        return rows.view(np.float32)
    if kind == "BF16":
        return from_bf16(rows.view(np.uint16))
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    from gguf import GGMLQuantizationType, dequantize  # takes a tenth of a second, and few need it

    with np.errstate(all="ignore"):
        found: Floats = dequantize(rows, GGMLQuantizationType[kind])
    return found


def whole(tensor: CheckpointTensor, read: ReadBytes) -> Floats:
    """Returns a tensor, in its shape."""
    lines = 1
    for length in tensor.shape[:-1]:
        lines *= length
    raw = read(tensor, 0, tensor.bytes).reshape(lines, tensor.bytes // lines)
    return decode(raw, tensor.dtype).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class BlockSource(SourceTensor):
    """A matrix, or a stack of them, in one of GGUF's types of blocks. `kind` is the type's name."""

    @property
    def kept_as(self) -> str:
        if self.kind == "MXFP4":
            return MXFP4.name
        if self.kind in BLOCK_TYPES:
            return BLOCK_TYPES[self.kind].encodings[0].name
        return INT4.name  # all others have fewer than 5 bits a weight

    @property
    def is_approximated(self) -> bool:
        return self.kind != "MXFP4" and self.kind not in BLOCK_TYPES

    def keeps(self, encoding: Encoding) -> bool:
        if self.kind in BLOCK_TYPES:
            return encoding in BLOCK_TYPES[self.kind].encodings
        return self.kind == "MXFP4" and encoding is MXFP4

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        return decode(self._stretch(self.codes, self._rows, index, first, after, read), self.kind)

    def encoded(self, index: int, first: int, after: int, encoding: Encoding, read: ReadBytes) -> Bytes:
        lines = self._stretch(self.codes, self._rows, index, first, after, read)
        if encoding.is_affine:
            return affine_rows(lines, self.kind, encoding)
        blocks = lines.reshape(len(lines), -1, MXFP4_BLOCK_BYTES)
        halves = blocks[:, :, 1:]
        codes = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(lines), -1)
        powers = np.ldexp(np.float32(1), blocks[:, :, 0].astype(np.int32) - 127)
        return place(codes, powers, encoding)


@dataclass(frozen=True, slots=True)
class MadeSource(SourceTensor):
    """A matrix or vector that `undo` makes of whole tensors of the file."""

    parts: tuple[CheckpointTensor, ...] = ()
    undo: Undo = np.asarray

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        return self.parts

    @property
    def plain(self) -> bool:
        return False

    @property
    def kept_as(self) -> str:
        return PLAIN.get(self.kind, "bfloat16")

    def keeps(self, encoding: Encoding) -> bool:
        return False

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        made = self.undo(*(whole(part, read) for part in self.parts)).reshape(-1, self.shape[-1])
        return np.ascontiguousarray(made[first:after], np.float32)


def less_one(weights: Floats) -> Floats:
    """Returns norms as weights that one is added to."""
    return weights - np.float32(1)


def log_of_negative(weights: Floats) -> Floats:
    """Returns A_log of -exp(A_log)."""
    return np.log(-weights)


def flattened(weights: Floats) -> Floats:
    """Returns the weights of groups as one vector."""
    return weights.reshape(-1)


def halves_of_heads(heads: int) -> Undo:
    """Turns rows of queries or keys, in each head pair by pair, into the first elements of pairs before the second."""

    def undo(weights: Floats) -> Floats:
        pairs = weights.reshape(heads, len(weights) // heads // 2, 2, *weights.shape[1:])
        return pairs.swapaxes(1, 2).reshape(weights.shape)

    return undo


def grouped_heads(key_heads: int, per_key: int, dim: int, skipped: int = 0, axis: int = 0) -> Undo:
    """Turns value heads that take turns between key heads into groups, one a key head; `skipped` rows stay."""

    def undo(weights: Floats) -> Floats:
        weights = np.moveaxis(weights, axis, 0)
        heads = weights[skipped:]
        turned = heads.reshape(per_key, key_heads, dim, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)
        return np.moveaxis(np.concatenate([weights[:skipped], turned]), 0, axis)

    return undo


def rows_to(places: list[int]) -> Undo:
    """Puts the rows of several matrices, one below the other, to these places."""

    def undo(*parts: Floats) -> Floats:
        together = np.concatenate(parts)
        made = np.empty_like(together)
        made[places] = together
        return made

    return undo


def rows_of(first: int, after: int) -> Undo:
    """Takes rows out of a matrix, or elements out of a vector, that several were fused into."""
    return lambda weights: weights[first:after]


def keys_and_values(keys: Floats, values: Floats) -> Floats:
    """Returns kv_b_proj of its parts: keys, turned [heads, rank, plain], and values [heads, value, rank]."""
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return both.reshape(-1, both.shape[-1])
