"""A checkpoint's tensor as numbers: plain, or codes with the scales that they are multiplied with. Imports no torch.

Codes of fewer than 8 bits lie with the first one lowest. Scales are a matrix themselves: each one serves `block` rows
and columns. A tensor of more than two dimensions is a stack of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.codec import E2M1, E4M3, from_bf16, pack, place
from edgemoe.store.checkpoint import Tensor
from edgemoe.types.encoding import Encoding

Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Read = Callable[[Tensor, int, int], Bytes]  # so many bytes of a tensor, from an offset in it
PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "bfloat16"}  # safetensors dtype -> the encoding that keeps it
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
class Source:
    """Where a tensor's numbers lie.

    `kind` is a plain safetensors dtype, the name of an encoding, or "uint8": int8 plus 128.
    """

    name: str
    shape: Shape  # of the weights
    kind: str
    codes: Tensor
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale

    @property
    def plain(self) -> bool:
        return self.kind in PLAIN

    @property
    def kept_as(self) -> str:
        """Returns the encoding that holds the tensor as it is."""
        return {**PLAIN, "uint8": "int8"}.get(self.kind, self.kind)

    def number(self, index: Shape) -> int:
        """Returns the place in its stack of the matrix, or the vector, of this index."""
        number = 0
        for which, length in zip(index, self.shape, strict=False):
            number = number * length + which
        return number

    @property
    def _rows(self) -> int:
        return self.shape[-2] if len(self.shape) > 1 else 1

    def _stretch(self, tensor: Tensor, lines: int, index: int, first: int, after: int, read: Read) -> Bytes:
        """Reads lines first:after of matrix `index` of a tensor whose matrices have so many lines."""
        line_bytes = tensor.bytes // max(1, math.prod(self.shape[:-2]) * lines)
        found = read(tensor, (index * lines + first) * line_bytes, (after - first) * line_bytes)
        return found.reshape(after - first, line_bytes)

    def values(self, index: int, first: int, after: int, read: Read) -> tuple[Bytes, Floats]:
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

    def weights(self, index: int, first: int, after: int, read: Read) -> Floats:
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

    def encoded(self, index: int, first: int, after: int, encoding: Encoding, read: Read) -> Bytes:
        """Returns rows first:after in an encoding that `keeps` them."""
        codes, scales = self.values(index, first, after, read)
        return place(codes, self._spread(scales, encoding.group), encoding)


@dataclass(frozen=True, slots=True)
class Transform:
    """Some rows of a source, in an encoding."""

    source: Source
    take: SourceRows
    first: int  # of the rows that `take` says
    after: int
    encoding: Encoding

    @property
    def bytes(self) -> int:
        """Returns the size of the result, which is known beforehand."""
        return (self.after - self.first) * self.encoding.row_bytes(self._columns)

    @property
    def _columns(self) -> int:
        return self.take.matrix[-1] if len(self.take.matrix) > 1 else 1

    def run(self, read: Read) -> Bytes:
        """Returns the bytes of the rows, one after the other."""
        source, index, chosen = self.source, self.source.number(self.take.index), self._chosen()
        if len(self.take.matrix) == 1:
            line = source.weights(0, index, index + 1, read)[0, chosen.start : chosen.stop : chosen.step]
            return pack(line[:, None], self.encoding).ravel()
        if self.take.transposed:
            whole = source.weights(index, 0, source.shape[-2], read)
            return pack(whole.T[chosen.start : chosen.stop : chosen.step], self.encoding).ravel()
        low, after, picked = chosen[0], chosen[-1] + 1, slice(None, None, chosen.step)
        if source.keeps(self.encoding):
            return source.encoded(index, low, after, self.encoding, read)[picked].ravel()
        return pack(source.weights(index, low, after, read)[picked], self.encoding).ravel()

    def _chosen(self) -> range:
        rows = range(self.take.matrix[0]) if self.take.rows is None else self.take.rows
        return rows[self.first : self.after]


def transforms(source: Source, take: SourceRows, encoding: Encoding) -> tuple[Transform, ...]:
    """Cuts the rows into transformations of bounded size; a transposed matrix is read whole by each."""
    columns = take.matrix[-1] if len(take.matrix) > 1 else 1
    step = max(1, TRANSFORM_WEIGHTS // max(1, columns))
    step = take.count if len(take.matrix) == 1 else step
    return tuple(
        Transform(source, take, first, min(first + step, take.count), encoding) for first in range(0, take.count, step)
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
