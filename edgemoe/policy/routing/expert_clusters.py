"""Clusters of requests by expert signature, one a worker: fitted to recorded traffic, asked for each request [ELDR].

A request goes to the least loaded of the workers whose centroid is nearly as near as the nearest: the locality band.
Ours differs in this: clusters are as large as workers have room, and are fitted anew when traffic has drifted from
them, so that few requests change their worker (the source leaves drift to future work).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.routing.signatures import Counts, signatures
from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

Values = npt.NDArray[np.float64]
BAND = 0.1  # [ELDR, Online]
SURE = 4.0  # standard errors that recent traffic is away from what was fitted, to count as drift
LEAST_DROP = 0.01  # of the mean similarity, that is worth fitting anew


class Fit(NamedTuple):
    """How near the requests that clusters were fitted to are to them: each to the nearest, itself left out."""

    similarity: float  # mean
    spread: float  # standard deviation
    nearest: IntArray  # [K] how many are nearest to each


@dataclass(frozen=True, slots=True, eq=False)
class ExpertClusters:
    """States where the clusters of K workers are, and what their requests choose."""

    weights: FloatArray  # [L, E] of signatures
    centroids: FloatArray  # [K, L * E]
    decode: FloatArray  # [K, L, E] how likely a decoded token of the cluster chooses each expert
    fit: Fit

    def similarity(self, counts: Counts) -> FloatArray:
        """Returns how near a request with these prefill counts [L, E] is to each worker's cluster [K], 0 to 1."""
        answer: FloatArray = self.centroids @ signatures(counts[None], self.weights)[0]
        return answer


def in_band(similarity: FloatArray, load: Values, room: BoolArray, band: float = BAND) -> int:
    """Returns the least loaded worker of those with room that are within the band of the nearest; -1 where none has.

    `load` [K] is what runs at each worker, of what can; the nearer one of equals.
    """
    if not room.any():
        return -1
    reach = np.where(room, similarity, -np.inf)
    inside = reach >= reach.max() - band
    return int(np.lexsort((-reach, np.where(inside, load, np.inf)))[0])


def drifted(clusters: ExpertClusters, recent: Counts) -> bool:
    """Returns whether requests with these prefill counts [N, L, E] are no longer what the clusters were fitted to.

    Either they are farther from the clusters, or they are others' share of them.
    """
    near = signatures(recent, clusters.weights) @ clusters.centroids.T
    fit, count = clusters.fit, len(recent)
    fitted = int(fit.nearest.sum())
    drop = fit.similarity - float(near.max(axis=1).mean())
    error = fit.spread * np.sqrt(1 / count + 1 / fitted)
    if drop > max(SURE * error, LEAST_DROP):
        return True
    now = np.bincount(near.argmax(axis=1), minlength=len(fit.nearest))
    both = now + fit.nearest
    part = both > 0
    ratio = np.sqrt(fitted / count)
    apart = float(((now * ratio - fit.nearest / ratio)[part] ** 2 / both[part]).sum())  # chi squared of two samples
    free = int(part.sum()) - 1
    return bool(apart > free + SURE * (2 * max(free, 1)) ** 0.5)
