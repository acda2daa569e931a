"""Turns float32 into the bits of bfloat16, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Returns finite float32 as the bits of bfloat16, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    """Returns the bits of bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
