"""Fits clusters of expert signatures to recorded traffic. Takes seconds and imports SciPy: not for the front's process.

K-means whose every assignment is a matching of requests to places [ELDR, Decode Clustering and Routing]. Weights of
signatures are chosen by Spearman's rho [ELDR, Eq. 1] on one half of the requests and compared on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from edgemoe.policy.placement.problem import shares
from edgemoe.policy.routing.signatures import ClusterFit, Counts, ExpertClusters, keep_layers, rarity, signatures
from edgemoe.types.arrays import FloatArray, IntArray

Values = npt.NDArray[np.float64]
MOST_PAIRS = 3_000


class FittedWeights(NamedTuple):
    """The best weights [L, E], and the rho of all candidates."""

    name: str
    weights: FloatArray
    rho: dict[str, float]  # of each candidate, on the requests that it was not chosen by


def spearman(a: Values, b: Values) -> float:
    """Returns the rank correlation of two lists; 0 where one of them is all the same."""
    ranks = [rankdata(each) - (len(each) + 1) / 2 for each in (a, b)]
    scale = float(np.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1])))
    return float(ranks[0] @ ranks[1]) / scale if scale > 0 else 0.0


def pairs_of(requests: int, rng: np.random.Generator) -> IntArray:
    """Returns pairs of different requests [2, P]: all, or a sample."""
    every = requests * (requests - 1) // 2
    if every <= MOST_PAIRS:
        return np.array(np.triu_indices(requests, 1), np.int64)
    first = rng.integers(0, requests, MOST_PAIRS)
    return np.stack([first, (first + rng.integers(1, requests, MOST_PAIRS)) % requests])


def quality(prefill: Counts, decode: Counts, weights: FloatArray, pairs: IntArray) -> float:
    """Returns rho of signatures of prefill counts [N, L, E] against decode counts [N, L, E]."""
    near = signatures(prefill, weights)
    return spearman(_distance(near, pairs), _distance(signatures(decode, np.ones_like(weights)), pairs))


def best_layers(prefill: Counts, decode: Counts, weights: FloatArray, pairs: IntArray) -> list[int]:
    """Returns the layers to keep: adds the layer that helps rho most, until rho peaks."""
    weighted = (prefill * weights).astype(np.float32)
    dots = np.stack([np.einsum("pe,pe->p", *weighted[pairs, layer]) for layer in range(weighted.shape[1])])  # [L, P]
    squares = (weighted**2).sum(axis=2).T  # [L, N]
    target = _distance(signatures(decode, np.ones_like(weights)), pairs)
    dot, square = np.zeros(dots.shape[1]), np.zeros(squares.shape[1])
    order: list[int] = []
    reached: list[float] = []
    left = list(range(len(dots)))
    while left:
        rhos = [spearman(_far(dot + dots[layer], square + squares[layer], pairs), target) for layer in left]
        layer = left.pop(int(np.argmax(rhos)))
        order.append(layer)
        reached.append(max(rhos))
        dot, square = dot + dots[layer], square + squares[layer]
    return sorted(order[: int(np.argmax(reached)) + 1])


def choose_weights(prefill: Counts, decode: Counts, rng: np.random.Generator) -> FittedWeights:
    """Returns the best of plain counts and rarity, with all layers and with those chosen greedily.

    Takes prefill and decode counts [N, L, E] of at least four requests. Layers are chosen by one half of the requests,
    and all four are compared by the other.
    """
    order = rng.permutation(len(prefill))
    fit, test = order[::2], order[1::2]
    seen, judged = pairs_of(len(fit), rng), pairs_of(len(test), rng)
    candidates: dict[str, FloatArray] = {}
    for name, weights in (
        ("counts", np.ones(prefill.shape[1:], np.float32)),
        ("rarity", rarity(prefill[fit])),
    ):
        candidates[name] = weights
        layers = best_layers(prefill[fit], decode[fit], weights, seen)
        candidates[f"{name}, layers chosen"] = keep_layers(weights, layers)
    rho = {name: quality(prefill[test], decode[test], weights, judged) for name, weights in candidates.items()}
    best = max(rho, key=lambda name: rho[name])  # the plainer one of equals
    return FittedWeights(best, candidates[best], rho)


def _distance(unit: FloatArray, pairs: IntArray) -> Values:
    """Returns the cosine distance of each pair of unit vectors [N, D]."""
    return np.asarray(1 - np.einsum("pd,pd->p", unit[pairs[0]], unit[pairs[1]]), np.float64)


def _far(dot: Values, square: Values, pairs: IntArray) -> Values:
    """Returns the cosine distance of each pair, of their products [P] and the vectors' squares [N]."""
    return np.asarray(1 - dot / np.sqrt(np.maximum(square[pairs[0]] * square[pairs[1]], 1e-30)))


