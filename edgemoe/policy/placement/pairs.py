"""Routes drawn from counts of pairs chosen together, for boxes that tell no routes. Imports Numba.

A token's first expert is drawn by how often each is chosen, each next one by the same times how much oftener than by
chance it goes with every one that the token has: a model of pairs. Pairs that are not listed share what is left of the
count in the way that chance would. What is drawn has the pairs of the requests and none of their words or order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgemoe.policy.placement.compiled import entry
from edgemoe.policy.placement.problem import Values
from edgemoe.types.arrays import BoolArray, IntArray

Routes = npt.NDArray[np.int16]  # [T, L, k]
FLOOR = 1e-3  # of chance: how often pairs that were never seen are taken to occur


def heaviest_pairs(routes: Routes, experts: int, most: int) -> IntArray:
    """Returns the pairs [P, 4] that tokens chose together most, `most` a layer: layer, both experts, how often."""
    rows = list[IntArray]()
    for layer in range(routes.shape[1]):
        chosen = np.zeros((len(routes), experts), np.float32)
        np.put_along_axis(chosen, routes[:, layer].astype(np.int64), 1.0, axis=1)
        together = np.triu(chosen.T @ chosen, 1).astype(np.int64)
        best = np.argsort(-together, axis=None, kind="stable")[:most]
        best = best[together.ravel()[best] > 0]
        rows.append(np.stack([np.full(len(best), layer), *divmod(best, experts), together.ravel()[best]], axis=1))
    return np.concatenate(rows)


def routes_of_pairs(
    activations: Values, pairs: IntArray, top_k: int, tokens: int, rng: np.random.Generator, exists: BoolArray
) -> Routes:
    """Returns routes [T, L, k] of so many tokens with a node's activations [L, E] and pairs [P, 4].

    Layers have their first experts, those that exist [L, E].
    """
    layers = len(activations)
    routes = np.zeros((tokens, layers, top_k), np.int16)
    ends = np.searchsorted(pairs[:, 0], np.arange(layers + 1))
    for layer in range(layers):
        asked = activations[layer, : exists[layer].sum()]
        asked = asked + FLOOR * (asked.mean() or 1.0)
        listed = pairs[ends[layer] : ends[layer + 1]]
        listed = listed[(listed[:, 1:3] < len(asked)).all(axis=1)]
        lift = _lift(asked, listed, (top_k - 1) * asked.sum())
        routes[:, layer] = _draw(asked / asked.sum(), lift, rng.random((tokens, top_k)))
    return routes


def _lift(asked: Values, pairs: IntArray, ordered_pairs: float) -> Values:
    """How much oftener than by chance two experts are chosen together, [E, E]."""
    experts = len(asked)
    chance = np.outer(asked, asked)
    np.fill_diagonal(chance, 0.0)
    chance *= ordered_pairs / max(chance.sum(), 1e-300)
    first, second, count = pairs[:, 1], pairs[:, 2], pairs[:, 3].astype(np.float64)
    known = np.zeros((experts, experts), np.bool_)
    known[first, second] = known[second, first] = True
    left = max(0.0, ordered_pairs - 2 * count.sum())
    together = np.where(known, 0.0, chance * left / max(chance[~known].sum(), 1e-300))
    together[first, second] = together[second, first] = count
    lift: Values = (together + FLOOR * chance) / np.maximum(chance, 1e-300)
    return lift


@entry
def _draw(share: Values, lift: Values, random: Values) -> Routes:
    """Experts [T, k] drawn one after the other with random numbers [T, k].

    Written out: what Numba makes of whole arrays takes four times as long to compile.
    """
    tokens, top_k = random.shape
    routes = np.zeros((tokens, top_k), np.int16)
    weight = np.empty(len(share))
    for token in range(tokens):
        for expert in range(len(share)):
            weight[expert] = share[expert]
        for place in range(top_k):
            left = 0.0
            for expert in range(len(weight)):
                left += weight[expert]
            target, found = random[token, place] * left, -1
            for expert in range(len(weight)):
                if weight[expert] > 0.0:
                    found = expert
                    target -= weight[expert]
                    if target < 0.0:
                        break
            routes[token, place] = found
            for expert in range(len(weight)):
                weight[expert] *= lift[found, expert]
            weight[found] = 0.0
    return routes
