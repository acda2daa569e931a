"""Routes of tokens: drawn from counts of pairs, and scored under a placement. Imports Numba: for processes that solve.

Boxes report pairs of experts chosen together, not routes. Drawn routes have these pairs, and no words or order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.policy.placement.compiled import entry, inner
from edgemoe.policy.placement.problem import Placement, Values
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
    """Draws routes [T, L, k] for `tokens` tokens from a node's activations [L, E] and pairs [P, 4].

    Only experts in `exists` [L, E] are drawn; they are the first ones of each layer.
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
    """Computes how many times more often than by chance two experts are chosen together, [E, E]."""
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
    """Draws experts [T, k] one after the other from random numbers [T, k].

    Loops instead of array operations: Numba takes four times as long to compile the latter.
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


Masks = npt.NDArray[np.uint64]  # a bit for each node
ONE, NONE = np.uint64(1), np.uint64(0)
MOST_NODES = 64


@inner
def bits(mask: np.uint64) -> int:
    count = 0
    while mask != NONE:
        mask &= mask - ONE
        count += 1
    return count


@inner
def lowest(mask: np.uint64) -> int:
    place = 0
    while mask & ONE == NONE:
        mask >>= ONE
        place += 1
    return place


@inner
def _leave(scratch: Masks, depth: int | np.int64, count: int | np.int64, node: np.uint64) -> np.int64:
    """Writes the masks of scratch[depth] that `node` does not hit to the next row. Returns how many."""
    kept = np.int64(0)
    for i in range(count):
        if scratch[depth, i] & node == NONE:
            scratch[depth + 1, kept] = scratch[depth, i]
            kept += 1
    return kept


@inner
def _coverable(scratch: Masks, depth: int | np.int64, count: int | np.int64, nodes: int) -> bool:
    """Whether `nodes` nodes hit all `count` masks of scratch[depth]."""
    row = scratch[depth]
    if count == 0:
        return True
    if nodes == 0:
        return False
    common, shortest = row[0], row[0]
    for i in range(1, count):
        common &= row[i]
        if bits(row[i]) < bits(shortest):
            shortest = row[i]
    if common != NONE:
        return True
    if nodes == 1:
        return False
    left = shortest
    while left != NONE:
        node = left & (~left + ONE)
        left ^= node
        if _coverable(scratch, depth + 1, _leave(scratch, depth, count, node), nodes - 1):
            return True
    return False


@entry
def fewest(masks: Masks, count: int, scratch: Masks) -> tuple[int, np.uint64]:
    """Returns the least number of nodes that hit all masks, and the union of all such smallest sets of nodes."""
    forced = NONE
    for i in range(count):
        if masks[i] & (masks[i] - ONE) == NONE:
            forced |= masks[i]
    kept = 0
    common, union = ~NONE, NONE
    for i in range(count):
        if masks[i] & forced == NONE:
            scratch[0, kept] = masks[i]
            common &= masks[i]
            union |= masks[i]
            kept += 1
    least = bits(forced)
    if kept == 0:
        return least, forced
    if common != NONE:
        return least + 1, forced | common
    if kept == 2:
        return least + 2, forced | union
    nodes = 2
    while True:
        within = NONE
        left = union
        while left != NONE:
            node = left & (~left + ONE)
            left ^= node
            if _coverable(scratch, np.int64(1), _leave(scratch, np.int64(0), kept, node), nodes - 1):
                within |= node
        if within != NONE:
            return least + nodes, forced | within
        nodes += 1


@dataclass(frozen=True, slots=True)
class RouteScore:
    """Remote experts and peers called, as means over all nodes' tokens and layers."""

    remote_share: float  # the share of chosen experts that are not in the node's own memory
    rendezvous: float  # the fewest peers that have all missing experts
    local_layers: float  # share of layers for which no peer is called


def remote_calls(placement: Placement, activations: Values) -> float:
    """Returns how many of the activations [N, L, E] are of experts that the node has not in memory [Prism, Eq. 2]."""
    return float(activations[~placement.homes].sum())


def masks_of(homes: BoolArray) -> Masks:
    """Packs homes [N, L, E] into masks [L, E] with one bit for each node."""
    bit = ONE << np.arange(len(homes), dtype=np.uint64)
    return np.asarray(np.where(homes, bit[:, None, None], NONE).sum(axis=0), np.uint64)


def score(placement: Placement, routes: Sequence[Routes]) -> RouteScore:
    """Scores a placement on routes [T, L, k] of each node."""
    memory = masks_of(placement.homes)
    anywhere = memory | masks_of(placement.disk)
    totals = np.zeros(3)
    for node, tokens in enumerate(routes):
        totals += _count(tokens, memory, anywhere, node)
    layers = sum(tokens.shape[0] * tokens.shape[1] for tokens in routes)
    remote, called, local = (totals / max(layers, 1)).tolist()
    return RouteScore(remote / routes[0].shape[2], called, local)


@entry
def _count(routes: Routes, memory: Masks, anywhere: Masks, node: int) -> Values:
    """Counts remote experts, peers called and layers without a call, over a node's tokens [T, L, k]."""
    tokens, layers, chosen = routes.shape
    own = ONE << np.uint64(node)
    masks, scratch = np.zeros(chosen, np.uint64), np.zeros((chosen + 2, chosen), np.uint64)
    totals = np.zeros(3)
    for token in range(tokens):
        for layer in range(layers):
            missing = 0
            remote = 0
            for expert in routes[token, layer]:
                remote += memory[layer, expert] & own == NONE
                if anywhere[layer, expert] & own == NONE:
                    masks[missing] = anywhere[layer, expert]
                    missing += 1
            called, _ = fewest(masks, missing, scratch)
            totals[0] += remote
            totals[1] += called
            totals[2] += missing == 0
    return totals
