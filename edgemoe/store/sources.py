"""A checkpoint's tensor as numbers: plain, or codes with the scales that they are multiplied with. Imports no torch.

Codes of fewer than 8 bits lie with the first one lowest. Scales are a matrix themselves: each one serves `block` rows
and columns. A tensor of more than two dimensions is a stack of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import numbers_of, split_factors
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.codec import E4M3, pack, place
from edgemoe.encodings.rows import E2M1
from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.quantisation_config import quantisation
from edgemoe.types.encoding import Encoding

Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
ReadBytes = Callable[[CheckpointTensor, int, int], Bytes]  # tensor, offset, number of bytes
PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "bfloat16"}  # safetensors dtype -> the encoding that keeps it
E8M0_NAN = 255
FLOATS = ("scale", "minimum")  # the factors of affine encodings that are no whole numbers
EXPONENTS = ("U8", "F8_E8M0")  # types of scales that are powers of two
TRANSFORM_WEIGHTS = 1 << 22  # of one transformation, where rows may be cut


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of a source matrix, or elements of a source vector."""

    source: str  # the tensor's name in the family's newest spelling, unquantised
    shape: Shape  # of the whole source tensor
    index: tuple[int, ...] = ()  # which matrix of a stack
    transposed: bool = False  # the source holds [columns, rows]
    rows: range | None = None  # which of the matrix, in this order; None: all

    @property
    def matrix(self) -> Shape:
        """Returns the shape after `index` and transposition, before `rows`."""
        shape = self.shape[len(self.index) :]
        return shape[::-1] if self.transposed else shape

    @property
    def count(self) -> int:
        """Returns how many rows, or elements, it yields."""
        return self.matrix[0] if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """The place of a tensor's numbers.

    `kind` is a plain safetensors dtype, the name of an encoding, or "uint8": int8 plus 128.
    """

    name: str
    shape: Shape  # of the weights
    kind: str
    codes: CheckpointTensor
    scales: CheckpointTensor | None = None
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale

    @property
    def plain(self) -> bool:
        return self.kind in PLAIN

    @property
    def kept_as(self) -> str:
        """Returns the encoding that holds the tensor as it is."""
        return {**PLAIN, "uint8": "int8"}.get(self.kind, self.kind)

    @property
    def is_approximated(self) -> bool:
        """Returns whether no encoding holds the tensor as it is, so that `kept_as` is the nearest one."""
        return False

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """Returns the tensors of the checkpoint that it is made of."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    @property
    def factors(self) -> tuple[CheckpointTensor, ...]:
        """Returns the tensors with scales and minima."""
        return () if self.scales is None else (self.scales,)

    def number(self, index: Shape) -> int:
        """Returns the place in its stack of the matrix, or the vector, of this index."""
        number = 0
        for which, length in zip(index, self.shape, strict=False):
            number = number * length + which
        return number

    @property
    def _rows(self) -> int:
        return self.shape[-2] if len(self.shape) > 1 else 1

    def _stretch(
        self, tensor: CheckpointTensor, lines: int, index: int, first: int, after: int, read: ReadBytes
    ) -> Bytes:
        """Reads lines first:after of matrix `index` of a tensor whose matrices have `lines` lines."""
        line_bytes = tensor.bytes // max(1, math.prod(self.shape[:-2]) * lines)
        found = read(tensor, (index * lines + first) * line_bytes, (after - first) * line_bytes)
        return found.reshape(after - first, line_bytes)

    def values(self, index: int, first: int, after: int, read: ReadBytes) -> tuple[Bytes, Floats]:
        """Returns codes [n, C] and their scales [n, groups] of rows first:after of matrix `index`."""
        assert self.scales is not None
        lines = self._stretch(self.codes, self._rows, index, first, after, read)
        codes = _halves(lines) if self.kind in ("int4", "mxfp4") else lines
        if self.kind == "uint8":
            codes = codes ^ np.uint8(128)
        tall, scale_rows = self.block[0], -(-self._rows // self.block[0])
        begin, end = first // tall, -(-after // tall)
        raw = self._stretch(self.scales, scale_rows, index, begin, end, read)
        scales = _numbers(raw, self.scales.dtype)
        return codes[:, : self.shape[-1]], scales[np.arange(first, after) // tall - begin]

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        """Returns rows first:after of matrix `index`, float32 [n, C]."""
        if self.plain:
            return _numbers(self._stretch(self.codes, self._rows, index, first, after, read), self.kind)
        codes, scales = self.values(index, first, after, read)
        product: Floats = VALUES[self.kind](codes) * self._spread(scales, 1)
        return product

    def _spread(self, scales: Floats, group: int) -> Floats:
        """Returns a scale for each `group` columns."""
        columns = self.shape[-1]
        places = np.arange(-(-columns // group)) * group // self.block[1]
        return scales[:, places]

    def keeps(self, encoding: Encoding) -> bool:
        """Returns whether the encoding can hold the codes themselves, with the scales as they are."""
        wide = self.block[1]
        fits = not encoding.group or wide % encoding.group == 0 or wide >= self.shape[-1]
        return not self.plain and self.kept_as == encoding.name and fits

    def encoded(self, index: int, first: int, after: int, encoding: Encoding, read: ReadBytes) -> Bytes:
        """Returns rows first:after in an encoding that `keeps` them."""
        codes, scales = self.values(index, first, after, read)
        return place(codes, self._spread(scales, encoding.group), encoding)


def not_finite(tensor: CheckpointTensor, name: str) -> CheckpointError:
    """Returns the error of a tensor that has weights that are not numbers, or infinite."""
    return CheckpointError(
        f"{tensor.file}: tensor {name} has weights that are not numbers or infinite, with which a model "
        "says nothing of use; fetch the file again, or pack with --allow-nonfinite"
    )


def _has_nonfinite(rows: Bytes, encoding: Encoding, columns: int) -> bool:
    """Returns whether encoded rows, uint8 [R, row_bytes], have scales or codes that are not numbers or infinite."""
    codes, scales = np.split(rows[:, : encoding.row_bytes(columns)], [encoding.code_bytes(columns)], axis=1)
    if encoding.is_affine:
        factors = split_factors(scales, encoding, columns)
        return not all(np.isfinite(numbers_of(factors[name])).all() for name in FLOATS if name in factors)
    if encoding.name == "mxfp4":
        return bool((scales == E8M0_NAN).any())
    if encoding.name == "fp8" and ((codes & 0x7F) == 0x7F).any():
        return True
    scales = np.ascontiguousarray(scales)
    numbers = scales.view(np.float32) if encoding.scale_bytes == 4 else from_bf16(scales.view(np.uint16))
    return not np.isfinite(numbers).all()


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Some rows of a source, in an encoding."""

    source: SourceTensor
    selection: SourceRows
    first: int  # of the rows that `selection` says
    after: int
    encoding: Encoding

    @property
    def bytes(self) -> int:
        """Returns the size of the result, which is known beforehand."""
        return (self.after - self.first) * self.encoding.row_bytes(self._columns)

    @property
    def half(self) -> str | None:
        """Returns the name of a float16 tensor that is rounded to bfloat16 here."""
        return self.source.name if self.source.codes.dtype == "F16" and self.encoding.name == "bfloat16" else None

    @property
    def _columns(self) -> int:
        return self.selection.matrix[-1] if len(self.selection.matrix) > 1 else 1

    def values(self, read: ReadBytes) -> Floats:
        """Returns the rows of a matrix as the source has them, float32 [n, C]."""
        chosen = self._chosen()
        rows = self.source.weights(self.source.number(self.selection.index), chosen[0], chosen[-1] + 1, read)
        return rows[:: chosen.step]

    def run(self, read: ReadBytes, *, finite: bool = True) -> Bytes:
        """Returns the bytes of the rows, one after the other.

        Raises CheckpointError where a weight is not a number or infinite, if all must be `finite`.
        """
        source, index, chosen = self.source, self.source.number(self.selection.index), self._chosen()
        low, after, picked = chosen[0], chosen[-1] + 1, slice(None, None, chosen.step)
        if len(self.selection.matrix) == 1:
            rows = source.weights(0, index, index + 1, read)[0, chosen.start : chosen.stop : chosen.step][:, None]
        elif self.selection.transposed:
            rows = source.weights(index, 0, source.shape[-2], read).T[chosen.start : chosen.stop : chosen.step]
        elif source.keeps(self.encoding):
            kept = source.encoded(index, low, after, self.encoding, read)[picked]
            if finite and _has_nonfinite(kept, self.encoding, source.shape[-1]):
                raise not_finite(source.codes, source.name)
            return kept.ravel()
        else:
            rows = source.weights(index, low, after, read)[picked]
        if finite and not np.isfinite(rows).all():
            raise not_finite(source.codes, source.name)
        with np.errstate(invalid="ignore"):
            return pack(rows, self.encoding).ravel()

    def _chosen(self) -> range:
        rows = range(self.selection.matrix[0]) if self.selection.rows is None else self.selection.rows
        return rows[self.first : self.after]


