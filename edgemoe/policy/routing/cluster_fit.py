"""Fits expert clusters to recorded traffic. Takes seconds, and SciPy: not for the front's process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgemoe.policy.routing.balanced_clusters import Clusters, balanced, matched
from edgemoe.policy.routing.expert_clusters import ExpertClusters, Fit
from edgemoe.policy.routing.signature_quality import WeightsChoice, choose_weights
from edgemoe.policy.routing.signatures import Counts, signatures
from edgemoe.types.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTraffic:
    """States what requests chose: prefill and decode counts [N, L, E], and how many tokens they decoded [N]."""

    prefill: Counts
    decode: Counts
    decoded: IntArray


def fit_clusters(
    traffic: RecordedTraffic, capacity: IntArray, rng: np.random.Generator, before: IntArray | None = None
) -> tuple[ExpertClusters, WeightsChoice]:
    """Returns clusters for workers of this capacity [K], and how the signatures' weights were chosen.

    `before` [N] has the worker that each request belonged to till now, -1 where that is gone. Takes at least four
    requests, and one for each worker.
    """
    choice = choose_weights(traffic.prefill, traffic.decode, rng)
    points = signatures(traffic.prefill, choice.weights)
    clusters = balanced(points, capacity, rng)
    if before is not None:
        worker = matched(before, clusters.member, capacity)
        clusters = Clusters(worker[clusters.member], clusters.centroids[np.argsort(worker)])
    return described(traffic, choice.weights, points, clusters), choice


def described(traffic: RecordedTraffic, weights: FloatArray, points: FloatArray, clusters: Clusters) -> ExpertClusters:
    """Returns what is to be known of these clusters of points [N, D]."""
    count = len(clusters.centroids)
    sums = np.zeros((count, *traffic.decode.shape[1:]))
    np.add.at(sums, clusters.member, traffic.decode)
    tokens = np.bincount(clusters.member, weights=traffic.decoded, minlength=count)
    decode = sums / np.maximum(tokens, 1)[:, None, None]
    decode[tokens == 0] = sums.sum(axis=0) / max(tokens.sum(), 1)
    near = points @ clusters.centroids.T
    rows = np.arange(len(points))
    near[rows, clusters.member] = _without_itself(points, clusters)
    best = near.max(axis=1)
    nearest = np.bincount(near.argmax(axis=1), minlength=count)
    fit = Fit(float(best.mean()), float(best.std()), nearest)
    return ExpertClusters(weights, clusters.centroids, decode.astype(np.float32), fit)


def _without_itself(points: FloatArray, clusters: Clusters) -> FloatArray:
    """Returns how near each point [N, D] is to the middle of the others of its cluster."""
    sums = np.zeros_like(clusters.centroids)
    np.add.at(sums, clusters.member, points)
    others = sums[clusters.member] - points
    length = np.linalg.norm(others, axis=1)
    answer: FloatArray = np.einsum("nd,nd->n", others, points) / np.where(length > 1e-6, length, 1)
    return answer
