"""Decodes tensors of GGUF files to float32, and undoes the changes that converters to GGUF make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.codec import place
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.gguf.gguf_blocks import BLOCK_TYPES, affine_rows
from edgemoe.store.sources import PLAIN, Bytes, Floats, ReadBytes, SourceTensor
from edgemoe.types.encoding import INT4, MXFP4, Encoding

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