def transforms(source: SourceTensor, selection: SourceRows, encoding: Encoding) -> tuple[EncodedRows, ...]:
    """Cuts the rows into transformations of bounded size; a transposed matrix is read whole by each."""
    columns = selection.matrix[-1] if len(selection.matrix) > 1 else 1
    step = max(1, TRANSFORM_WEIGHTS // max(1, columns))
    step = selection.count if len(selection.matrix) == 1 else step
    return tuple(
        EncodedRows(source, selection, first, min(first + step, selection.count), encoding)
        for first in range(0, selection.count, step)
    )


def _halves(lines: Bytes) -> Bytes:
    """Returns codes of 4 bits, a byte each, the lower half of each byte first."""
    codes = np.empty((len(lines), 2 * lines.shape[1]), np.uint8)
    codes[:, ::2], codes[:, 1::2] = lines & 15, lines >> 4
    return codes


def _numbers(raw: Bytes, dtype: str) -> Floats:
    """Returns a plain tensor's bytes as float32; exponents (of U8 scales) as powers of two."""
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "BF16":
        return from_bf16(raw.view(np.uint16))
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    assert dtype in EXPONENTS
    powers: Floats = np.ldexp(np.float32(1), raw.astype(np.int32) - 127)
    return powers


def _from_int4(codes: Bytes) -> Floats:
    return codes.astype(np.float32) - np.float32(8)


VALUES: dict[str, Callable[[Bytes], Floats]] = {
    "int4": _from_int4,
    "int8": lambda codes: codes.view(np.int8).astype(np.float32),
    "uint8": lambda codes: codes.view(np.int8).astype(np.float32),
    "mxfp4": lambda codes: E2M1[codes],
    "fp8": lambda codes: E4M3[codes],
}


UNUSED = (  # scales of activations and of caches, shapes
    *("weight_shape", "input_scale", "input_global_scale", "output_scale", "activation_scale"),
    *("k_scale", "v_scale", "q_scale"),
)
KINDS = {"I8": "int8", "F8_E4M3": "fp8"}
SCALE_TYPES = ("F32", "BF16", "F16")


def find_source(
    left: Mapping[str, CheckpointTensor], name: str, shape: Shape, config: Mapping[str, Any]
) -> SourceTensor:
    """Returns the tensor of this name, which is there.

    Raises CheckpointError and UnsupportedModel where it is of another shape or type.
    """
    if (blocks := left.get(f"{name}_blocks")) is not None:
        return _mxfp4(left, name, shape, blocks)
    if (packed := left.get(f"{name}_packed")) is not None:
        return _packed(left, name, shape, packed)
    tensor = left[name]
    if len(shape) == 1 and tensor.shape == (1, *shape):
        tensor = replace(tensor, shape=shape)
    _demand_shape(tensor, shape)
    if tensor.dtype in PLAIN:
        return SourceTensor(name, shape, tensor.dtype, tensor)
    scales = left.get(f"{name}_scale_inv") or left.get(f"{name}_scale")
    if tensor.dtype not in KINDS or scales is None:
        raise UnsupportedModel(
            f"{tensor.file}: tensor {tensor.name} is of type {tensor.dtype}"
            f"{'' if tensor.dtype not in KINDS else ', and has no scales'}; supported are {', '.join(PLAIN)}, and "
            f"{', '.join(KINDS)} with scales"
        )
    return _scaled(name, shape, KINDS[tensor.dtype], tensor, scales, _block_size(config))


def has_source(left: Mapping[str, CheckpointTensor], name: str) -> bool:
    """Returns whether the checkpoint has the tensor, in any form."""
    return any(f"{name}{end}" in left for end in ("", "_blocks", "_packed"))


def _demand_shape(tensor: CheckpointTensor, shape: Shape) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} should have the shape {list(shape)} by config.json, "
            f"but has {list(tensor.shape)}"
        )


