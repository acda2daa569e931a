"""Expert signatures [ELDR, Signature]: how often requests choose each expert, as vectors and as bytes between boxes.

A request's signature is made of its prefill counts, of blocks that came from the prefix cache too. Bytes that cannot be
of this model decode to None: a faulty box costs its own requests a forecast, and nobody else anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.placement import ACTIVITY_UNIT

Counts = npt.NDArray[np.integer] | npt.NDArray[np.floating]


def rarity(counts: Counts) -> FloatArray:
    """Returns each expert's weight [L, E]: its inverse document frequency in the requests' counts [N, L, E]."""
    used = np.count_nonzero(counts, axis=0)
    return np.asarray(np.log((len(counts) + 1) / (used + 1)), np.float32)


def keep_layers(weights: FloatArray, layers: Sequence[int]) -> FloatArray:
    """Returns the weights [L, E] with all other layers set to zero."""
    kept = np.zeros_like(weights)
    kept[list(layers)] = weights[list(layers)]
    return kept


def signatures(counts: Counts, weights: FloatArray) -> FloatArray:
    """Returns the signatures [N, L * E] of counts [N, L, E]; zero where nothing is counted that has a weight."""
    flat = (counts * weights).reshape(len(counts), -1).astype(np.float32)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat / np.where(length > 0, length, 1), np.float32)


def absence(chance: FloatArray) -> FloatArray:
    """Returns the log of the chance that a request chooses none of the experts; of several it is the sum."""
    return np.asarray(np.log1p(-chance), np.float32)


LEAST = 0.5 / 255  # chance that a byte stands for which is 0
MOST_S = 10.0  # of any time that is told


class ModelSizes(NamedTuple):
    """How many layers a model has, and experts in each; 0 where it is not known."""

    layers: int = 0
    experts: int = 0


def shares_of(counts: Counts, top_k: int) -> tuple[int, bytes]:
    """Packs counts [L, E] for a message: the number of tokens, and each expert's share of them."""
    tokens = float(counts.sum()) / (len(counts) * top_k)
    shares = np.rint(counts * (ACTIVITY_UNIT / max(tokens, 1e-30)))
    return round(tokens), np.minimum(shares, ACTIVITY_UNIT).astype("<u2").tobytes()


def counts_of(tokens: int, chosen: bytes, sizes: ModelSizes) -> FloatArray | None:
    """Unpacks counts [L, E] from `shares_of`; None if the sizes do not fit."""
    if len(chosen) != 2 * sizes.layers * sizes.experts or not chosen or not tokens:
        return None
    shares = np.frombuffer(chosen, "<u2").reshape(sizes.layers, sizes.experts)
    return np.asarray(shares * np.float32(tokens / ACTIVITY_UNIT), np.float32)


def absent_bytes(union: FloatArray) -> bytes:
    """Packs the chance that no request chooses an expert, from its log [L, E]."""
    told: npt.NDArray[np.uint8] = np.rint(255 * np.exp(union)).astype(np.uint8)
    return told.tobytes()


def experts_of(absent: bytes) -> float:
    """Returns the expected number of experts that a step loads, over all layers, from `absent_bytes`."""
    return len(absent) - float(np.frombuffer(absent, np.uint8).sum()) / 255


def union_of(absent: bytes, sizes: ModelSizes) -> FloatArray | None:
    """Unpacks the log [L, E] from `absent_bytes`; None if the sizes do not fit."""
    if len(absent) != sizes.layers * sizes.experts or not absent:
        return None
    told = np.frombuffer(absent, np.uint8).reshape(sizes.layers, sizes.experts)
    return np.log(np.maximum(told / np.float32(255), np.float32(LEAST))).astype(np.float32)


def resident_of(far: bytes, far_s: Sequence[float], sizes: ModelSizes) -> FloatArray | None:
    """Returns the seconds [L, E] to reach each expert, 0 if it is in place; None if the sizes do not fit."""
    if len(far) != sizes.layers * sizes.experts or not far:
        return None
    seconds: npt.NDArray[np.float32] = np.array([0.0, *(min(each, MOST_S) for each in far_s)], np.float32)
    places = np.frombuffer(far, np.uint8).reshape(sizes.layers, sizes.experts)
    return seconds.take(places, mode="clip")


class ClusterFit(NamedTuple):
    """Similarity of the fitted requests to their nearest cluster, each without its own share in it."""

    similarity: float  # mean
    spread: float  # standard deviation
    nearest: IntArray  # [K] how many are nearest to each


@dataclass(frozen=True, slots=True, eq=False)
class ExpertClusters:
    """The clusters of K workers, and the experts that their requests choose."""

    weights: FloatArray  # [L, E] of signatures
    centroids: FloatArray  # [K, L * E]
    decode: FloatArray  # [K, L, E] how likely a decoded token of the cluster chooses each expert
    fit: ClusterFit

    def similarity(self, counts: Counts) -> FloatArray:
        """Returns the cosine similarity, 0 to 1, of prefill counts [L, E] to each worker's cluster, [K]."""
        answer: FloatArray = self.centroids @ signatures(counts[None], self.weights)[0]
        return answer
