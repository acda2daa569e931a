"""Rotary position embedding: default, linear [Linear-RoPE], proportional and YaRN [YaRN]. Float32 throughout.

Pairs are formed by the two halves of the rotated elements. Weights whose neighbours form pairs are reordered on
reading.
"""

from __future__ import annotations

import math

import torch

from edgemoe.families.spec import RopeSpec

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, dims / 2]


class RotaryEmbedding:
    """Computes cos and sin of positions."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._frequencies = frequencies(rope).to(device)  # [dims / 2]
        self._scale = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> Angles:
        """Returns cos and sin [T, dims / 2] at positions [T]."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dims of heads x [T, heads, D] by cos and sin [T, dims / 2]."""
    dims = 2 * cos.shape[-1]
    low, high = x[..., :dims].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., dims:]), dim=-1)


def half_split(rows: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Returns rows [heads * dim, ...] with the even ones of each head's first `dims` before the odd ones."""
    order = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, dim)]
    return rows.view(-1, dim, *rows.shape[1:])[:, order].flatten(0, 1)


def frequencies(rope: RopeSpec) -> torch.Tensor:
    """Returns radians per position, [dims / 2] float32."""
    dims = rope.dims
    periods = rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if rope.kind == "default":
        return 1.0 / periods
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor
    if rope.kind == "proportional":
        turning = torch.arange(dims // 2) < int(rope.share * dims // 2)
        return torch.where(turning, 1.0 / periods / rope.factor, 0.0)
    share = _extrapolated(rope, dims)
    return (1.0 / (rope.factor * periods)) * (1.0 - share) + (1.0 / periods) * share


def _extrapolated(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Returns the ramp [dim / 2]: 1 keeps a frequency, 0 divides it by `factor` [YaRN, Eq. 17-19]."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1.0 - ramp.clamp(0.0, 1.0)
