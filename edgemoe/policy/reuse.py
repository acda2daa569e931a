"""Reuse distance: how many layer-steps until a layer runs again, and what that takes off an expert's worth.

Source: [Two-Tier, 4.1]. The source gives W for layers that are still to come only, though D for all; here W is
used for every layer, and a layer that has just run is the farthest, not the nearest.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.arrays import FloatArray, IntArray


def distance(layer: int, layers: int, *, published: bool = False) -> IntArray:
    """Layer-steps until each layer runs [L], while `layer` (from 0) runs and has made its choice.

    `published` is the source's D, by which the running layer is still to come.
    """
    ahead = (np.arange(layers) - layer) % layers
    if not published:
        ahead[layer] = layers
    return ahead


def weight(layer: int, layers: int, gamma: float, *, published: bool = False) -> FloatArray:
    """W = exp(-gamma D) of each layer, [L]."""
    falling: FloatArray = np.exp(-gamma * distance(layer, layers, published=published)).astype(np.float32)
    return falling
