"""Normalises hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional
from torch.nn.functional import layer_norm, linear

from edgemoe.encodings.codec import unpack
from edgemoe.errors import StoreError
from edgemoe.families.spec import LayerAttention, ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.kv import DTYPES, zeros
from edgemoe.types.encoding import ENCODINGS, Encoding


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Returns float32 `x` [..., H] divided by its root mean square, times `weight` [H] if there is one.

    On the CPU torch's own takes four times as long for the same bits: it squares by its general power.
    """
    if not x.is_cpu:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return scaled if weight is None else scaled.mul_(weight)


class Norm:
    """Computes RMSNorm in float32, or LayerNorm where it is `centred`."""

    def __init__(self, weight: torch.Tensor, eps: float, centred: bool = False) -> None:
        self.weight, self.eps, self.centred = weight, eps, centred  # weight [H] float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32 `x` [..., H] normalised, in float32."""
        if self.centred:
            return layer_norm(x, x.shape[-1:], self.weight, None, self.eps)
        return rms_norm(x, self.weight, self.eps)


FEW_TOKENS = 16  # at most; with more, torch's products are faster, or tiles of decoded rows
UNPACKED_WEIGHTS = 1 << 22  # at a time


class DenseMatrix:
    """Multiplies vectors with a matrix [R, C]. Its rows are numbers where it is `plain`, else bytes [R, row_bytes]."""

    def __init__(self, rows: torch.Tensor, encoding: Encoding, columns: int, kernels: Kernels | None = None) -> None:
        """Stores rows in an encoding, plain numbers or codes. `kernels` multiply encoded rows with few tokens."""
        self.rows, self.encoding, self.columns, self._kernels = rows, encoding, columns, kernels
        self.plain = rows.dtype != torch.uint8

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x [T, C] times the matrix transposed, [T, R] in the type of `x`."""
        if self.plain and (self._kernels is None or len(x) > FEW_TOKENS):
            return linear(x, self.rows, bias)
        out = torch.empty((len(x), len(self)), dtype=torch.float32)
        if self._kernels is not None:
            self._by_kernel(self._kernels, x.contiguous(), out)
        else:
            self._by_torch(x.float(), out)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def _by_kernel(self, kernels: Kernels, x: torch.Tensor, out: torch.Tensor) -> None:
        multiply = kernels.linear if len(x) <= FEW_TOKENS else kernels.product
        place, sizes = self.rows.data_ptr(), (len(self), self.columns)
        is_bf16, code = x.dtype == torch.bfloat16, kernels.row_code(self.encoding)
        multiply(place, *sizes, x.data_ptr(), is_bf16, len(x), out.data_ptr(), code)

    def _by_torch(self, x: torch.Tensor, out: torch.Tensor) -> None:
        step = max(1, UNPACKED_WEIGHTS // self.columns)
        for first in range(0, len(self), step):
            torch.mm(x, self._unpacked(self.rows[first : first + step]).T, out=out[:, first : first + step])

    def rows_at(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these numbers [n], float32 [n, C]."""
        rows = self.rows[numbers]
        return rows.float() if self.plain else self._unpacked(rows)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all weights as numbers, [R, C]; the matrix itself where it is of that type."""
        return self.rows.to(dtype) if self.plain else self._unpacked(self.rows).to(dtype)

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(unpack(rows.numpy(), self.encoding, self.columns)))


ALIGNMENT = 64  # bytes: a cache line, and the widest vector
# Matrices that may be read in float32, as vectors are:
WIDENED = ("mlp.gate.weight", "conv1d.weight", "indexer.weights_proj.weight")
Read = Callable[..., torch.Tensor]


def decoded_bytes(spec: ModelSpec) -> int:
    """Returns the bytes that dense weights take where none is encoded."""
    shapes = dense_shapes(spec)
    size_bytes = sum(math.prod(shape) * (4 if len(shape) == 1 else spec.dtype_bytes) for shape in shapes.values())
    size_bytes += sum(math.prod(shape) * 4 for name, shape in shapes.items() if name.endswith(WIDENED))
    return size_bytes + ALIGNMENT * len(shapes)


FILE_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}


def held_bytes(spec: ModelSpec, path: Path) -> int:
    """Returns the bytes of the tensors in the file at `path` that this box holds. Raises StoreError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            present, total = set(file.keys()), 0
            for name in dense_shapes(spec):
                for spelling in spec.names.spellings(name):
                    if spelling in present:
                        part = file.get_slice(spelling)
                        total += math.prod(part.get_shape()) * FILE_ITEM_BYTES[part.get_dtype()]
                        break
            return total
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{path}: the dense weights cannot be read ({error}); pack the checkpoint again") from error


