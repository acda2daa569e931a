"""Expert signatures: unit vectors that lie near each other where requests choose the same experts [ELDR, Signature].

A request's signature is made of its prefill counts, of blocks that came from the prefix cache too. Cells are weighted
(1 everywhere, or by rarity, 0 in layers left out) and the whole is made one long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray

Counts = npt.NDArray[np.integer] | npt.NDArray[np.floating]


def rarity(counts: Counts) -> FloatArray:
    """Returns the weight of each expert [L, E]: the inverse document frequency in what requests chose [N, L, E]."""
    used = np.count_nonzero(counts, axis=0)
    return np.asarray(np.log((len(counts) + 1) / (used + 1)), np.float32)


def keep_layers(weights: FloatArray, layers: Sequence[int]) -> FloatArray:
    """Returns the weights [L, E] with those of all other layers zero."""
    kept = np.zeros_like(weights)
    kept[list(layers)] = weights[list(layers)]
    return kept


def signatures(counts: Counts, weights: FloatArray) -> FloatArray:
    """Returns the signatures [N, L * E] of counts [N, L, E]; zero where nothing is counted that has a weight."""
    flat = (counts * weights).reshape(len(counts), -1).astype(np.float32)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat / np.where(length > 0, length, 1), np.float32)