def _mxfp4(left: Mapping[str, CheckpointTensor], name: str, shape: Shape, blocks: CheckpointTensor) -> SourceTensor:
    scales = left.get(f"{name}_scales")
    if scales is None:
        raise CheckpointError(f"{blocks.file}: tensor {name}_blocks is there, but not {name}_scales")
    _demand_shape(blocks, (*shape[:-1], -(-shape[-1] // 32), 16))
    _demand_shape(scales, (*shape[:-1], -(-shape[-1] // 32)))
    if blocks.dtype != "U8" or scales.dtype not in EXPONENTS:
        raise UnsupportedModel(f"{blocks.file}: tensor {name}_blocks is of types {blocks.dtype} and {scales.dtype}")
    return SourceTensor(name, shape, "mxfp4", blocks, scales, (1, 32))


def _packed(left: Mapping[str, CheckpointTensor], name: str, shape: Shape, packed: CheckpointTensor) -> SourceTensor:
    scales = left.get(f"{name}_scale")
    if packed.dtype == "U8" and scales is not None and scales.dtype in EXPONENTS:
        _demand_shape(packed, (*shape[:-1], shape[-1] // 2))
        _demand_shape(scales, (*shape[:-1], -(-shape[-1] // 32)))
        return SourceTensor(name, shape, "mxfp4", packed, scales, (1, 32))
    if scales is None or packed.dtype != "I32":
        raise CheckpointError(f"{packed.file}: tensor {packed.name} is of type {packed.dtype}, or has no {name}_scale")
    kinds = {-(-shape[-1] * bits // 32): kind for bits, kind in ((8, "uint8"), (4, "int4"))}
    kind = kinds.get(packed.shape[-1]) if packed.shape[:-1] == shape[:-1] else None
    if kind is None:
        raise CheckpointError(
            f"{packed.file}: {packed.name} of shape {list(packed.shape)} cannot hold {list(shape)} in 4 or 8 bits"
        )
    return _scaled(name, shape, kind, packed, scales, None)


def _scaled(
    name: str, shape: Shape, kind: str, codes: CheckpointTensor, scales: CheckpointTensor, block: tuple[int, int] | None
) -> SourceTensor:
    """Returns the source whose scales are one for all, for each row, for groups of a row, or for blocks."""
    if scales.dtype not in SCALE_TYPES:
        raise UnsupportedModel(f"{scales.file}: scales {scales.name} are of type {scales.dtype}")
    if len(shape) < 2:
        raise UnsupportedModel(f"{codes.file}: tensor {codes.name} is a vector in {kind}")
    rows, columns = shape[-2:]
    lead, found = shape[:-2], scales.shape[len(shape) - 2 :] if len(scales.shape) == len(shape) else scales.shape
    if found in ((), (1,), (1, 1)) and (not lead or scales.shape[:-2] == lead):
        return SourceTensor(name, shape, kind, codes, scales, (rows, columns))
    if scales.shape[:-2] != lead or len(found) not in (1, 2):
        found = (0, 0)
    tall, wide = found if len(found) == 2 else (found[0], 1)
    if block is not None and (tall, wide) == (-(-rows // block[0]), -(-columns // block[1])):
        return SourceTensor(name, shape, kind, codes, scales, block)
    if tall == rows and wide and columns % wide == 0:
        return SourceTensor(name, shape, kind, codes, scales, (1, columns // wide))
    raise CheckpointError(
        f"{scales.file}: scales {scales.name} of shape {list(scales.shape)} do not fit weights of {list(shape)}"
    )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block with one scale, where the configuration says them."""
    given = quantisation(config)
    sizes = given.get("weight_block_size")
    for group in (given.get("config_groups") or {}).values():
        sizes = sizes or (group.get("weights") or {}).get("block_structure")
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    return None
