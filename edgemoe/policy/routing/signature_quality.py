"""How well signatures foretell which requests decode with the same experts, and the weights that do it best.

The measure is rho, Spearman's rank correlation over pairs of requests between the distance of their signatures and that
of what they chose while decoding [ELDR, Eq. 1]. Ours differs in this: weights are chosen by requests, and compared by
others, so that none wins by fitting chance; plain counts are a candidate, for on routes of DeepSeek-V2-Lite and
GPT-OSS-20B they beat rarity. Pairs are a sample, for a thousand requests have half a million.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from edgemoe.policy.routing.signatures import Counts, keep_layers, rarity, signatures
from edgemoe.types.arrays import FloatArray, IntArray

Values = npt.NDArray[np.float64]
MOST_PAIRS = 3_000


class WeightsChoice(NamedTuple):
    """Weights [L, E], and what they and the others were found to be worth."""

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
    """Returns rho of signatures of prefill counts [N, L, E] against what was chosen in decoding [N, L, E]."""
    near = signatures(prefill, weights)
    return spearman(_distance(near, pairs), _distance(signatures(decode, np.ones_like(weights)), pairs))


def best_layers(prefill: Counts, decode: Counts, weights: FloatArray, pairs: IntArray) -> list[int]:
    """Returns the layers to keep: each time the one that helps rho most is added; those up to where it peaks."""
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


def choose_weights(prefill: Counts, decode: Counts, rng: np.random.Generator) -> WeightsChoice:
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
    return WeightsChoice(best, candidates[best], rho)


def _distance(unit: FloatArray, pairs: IntArray) -> Values:
    """Returns the cosine distance of each pair of unit vectors [N, D]."""
    return np.asarray(1 - np.einsum("pd,pd->p", unit[pairs[0]], unit[pairs[1]]), np.float64)


def _far(dot: Values, square: Values, pairs: IntArray) -> Values:
    """Returns the cosine distance of each pair, of their products [P] and the vectors' squares [N]."""
    return np.asarray(1 - dot / np.sqrt(np.maximum(square[pairs[0]] * square[pairs[1]], 1e-30)))
