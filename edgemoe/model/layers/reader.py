"""Reads dense weights, checked against the spec: numbers into one allocation, encoded matrices as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import StoreError
from edgemoe.families.records import Attention
from edgemoe.families.spec import ModelSpec, dense_shapes
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.kv import DTYPES, zeros
from edgemoe.model.layers.matrix import Matrix
from edgemoe.model.layers.norm import Norm
from edgemoe.types.encoding import ENCODINGS

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
WIDENED = ("mlp.gate.weight", "conv1d.weight")  # what may be read in float32 beside vectors
Read = Callable[..., torch.Tensor]


def decoded_bytes(spec: ModelSpec) -> int:
    """Returns the bytes that dense weights take where none is encoded."""
    shapes = dense_shapes(spec)
    size_bytes = sum(math.prod(shape) * (4 if len(shape) == 1 else spec.dtype_bytes) for shape in shapes.values())
    size_bytes += sum(math.prod(shape) * 4 for name, shape in shapes.items() if name.endswith(WIDENED))
    return size_bytes + ALIGNMENT * len(shapes)


class WeightReader:
    """Copies tensors of a file into one allocation, one after the other; what is encoded into one of its own."""

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
        result = self._take([sum(len(part) for part in stored), *stored[0].shape[1:]], dtype)
        for part, rows in zip(stored, torch.split(result, [len(part) for part in stored]), strict=True):
            rows.copy_(part)
        return result

    def norm(self, name: str) -> Norm:
        """Returns the norm of this name, as the block's record says. Raises StoreError."""
        weight = self(name)
        return Norm(weight.add_(1.0) if self._block.unit_offset else weight, self._block.eps)

    def matrix(self, *names: str) -> Matrix:
        """Returns the matrices of these names, one below the other. Only the CPU computes from encoded rows."""
        stored = [self._stored(name) for name in names]
        if stored[0].dtype != torch.uint8 or self._device.type != "cpu":
            return Matrix(self(*names), self._plain, self._shapes[names[0]][1], self._kernels)
        matrix = self._encoded(names, stored)
        matrix.rows = self._take(matrix.rows.shape, torch.uint8).copy_(matrix.rows)
        return matrix

    def _encoded(self, names: Sequence[str], stored: Sequence[torch.Tensor]) -> Matrix:
        assert self._encoding is not None
        rows = zeros([sum(len(part) for part in stored), stored[0].shape[1]], torch.uint8, "cpu")
        torch.cat(list(stored), out=rows)
        return Matrix(rows, self._encoding, self._shapes[names[0]][1], self._kernels)

    def _take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
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
class LayerPlace:
    """Where a part of the decoder stands: in which layer of which model, and what reads its weights."""

    spec: ModelSpec
    number: int  # among all layers
    reader: WeightReader

    @property
    def attention(self) -> Attention:
        return self.spec.attention[self.number]

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns tensors of this layer, concatenated by rows; names after the layer's prefix. Raises StoreError."""
        return self.reader(*self._full(names), dtype=dtype)

    def norm(self, name: str) -> Norm:
        """Returns a norm of this layer. Raises StoreError."""
        return self.reader.norm(*self._full([name]))

    def matrix(self, *names: str) -> Matrix:
        """Returns matrices of this layer, one below the other, encoded or not. Raises StoreError."""
        return self.reader.matrix(*self._full(names))

    def _full(self, names: Sequence[str]) -> list[str]:
        return [f"model.layers.{self.number}.{name}" for name in names]
