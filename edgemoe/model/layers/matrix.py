"""A matrix of dense weights: numbers, or rows of bytes in an encoding."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear

from edgemoe.encodings.codec import unpack
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.types.encoding import Encoding

FEW_TOKENS = 16  # at most; with more, torch's products are faster, or tiles of decoded rows
UNPACKED_WEIGHTS = 1 << 22  # at a time


class Matrix:
    """Multiplies vectors with a matrix [R, C]. Its rows are numbers where it is `plain`, else bytes [R, row_bytes]."""

    def __init__(self, rows: torch.Tensor, encoding: Encoding, columns: int, kernels: Kernels | None = None) -> None:
        """`encoding` is that of the rows, numbers or not; `kernels` are for encoded rows, and few tokens."""
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

    def pick(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these numbers [n], float32 [n, C]."""
        rows = self.rows[numbers]
        return rows.float() if self.plain else self._unpacked(rows)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all weights as numbers, [R, C]; the matrix itself where it is of that type."""
        return self.rows.to(dtype) if self.plain else self._unpacked(self.rows).to(dtype)

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(unpack(rows.numpy(), self.encoding, self.columns)))
