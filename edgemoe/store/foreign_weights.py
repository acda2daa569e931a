"""Reads quantised weights of other tools: kept exactly in groups with zero points, re-encoded otherwise.

AWQ     X.qweight [C, R / 8], the even ones of 8 columns first. X.qzeros [G, R / 8]. X.scales [G, R].
GPTQ    X.qweight [C bits / 32, R]. X.qzeros [G, R bits / 32]. X.scales [G, R]. X.g_idx [C] if columns are reordered.
zeros   X.weight_packed [R, C bits / 32]. X.weight_zero_point, packed along rows, of compressed-tensors.
NVFP4   X.weight or X.weight_packed, U8 [R, C / 2]. Scales in E4M3 [R, C / 16]. One float32 scale for the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import bits_of_numbers, join_factors
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.codec import E4M3
from edgemoe.encodings.rows import E2M1, join
from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.sources import SCALE_TYPES, Bytes, Floats, ReadBytes, Shape, SourceTensor
from edgemoe.types.encoding import INT4, INT8, LANE_COLUMNS, ZERO, Encoding, zero_encoding

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each half byte of a word has
MOST_INT4_BITS = 5.0  # a weight: smaller ones are re-encoded in int4, larger ones in int8
NVFP4_GROUP = 16
NUMPY_TYPES = {"I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1", "F32": "<f4", "F16": "<f2"}
Integers = npt.NDArray[np.int32]
Decode = Callable[..., Floats]  # of the tensors, as they lie in the checkpoint, into [R, C]
Left = Mapping[str, CheckpointTensor]


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """The properties of GPTQ's, AutoRound's and compressed-tensors' tensors that only the configuration tells."""

    less: int  # by which stored zero points are too small
    is_reordered: bool  # groups are of columns that do not lie side by side
    is_asymmetric: bool  # there are zero points


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix as whole numbers: a weight is (code - point) * scale, of the group of its column."""

    codes: Integers  # [R, C]
    scales: Floats  # [R, G]
    points: Integers  # [R, G]
    group: npt.NDArray[np.integer[Any]]  # [C]


TakeApart = Callable[..., Grouped]  # of the tensors, as they lie in the checkpoint


@dataclass(frozen=True, slots=True)
class DecodedTensor(SourceTensor):
    """A matrix that `decode` makes of whole tensors. `bits` is the size of one weight."""

    parts: tuple[CheckpointTensor, ...] = ()
    decode: Decode = np.asarray
    bits: float = 4.0

    @property
    def plain(self) -> bool:
        return False

    @property
    def kept_as(self) -> str:
        return INT4.name if self.bits < MOST_INT4_BITS else INT8.name

    @property
    def is_approximated(self) -> bool:
        return True

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        return self.parts

    def keeps(self, encoding: Encoding) -> bool:
        return False

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        try:
            made = self.decode(*(_array(part, read) for part in self.parts))
        except IndexError as error:
            raise CheckpointError(f"{self.codes.file}: {self.name}: its columns name groups that it has not") from error
        return np.ascontiguousarray(made[first:after], np.float32)


@dataclass(frozen=True, slots=True)
class GroupedTensor(SourceTensor):
    """A matrix of codes in groups with zero points, that `apart` makes of whole tensors.

    `held` is the encoding that has the same weights; None where columns are reordered, or groups do not fit.
    """

    parts: tuple[CheckpointTensor, ...] = ()
    apart: TakeApart = Grouped
    bits: float = 4.0
    held: Encoding | None = None
    size: int = 0  # columns of a group

    @property
    def plain(self) -> bool:
        return False

    @property
    def kept_as(self) -> str:
        return (self.held or (INT4 if self.bits < MOST_INT4_BITS else INT8)).name

    @property
    def is_approximated(self) -> bool:
        return self.held is None

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        return self.parts

    def keeps(self, encoding: Encoding) -> bool:
        if self.held is None or encoding.offset != ZERO or encoding.bits < self.held.bits:
            return False
        return self.size % encoding.group == 0 or self.size >= self.shape[-1]

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        found = self._read(read)
        try:
            points, scales = (each[first:after, found.group] for each in (found.points, found.scales))
        except IndexError as error:
            raise CheckpointError(f"{self.codes.file}: {self.name}: its columns name groups that it has not") from error
        with np.errstate(invalid="ignore"):  # infinite scales, which are told later
            product: Floats = (found.codes[first:after] - points).astype(np.float32) * scales
        return product

    def encoded(self, index: int, first: int, after: int, encoding: Encoding, read: ReadBytes) -> Bytes:
        found, columns = self._read(read), self.shape[-1]
        if not np.array_equal(found.group, np.arange(columns) // self.size):
            raise CheckpointError(
                f"{self.codes.file}: {self.name} has reordered columns, of which config.json says nothing; pack it "
                "with another encoding, as in --experts int8"
            )
        which = found.group[:: encoding.group]
        points = found.points[first:after, which].astype(np.float32)
        factors = {"scale": bits_of_numbers(found.scales[first:after, which]), "minimum": bits_of_numbers(-points)}
        return join(found.codes[first:after].astype(np.uint8), join_factors(factors, encoding), encoding)

    def _read(self, read: ReadBytes) -> Grouped:
        found = self.apart(*(_array(part, read) for part in self.parts))
        if found.group.min(initial=0) < 0:
            raise CheckpointError(f"{self.codes.file}: {self.name}: its columns name groups that it has not")
        return found


def _held(bits: int, columns: int, size: int, scales: CheckpointTensor) -> Encoding | None:
    """Returns the encoding that holds groups of `size` columns with zero points; None without one.

    Scales in bfloat16 are held where float16 has them, which is from 2^-17 on; `check_scales` tells of others.
    """
    if scales.dtype not in ("F16", "BF16") or columns % LANE_COLUMNS:
        return None
    return zero_encoding(bits, columns if size >= columns else size)


def group_size(columns: int, groups: int) -> int:
    """Returns the columns of a group, of which the last one may have fewer: then it is a power of two."""
    if columns % groups == 0:
        return columns // groups
    return next((size for size in (1 << i for i in range(3, 15)) if -(-columns // size) == groups), 1)


def find_foreign(left: Left, name: str, shape: Shape, about: GptqLayout) -> SourceTensor | None:
    """Returns the matrix of this name where it is there in one of these ways, None where it is not.

    Raises CheckpointError, UnsupportedModel.
    """
    base = name.removesuffix(".weight")
    if (words := left.get(f"{base}.qweight")) is not None:
        return _of_words(left, name, base, shape, words, about)
    if (packed := left.get(f"{name}_packed")) is not None and packed.dtype == "I32":
        if about.is_asymmetric and f"{name}_zero_point" not in left:
            raise CheckpointError(f"{packed.file}: {name} has no zero points, and config.json says that it has")
        return _with_zeros(left, name, shape, packed, about) if _has_zeros(left, name) else None
    codes = packed or left.get(name)
    if codes is not None and codes.dtype == "U8" and len(shape) == 2:
        return _nvfp4(left, name, shape, codes)
    return None


def has_foreign(left: Left, name: str) -> bool:
    """Returns whether the words of AWQ or GPTQ are there for a matrix."""
    return f"{name.removesuffix('.weight')}.qweight" in left


def _has_zeros(left: Left, name: str) -> bool:
    return f"{name}_zero_point" in left or f"{name}_g_idx" in left


def _of_words(
    left: Left, name: str, base: str, shape: Shape, words: CheckpointTensor, about: GptqLayout
) -> GroupedTensor:
    """Returns a matrix of AWQ or GPTQ. The shape of `qweight` tells which: AWQ packs rows, GPTQ packs columns."""
    rows, columns = _matrix(shape, words)
    zeros, scales, order = (left.get(f"{base}.{part}") for part in ("qzeros", "scales", "g_idx"))
    if scales is None or words.dtype != "I32" or (zeros is not None and zeros.dtype != "I32"):
        raise CheckpointError(f"{words.file}: {base} has a qweight of type {words.dtype}, but no scales that fit it")
    groups = scales.shape[0] if scales.shape else 0
    _demand_scales(scales)
    _demand_order(order, columns)
    if len(scales.shape) != 2 or scales.shape[1] != rows or not 1 <= groups <= columns:
        raise CheckpointError(f"{scales.file}: {scales.name} of shape {list(scales.shape)} does not fit {list(shape)}")
    if words.shape == (columns, rows // 8) and rows % 8 == 0:
        if zeros is None or zeros.shape != (groups, rows // 8):
            raise CheckpointError(f"{words.file}: {base} is one of AWQ, and its qzeros are missing or do not fit")
        size = group_size(columns, groups)
        held, whole = _held(4, columns, size, scales), (words, zeros, scales)
        return GroupedTensor(name, shape, "awq", words, scales, parts=whole, apart=_awq, held=held, size=size)
    if about.is_reordered and order is None:
        raise CheckpointError(f"{words.file}: {base} has no g_idx, and config.json says that its columns are reordered")
    bits = 32 * words.shape[0] / columns
    if words.shape[1:] != (rows,) or bits not in (2, 3, 4, 8):
        raise CheckpointError(f"{words.file}: {words.name} of shape {list(words.shape)} cannot hold {list(shape)}")
    if zeros is None or zeros.shape != (groups, rows * int(bits) // 32):
        raise CheckpointError(f"{words.file}: {base} is one of GPTQ, and its qzeros are missing or do not fit")
    parts = (words, zeros, scales) if order is None else (words, zeros, scales, order)
    size = group_size(columns, groups)
    held = None if about.is_reordered and order is not None else _held(int(bits), columns, size, scales)
    apart = _gptq(int(bits), about.less)
    return GroupedTensor(name, shape, "gptq", words, scales, parts=parts, apart=apart, bits=bits, held=held, size=size)


def _with_zeros(left: Left, name: str, shape: Shape, packed: CheckpointTensor, about: GptqLayout) -> GroupedTensor:
    """Returns an asymmetric matrix of compressed-tensors, or one with reordered columns."""
    rows, columns = _matrix(shape, packed)
    scales, zeros, order = (left.get(f"{name}_{part}") for part in ("scale", "zero_point", "g_idx"))
    bits = 32 * packed.shape[-1] // columns
    if scales is None or packed.shape[0] != rows or not 1 <= bits <= 8:
        raise CheckpointError(f"{packed.file}: {packed.name} of shape {list(packed.shape)} cannot hold {list(shape)}")
    groups = scales.shape[-1] if scales.shape else 0
    _demand_scales(scales)
    _demand_order(order, columns)
    if scales.shape != (rows, groups) or (zeros is not None and not _are_zeros(zeros, rows, groups, bits)):
        raise CheckpointError(f"{scales.file}: scales or zero points of {name} do not fit {list(shape)}")
    present = [part for part in (zeros, order) if part is not None]

    def apart(words: Integers, scales: Floats, *others: Integers) -> Grouped:
        rest = list(others)
        codes = _unpacked(words, bits, columns)
        points = np.full((rows, groups), 1 << (bits - 1), np.int32)
        if zeros is not None:
            held = rest.pop(0)
            packed_zeros = held.shape[0] != rows
            points = _unpacked(held.T, bits, rows).T if packed_zeros else held.astype(np.int32) + (1 << (bits - 1))
        group = rest[0] if rest else np.arange(columns) // size
        return Grouped(codes, scales.astype(np.float32), points, group)

    size = group_size(columns, groups)
    held = None if about.is_reordered and order is not None else _held(bits, columns, size, scales)
    parts = (packed, scales, *present)
    return GroupedTensor(
        name, shape, "zeros", packed, scales, parts=parts, apart=apart, bits=float(bits), held=held, size=size
    )


def _demand_scales(scales: CheckpointTensor) -> None:
    if scales.dtype not in SCALE_TYPES:
        raise UnsupportedModel(f"{scales.file}: scales {scales.name} are of type {scales.dtype}")


def _demand_order(order: CheckpointTensor | None, columns: int) -> None:
    if order is not None and (order.shape != (columns,) or order.dtype not in ("I32", "I64")):
        raise CheckpointError(
            f"{order.file}: {order.name} of type {order.dtype} and shape {list(order.shape)} is no order of "
            f"{columns} columns"
        )


def _are_zeros(zeros: CheckpointTensor, rows: int, groups: int, bits: int) -> bool:
    """Returns whether a tensor can have the zero points of a matrix: packed along rows, or one number each."""
    if zeros.shape == (rows, groups):
        return zeros.dtype in ("I8", "I32", "I64")
    return zeros.shape == (-(-rows * bits // 32), groups) and zeros.dtype == "I32"


def _nvfp4(left: Left, name: str, shape: Shape, codes: CheckpointTensor) -> DecodedTensor | None:
    """Returns a matrix of NVFP4, whose factor for all multiplies (modelopt) or divides (compressed-tensors)."""
    scales = left.get(f"{name}_scale")
    if scales is None or scales.dtype != "F8_E4M3" or codes.shape != (shape[0], shape[1] // 2):
        return None
    factor, inverse = left.get(f"{name}_scale_2"), left.get(f"{name}_global_scale")
    whole = factor or inverse
    if whole is None or math.prod(whole.shape) != 1 or scales.shape != (shape[0], shape[1] // NVFP4_GROUP):
        raise CheckpointError(f"{codes.file}: {name} is one of NVFP4, and its scales are missing or do not fit")
    _demand_scales(whole)

    def decode(codes: Bytes, scales: Bytes, whole: Floats) -> Floats:
        halves = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            told = np.where(np.isfinite(whole), whole, np.float32(np.nan)).reshape(())
            one = told if factor is not None else np.float32(1) / told
            product: Floats = E2M1[halves] * np.repeat(E4M3[scales] * one, NVFP4_GROUP, axis=1)
        return product

    return DecodedTensor(name, shape, "nvfp4", codes, parts=(codes, scales, whole), decode=decode)


def _awq(words: Integers, zeros: Integers, scales: Floats) -> Grouped:
    group = np.arange(len(words)) // group_size(len(words), len(scales))
    return Grouped(_awq_columns(words).T, scales.T, _awq_columns(zeros).T, group)


def _awq_columns(words: Integers) -> Integers:
    """Returns the numbers [n, 8 m] of words [n, m]."""
    columns = np.empty((*words.shape, 8), np.int32)
    for place, column in enumerate(AWQ_ORDER):
        columns[..., column] = words >> (4 * place) & 15
    return columns.reshape(len(words), -1)


def _gptq(bits: int, less: int) -> TakeApart:
    def apart(words: Integers, zeros: Integers, scales: Floats, order: Integers | None = None) -> Grouped:
        columns, rows = 32 * len(words) // bits, words.shape[1]
        codes = _unpacked(words.T, bits, columns)  # [R, C]
        points = (_unpacked(zeros, bits, rows) + less).T  # [R, G]
        group = np.arange(columns) // group_size(columns, len(scales)) if order is None else order
        return Grouped(codes, scales.T, points, group)

    return apart


def _unpacked(words: Integers, bits: int, count: int) -> Integers:
    """Returns the first `count` numbers of so many bits that lie in each row of words, the lowest bits first."""
    stream = np.ascontiguousarray(words).view(np.uint8)
    every = np.unpackbits(stream, axis=1, bitorder="little")[:, : count * bits].reshape(len(words), count, bits)
    numbers: Integers = (every.astype(np.int32) << np.arange(bits, dtype=np.int32)).sum(axis=2, dtype=np.int32)
    return numbers


def _matrix(shape: Shape, tensor: CheckpointTensor) -> tuple[int, int]:
    if len(shape) != 2 or len(tensor.shape) != 2:
        raise UnsupportedModel(f"{tensor.file}: {tensor.name} is no matrix; stacks of this kind cannot be read")
    return shape[0], shape[1]


def _array(tensor: CheckpointTensor, read: ReadBytes) -> npt.NDArray[np.generic]:
    """Returns a whole tensor; codes of E4M3 as they are."""
    raw = read(tensor, 0, tensor.bytes)
    if tensor.dtype == "BF16":
        return from_bf16(raw.view(np.uint16)).reshape(tensor.shape)
    if tensor.dtype == "F8_E4M3":
        return raw.reshape(tensor.shape)
    if tensor.dtype not in NUMPY_TYPES:
        raise UnsupportedModel(f"{tensor.file}: tensor {tensor.name} is of type {tensor.dtype}, which cannot be read")
    found = raw.view(NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape)
    return found.astype(np.float32) if tensor.dtype == "F16" else found
