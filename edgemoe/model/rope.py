"""Rotary position embedding: default, linear [Linear-RoPE] and YaRN [YaRN].

Half-split layout as in the checkpoints of the supported families; float32 throughout.
"""

from __future__ import annotations

import math

import torch

from edgemoe.families.spec import ModelSpec, RopeSpec


class Rope:
    """Computes cos and sin of positions."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec.rope, spec.head_dim).to(device)  # [D / 2]
        self._scale = spec.rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin [T, D / 2] at positions [T]."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads x [T, heads, D] by cos and sin [T, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Returns radians per position, [dim / 2] float32."""
    periods = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "default":
        return 1.0 / periods
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor
    share = _extrapolated(rope, dim)
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
