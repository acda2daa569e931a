"""What a placement costs: remote calls, rendezvous, latency. Imports Numba: for solvers, simulators and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.policy.placement.compiled import entry
from edgemoe.policy.placement.pairs import Routes
from edgemoe.policy.placement.peer_cover import NONE, ONE, Masks, fewest
from edgemoe.policy.placement.problem import Placement, Values
from edgemoe.types.arrays import BoolArray


@dataclass(frozen=True, slots=True)
class RouteScore:
    """States what tokens meet, as means over all nodes' tokens and layers."""

    remote_share: float  # of the chosen experts, those that are not in the node's own memory
    rendezvous: float  # peers called, the fewest that have what is missing
    local_layers: float  # share of layers for which no peer is called


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """States what calls and computing take: seconds for each call, or each batch, and for each token in it."""

    call_s: Values  # [N, N] from node to node; 0 to itself
    call_token_s: Values  # [N, N]
    compute_s: Values  # [N] one expert
    compute_token_s: Values  # [N]


def remote_calls(placement: Placement, activations: Values) -> float:
    """Returns how many of the activations [N, L, E] are of experts that the node has not in memory [Prism, Eq. 2]."""
    return float(activations[~placement.homes].sum())


def masks_of(homes: BoolArray) -> Masks:
    """Returns which nodes have each expert, [L, E], a bit for each of homes' [N, L, E] nodes."""
    bit = ONE << np.arange(len(homes), dtype=np.uint64)
    return np.asarray(np.where(homes, bit[:, None, None], NONE).sum(axis=0), np.uint64)


def score(placement: Placement, routes: Sequence[Routes]) -> RouteScore:
    """Returns what each node's tokens, routes [T, L, k], meet."""
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
    """Remote experts, peers called and layers without a call, over a node's tokens [T, L, k]."""
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


def latency(placement: Placement, node: int, batches: Sequence[Routes], costs: LayerCosts) -> float:
    """Returns the seconds that a node's batches, routes [T, L, k] each, spend on experts [Prism, Eq. 1].

    A layer takes as long as its slowest expert: the call and the computing, where that is soonest.
    """
    has = placement.homes | placement.disk
    total = 0.0
    for routes in batches:
        for layer in range(routes.shape[1]):
            experts, tokens = np.unique(routes[:, layer], return_counts=True)
            fixed = costs.call_s[node] + costs.compute_s  # [N]
            token = costs.call_token_s[node] + costs.compute_token_s
            each = np.where(has[:, layer, experts], fixed[:, None] + token[:, None] * tokens, np.inf)  # [N, n]
            total += float(each.min(axis=0).max())
    return total
