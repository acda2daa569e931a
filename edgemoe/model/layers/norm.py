"""Normalises hidden states."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm


class Norm:
    """Computes RMSNorm in float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps  # weight [H] float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32 `x` [..., H] normalised, in float32."""
        return rms_norm(x, x.shape[-1:], self.weight, self.eps)
