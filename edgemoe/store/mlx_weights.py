"""Reads MLX's affine weights: X.weight U32 [..., R, C bits / 32], X.scales and X.biases [..., R, C / group].

A weight is code * scale + bias [MLX]. Codes are a stream of bits, the lowest first. Encodings with minima hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.encodings.affine import bits_of_numbers, join_factors
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.rows import join
from edgemoe.errors import CheckpointError
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.sources import Bytes, Floats, ReadBytes, Shape, SourceTensor
from edgemoe.types.encoding import INT8, LANE_COLUMNS, MINIMUM, Encoding, minimum_encoding

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
FACTOR_TYPES = ("F16", "BF16", "F32")
# A part of our names, and the part in MLX's conversions, which stack the experts of a layer.
MLX_NAMES = ((".mlp.experts.", ".mlp.switch_mlp."),)


@dataclass(frozen=True, slots=True)
class MlxTensor(SourceTensor):
    """A matrix, or a stack of them. `codes` has the words; `scales` and `minima` have a number for each group."""

    minima: CheckpointTensor | None = None
    bits: int = 4
    size: int = 64  # columns of a group
    held: Encoding | None = None  # has the same weights

    @property
    def plain(self) -> bool:
        return False

    @property
    def kept_as(self) -> str:
        return (self.held or INT8).name

    @property
    def is_approximated(self) -> bool:
        return self.held is None

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        return (self.codes, *self.factors)

    @property
    def factors(self) -> tuple[CheckpointTensor, ...]:
        assert self.scales is not None
        assert self.minima is not None
        return self.scales, self.minima

    def keeps(self, encoding: Encoding) -> bool:
        if self.held is None or encoding.offset != MINIMUM or encoding.part or encoding.bits < self.bits:
            return False
        return self.size % encoding.group == 0

    def weights(self, index: int, first: int, after: int, read: ReadBytes) -> Floats:
        codes, factors = self._codes(index, first, after, read), self._factors(index, first, after, read)
        scales, minima = (np.repeat(each, self.size, axis=1) for each in factors)
        with np.errstate(invalid="ignore"):  # infinite scales, which are told later
            made: Floats = codes.astype(np.float32) * scales + minima
        return made

    def encoded(self, index: int, first: int, after: int, encoding: Encoding, read: ReadBytes) -> Bytes:
        each = self.size // encoding.group
        scales, minima = (
            bits_of_numbers(np.repeat(factor, each, axis=1)) for factor in self._factors(index, first, after, read)
        )
        factors = join_factors({"scale": scales, "minimum": minima}, encoding)
        return join(self._codes(index, first, after, read), factors, encoding)

    def _codes(self, index: int, first: int, after: int, read: ReadBytes) -> Bytes:
        """Returns the codes of rows, a byte each, [n, C]."""
        lines = self._stretch(self.codes, self._rows, index, first, after, read)
        if self.bits == 8:
            return lines
        every = np.unpackbits(lines, axis=1, bitorder="little").reshape(len(lines), self.shape[-1], self.bits)
        return np.packbits(every, axis=2, bitorder="little")[:, :, 0]

    def _factors(self, index: int, first: int, after: int, read: ReadBytes) -> tuple[Floats, Floats]:
        """Returns scales and minima of rows, [n, C / group]."""
        found = []
        for tensor in self.factors:
            found.append(_floats(self._stretch(tensor, self._rows, index, first, after, read), tensor.dtype))
        return found[0], found[1]


def _floats(raw: Bytes, dtype: str) -> Floats:
    if dtype == "BF16":
        return from_bf16(raw.view(np.uint16))
    numbers: npt.NDArray[np.generic] = raw.view(np.float16 if dtype == "F16" else np.float32)
    return numbers.astype(np.float32)


def find_mlx(left: Mapping[str, CheckpointTensor], name: str, shape: Shape) -> MlxTensor | None:
    """Returns the matrix, or stack, of this name where it is one of MLX's; None where it is not.

    Raises CheckpointError where its tensors do not fit each other.
    """
    base, words = name.removesuffix(".weight"), left.get(name)
    if words is None or words.dtype != "U32" or len(shape) < 2:
        return None
    scales, minima = left.get(f"{base}.scales"), left.get(f"{base}.biases")
    if scales is None or minima is None or {scales.dtype, minima.dtype} - {*FACTOR_TYPES}:
        raise CheckpointError(f"{words.file}: {base} is one of MLX, and its scales or biases are missing or unknown")
    *lead, columns = shape
    groups = scales.shape[-1] if scales.shape else 0
    bits, rest = divmod(32 * (words.shape[-1] if words.shape else 0), columns)
    size = columns // groups if groups and columns % groups == 0 else 0
    fits = words.shape[:-1] == tuple(lead) == scales.shape[:-1] and scales.shape == minima.shape
    if not fits or rest or bits not in BITS or size not in GROUPS:
        raise CheckpointError(
            f"{words.file}: {base} of shapes {list(words.shape)} and {list(scales.shape)} cannot hold {list(shape)}"
        )
    is_exact = "F32" not in (scales.dtype, minima.dtype) and columns % LANE_COLUMNS == 0
    held = minimum_encoding(bits, size) if is_exact else None
    return MlxTensor(name, shape, "mlx", words, scales, minima=minima, bits=bits, size=size, held=held)
