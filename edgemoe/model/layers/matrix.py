"""A matrix of dense weights: numbers, or rows of bytes in an encoding."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear

from edgemoe.encodings.codec import unpack
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.types.encoding import Encoding

FEW_TOKENS = 16  # at most; with more, torch's products are faster
UNPACKED_WEIGHTS = 1 << 22  # at a time


class Matrix:
    """Multiplies vectors with a matrix [R, C]. Its rows are numbers where it is `plain`, else bytes [R, row_bytes]."""

    def __init__(self, rows: torch.Tensor, encoding: Encoding, columns: int, kernels: Kernels | None = None) -> None:
        """`encoding` is that of the rows, whether they are numbers or not. `kernels`, of its type, do single tokens."""
        self.rows, self.encoding, self.columns, self._kernels = rows, encoding, columns, kernels
        self.plain = rows.dtype != torch.uint8

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x [T, C] times the matrix transposed, [T, R] in the type of `x`."""
        if self.plain and self._kernels is not None and len(x) <= FEW_TOKENS:
            return self._by_kernel(x, bias, self._kernels)
        if self.plain:
            return linear(x, self.rows, bias)
        wide, out = x.float(), torch.empty((len(x), len(self)), dtype=torch.float32)
        step = max(1, UNPACKED_WEIGHTS // self.columns)
        for first in range(0, len(self), step):
            torch.mm(wide, self._unpacked(self.rows[first : first + step]).T, out=out[:, first : first + step])
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def _by_kernel(self, x: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> torch.Tensor:
        x, out, bf16 = x.contiguous(), torch.empty((len(x), len(self)), dtype=torch.float32), x.dtype == torch.bfloat16
        kernels.linear(self.rows.data_ptr(), len(self), self.columns, x.data_ptr(), bf16, len(x), out.data_ptr())
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def pick(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these numbers [n], float32 [n, C]."""
        rows = self.rows[numbers]
        return rows.float() if self.plain else self._unpacked(rows)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all weights as numbers, [R, C]; the matrix itself where it is of that type."""
        return self.rows.to(dtype) if self.plain else self._unpacked(self.rows).to(dtype)

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(unpack(rows.numpy(), self.encoding, self.columns)))