MOST_ROUNDS = 12
STARTS = 2


class RequestClusters(NamedTuple):
    """Which cluster each request is in, and where each cluster's middle is."""

    member: IntArray  # [N]
    centroids: FloatArray  # [K, D] one long each, zero where a cluster is empty


def balanced(points: FloatArray, capacity: IntArray, rng: np.random.Generator) -> RequestClusters:
    """Returns clusters of points [N, D], one long each, with sizes in proportion to capacity [K]: the nearest of some.

    Every point is in one cluster. Several starts are tried, for where K-means ends depends on where it begins.
    """
    places = np.repeat(np.arange(len(capacity)), shares(len(points), capacity))
    tried = [_from(points, _spread(points, len(capacity), rng), places) for _ in range(STARTS)]
    return max(tried, key=lambda each: each[0])[1]


def matched(before: IntArray, after: IntArray, capacity: IntArray) -> IntArray:
    """Returns the worker of each new cluster [K]; as many requests as possible stay at their worker.

    `before` [N] has each request's worker, -1 if that is gone. `after` [N] has its new cluster; cluster n has the size
    of worker n. Only workers of equal capacity [K] exchange clusters.
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


def _from(points: FloatArray, centroids: FloatArray, places: IntArray) -> tuple[float, RequestClusters]:
    """Returns the summed similarity of points and centroids, and the clusters that a start leads to."""
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
    return float(np.einsum("nd,nd->", points, centroids[member])), RequestClusters(member, centroids)


def middles(points: FloatArray, member: IntArray, count: int) -> FloatArray:
    """Returns the middle of each cluster [K, D], one long; zero where a cluster is empty."""
    sums = np.zeros((count, points.shape[1]), np.float32)
    np.add.at(sums, member, points)
    length = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.asarray(sums / np.where(length > 0, length, 1), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTraffic:
    """Prefill and decode counts [N, L, E] of recorded requests, and their decoded tokens [N]."""

    prefill: Counts
    decode: Counts
    decoded: IntArray


def fit_clusters(
    traffic: RecordedTraffic, capacity: IntArray, rng: np.random.Generator, before: IntArray | None = None
) -> tuple[ExpertClusters, FittedWeights]:
    """Returns clusters for workers of this capacity [K], and how the signatures' weights were chosen.

    `before` [N] has the worker that each request belonged to till now, -1 where that is gone. Takes at least four
    requests, and one for each worker.
    """
    fitted = choose_weights(traffic.prefill, traffic.decode, rng)
    points = signatures(traffic.prefill, fitted.weights)
    clusters = balanced(points, capacity, rng)
    if before is not None:
        worker = matched(before, clusters.member, capacity)
        clusters = RequestClusters(worker[clusters.member], clusters.centroids[np.argsort(worker)])
    return described(traffic, fitted.weights, points, clusters), fitted


def described(
    traffic: RecordedTraffic, weights: FloatArray, points: FloatArray, clusters: RequestClusters
) -> ExpertClusters:
    """Returns the fitted clusters of points [N, D] with their expert counts and their fit."""
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
    fit = ClusterFit(float(best.mean()), float(best.std()), nearest)
    return ExpertClusters(weights, clusters.centroids, decode.astype(np.float32), fit)


def _without_itself(points: FloatArray, clusters: RequestClusters) -> FloatArray:
    """Returns how near each point [N, D] is to the middle of the others of its cluster."""
    sums = np.zeros_like(clusters.centroids)
    np.add.at(sums, clusters.member, points)
    others = sums[clusters.member] - points
    length = np.linalg.norm(others, axis=1)
    answer: FloatArray = np.einsum("nd,nd->n", others, points) / np.where(length > 1e-6, length, 1)
    return answer
