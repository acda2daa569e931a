"""Clusters of requests of given sizes, and which worker gets which [ELDR, Decode Clustering and Routing].

K-means whose every assignment is a matching of requests to places, so that no cluster outgrows its worker. Ours differs
in this: sizes are in proportion to what workers can take, and new clusters go to the workers that had most of their
requests before, so that re-clustering moves few.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from edgemoe.policy.placement.packing import shares
from edgemoe.types.arrays import FloatArray, IntArray

MOST_ROUNDS = 12
STARTS = 2


class Clusters(NamedTuple):
    """Which cluster each request is in, and where each cluster's middle is."""

    member: IntArray  # [N]
    centroids: FloatArray  # [K, D] one long each, zero where a cluster is empty


def balanced(points: FloatArray, capacity: IntArray, rng: np.random.Generator, starts: int = STARTS) -> Clusters:
    """Returns clusters of points [N, D], one long each, with sizes in proportion to capacity [K]: the nearest of some.

    Every point is in one cluster. Several starts are tried, for where K-means ends depends on where it begins.
    """
    places = np.repeat(np.arange(len(capacity)), shares(len(points), capacity))
    tried = [_from(points, _spread(points, len(capacity), rng), places) for _ in range(starts)]
    return max(tried, key=lambda each: each[0])[1]


def matched(before: IntArray, after: IntArray, capacity: IntArray) -> IntArray:
    """Returns the worker of each new cluster [K], so that as many requests as possible stay where they were.

    `before` [N] has the worker of each request till now, -1 where that is gone; `after` [N] its new cluster, whose size
    is that of the worker of the same number. Only workers of equal capacity [K] exchange clusters.
    """
    workers = len(capacity)
    stays = np.zeros((workers, workers))  # [cluster, worker]
    known = before >= 0
    np.add.at(stays, (after[known], before[known]), 1)
    stays[capacity[:, None] != capacity] = -len(before) - 1.0
    answer: IntArray = linear_sum_assignment(stays, maximize=True)[1]
    return answer


def _spread(points: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """Returns centroids to begin with: points that lie apart (k-means++)."""
    chosen = [int(rng.integers(len(points)))]
    far = np.full(len(points), np.inf)
    for _ in range(count - 1):
        far = np.minimum(far, np.maximum(1 - points @ points[chosen[-1]], 0))
        total = float(far.sum())
        chosen.append(int(rng.choice(len(points), p=far / total if total > 0 else None)))
    return points[chosen]


def _from(points: FloatArray, centroids: FloatArray, places: IntArray) -> tuple[float, Clusters]:
    """Returns how near the points are to their centroids in all, and the clusters that a start leads to."""
    member: npt.NDArray[np.int64] = np.full(len(points), -1)
    for _ in range(MOST_ROUNDS):
        near = points @ centroids.T
        rows, columns = linear_sum_assignment(near[:, places], maximize=True)
        moved = np.empty_like(member)
        moved[rows] = places[columns]
        if (moved == member).all():
            break
        member = moved
        centroids = middles(points, member, len(centroids))
    return float(np.einsum("nd,nd->", points, centroids[member])), Clusters(member, centroids)


def middles(points: FloatArray, member: IntArray, count: int) -> FloatArray:
    """Returns the middle of each cluster [K, D], one long; zero where a cluster is empty."""
    sums = np.zeros((count, points.shape[1]), np.float32)
    np.add.at(sums, member, points)
    length = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.asarray(sums / np.where(length > 0, length, 1), np.float32)