class WeightReader:
    """Copies tensors of a file into one allocation, one after the other. Encoded ones have allocations of their own."""

    def __init__(
        self, spec: ModelSpec, path: Path, file: Any, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self._kernels = kernels
        self._names, self._block, self._dtype, self._device = spec.names, spec.block, DTYPES[spec.dtype], device
        self._plain, self._encoding = ENCODINGS[spec.dtype], ENCODINGS.get(spec.dense_encoding)
        self._path, self._file, self._shapes, self._present = path, file, dense_shapes(spec), set(file.keys())
        self._memory = zeros([decoded_bytes(spec)], torch.uint8, device)
        self._taken = 0

    def __call__(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the tensors of these names, concatenated by rows. Raises StoreError.

        Norms are float32; all else is of the model's type unless `dtype` says otherwise.
        """
        stored = [self._stored(name) for name in names]
        dtype = dtype or (torch.float32 if "norm" in names[0] else self._dtype)
        if stored[0].dtype == torch.uint8:
            return self._encoded(names, stored).weights(dtype).to(self._device)
        result = self._allocate([sum(len(part) for part in stored), *stored[0].shape[1:]], dtype)
        for part, rows in zip(stored, torch.split(result, [len(part) for part in stored]), strict=True):
            rows.copy_(part)
        return result

    def norm(self, name: str) -> Norm:
        """Returns the norm of this name, as the block's record says. Raises StoreError."""
        weight = self(name)
        return Norm(weight.add_(1.0) if self._block.unit_offset else weight, self._block.eps, self._block.centred)

    def matrix(self, *names: str) -> DenseMatrix:
        """Returns the matrices of these names, one below the other. Only the CPU computes from encoded rows."""
        stored = [self._stored(name) for name in names]
        if stored[0].dtype != torch.uint8 or self._device.type != "cpu":
            return DenseMatrix(self(*names), self._plain, self._shapes[names[0]][1], self._kernels)
        matrix = self._encoded(names, stored)
        matrix.rows = self._allocate(matrix.rows.shape, torch.uint8).copy_(matrix.rows)
        return matrix

    def _encoded(self, names: Sequence[str], stored: Sequence[torch.Tensor]) -> DenseMatrix:
        assert self._encoding is not None
        rows = zeros([sum(len(part) for part in stored), stored[0].shape[1]], torch.uint8, "cpu")
        torch.cat(list(stored), out=rows)
        return DenseMatrix(rows, self._encoding, self._shapes[names[0]][1], self._kernels)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        start = self._taken
        size = math.prod(shape) * dtype.itemsize
        self._taken += -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[start : start + size].view(dtype).view(tuple(shape))

    def _stored(self, name: str) -> torch.Tensor:
        spelling = next((each for each in self._names.spellings(name) if each in self._present), None)
        if spelling is None:
            raise StoreError(f"{self._path} lacks {name}; pack the checkpoint again")
        tensor: torch.Tensor = self._file.get_tensor(spelling)
        expected = self._shapes[name]
        if tensor.dtype == torch.uint8 and self._encoding is not None and len(expected) == 2:
            expected = (expected[0], self._encoding.row_bytes(expected[1]))
        if tuple(tensor.shape) != expected:
            raise StoreError(f"{self._path}: {spelling} is {tuple(tensor.shape)}, but config.json says {expected}")
        return tensor


@dataclass(frozen=True, slots=True)
class LayerReader:
    """One layer of one model, and the reader of its weights."""

    spec: ModelSpec
    number: int  # among all layers
    reader: WeightReader

    @property
    def attention(self) -> LayerAttention:
        return self.spec.attention[self.number]

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns tensors of this layer, concatenated by rows; names after the layer's prefix. Raises StoreError."""
        return self.reader(*self._full(names), dtype=dtype)

    def norm(self, name: str) -> Norm:
        """Returns a norm of this layer. Raises StoreError."""
        return self.reader.norm(*self._full([name]))

    def matrix(self, *names: str) -> DenseMatrix:
        """Returns matrices of this layer, one below the other, encoded or not. Raises StoreError."""
        return self.reader.matrix(*self._full(names))

    def _full(self, names: Sequence[str]) -> list[str]:
        return [f"model.layers.{self.number}.{name}" for name in names]


def read_taps(reader: LayerReader, name: str) -> torch.Tensor:
    """Returns a convolution's weights [taps, channels] float32, the current token's last. Raises StoreError."""
    return reader.read(name, dtype=torch.float32)[:, 0].T.contiguous()
