"""The placement with the fewest peers called per token and layer. Imports Numba: for processes that solve.

A layer waits for its slowest peer, and a call takes mostly its round trip. So the cost counts peers, the fewest that
have the missing experts, not experts. A step's tokens share a call.
docs/design/placement.md describes the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.prism import entropy
from edgemoe.policy.placement.problem import (
    Placement,
    PlacementProblem,
    Values,
    as_served,
    cover,
    disk_homes,
    fill,
    placed,
    required,
)
from edgemoe.policy.placement.rendezvous_search import HomeSearch, SearchScratch, begin, descend
from edgemoe.policy.placement.route_score import MOST_NODES, NONE, ONE, Routes, masks_of, routes_of_pairs
from edgemoe.types.arrays import BoolArray, IntArray

TOKENS = 8192  # drawn from pairs, of all nodes together
CALL_COST = 0.02  # of a remote expert, as a share of a rendezvous, at the least: of equal plans the one with fewer
CHANGES = 2000  # that the search makes at most
LEAST = 1e-9  # of a placement's whole cost: the smallest gain that is not rounding
HOPELESS = 1.5  # times the cost of the best start: not worth a search


@dataclass(frozen=True, slots=True)
class RendezvousCosts:
    """Weights of remote experts, of nodes and of given-up homes, relative to a rendezvous."""

    call_cost: float = CALL_COST  # of a remote expert, as a share of a rendezvous
    node_cost: Values | None = None  # [N] of a rendezvous of each node, as measured; None: all the same
    computed: Values | None = None  # [N, L, E] how often steps compute an expert; None: each token is a step
    steps_per_token: Values | None = None  # [N] likewise
    stay: Values | None = None  # [N, L, E] of giving up a home of now, 0 where there is none; None: of none

    def of_calls(self, problem: PlacementProblem) -> Values:
        """Returns the cost of each expert that is not at home at a node, [N, L, E]."""
        computed = problem.activations if self.computed is None else self.computed
        costs = np.asarray(self.call_cost * computed * self.of_nodes(problem)[:, None, None], np.float64)
        return costs if self.stay is None else costs + self.stay

    def of_layers(self, layers: IntArray) -> RendezvousCosts:
        """Returns the costs in these layers."""
        computed, stay = (None if each is None else each[:, layers] for each in (self.computed, self.stay))
        return replace(self, computed=computed, stay=stay)

    def of_nodes(self, problem: PlacementProblem) -> Values:
        """Returns the cost of a rendezvous at each node, [N]."""
        return np.ones(len(problem.slots)) if self.node_cost is None else self.node_cost

    def of_tokens(self, problem: PlacementProblem) -> Values:
        """Returns the cost of one token's rendezvous at each node, [N]."""
        return self.of_nodes(problem) * (1.0 if self.steps_per_token is None else self.steps_per_token)


def costs_of(expert_share: float, node_cost: Values | None = None) -> RendezvousCosts:
    """Returns the costs for a measured share of a call's time that one remote expert takes."""
    return RendezvousCosts(max(CALL_COST, expert_share), node_cost)


def rendezvous(
    problem: PlacementProblem, routes: Sequence[Routes], costs: RendezvousCosts = RendezvousCosts()
) -> Placement:
    """Returns a placement for tokens like these: each node's routes [T, L, k]. Raises PlacementInfeasible."""
    nodes = len(problem.slots)
    assert nodes <= MOST_NODES, "homes are masks of 64 bits"
    disk = disk_homes(problem)
    starts = [placed(problem, _whole_layers(problem, routes, disk), disk), exact(problem)]
    if costs.stay is not None:
        starts.append(placed(problem, _as_now(problem, costs.stay > 0, disk), disk))
    searches = [search_from(problem, routes, as_served(problem, start.homes), costs) for start in starts]
    scratch = scratch_for(routes[0].shape[2])
    away = costs.of_calls(problem)
    begun = [
        begin(search, scratch) + float(away[~start.homes].sum()) for search, start in zip(searches, starts, strict=True)
    ]
    found = [
        (cost + descend(search, scratch, CHANGES, LEAST * cost), search.homes, start.homes)
        for cost, search, start in zip(begun, searches, starts, strict=True)
        if cost <= HOPELESS * min(begun)
    ]
    _, masks, before = min(found, key=lambda each: each[0])
    homes = masks >> np.arange(nodes, dtype=np.uint64)[:, None, None] & ONE != NONE
    homes = np.where(problem.disks & disk.any(axis=0), before, homes)  # the search found disks for them
    fill(problem, homes)
    return placed(problem, homes, disk)


def routes_for(
    problem: PlacementProblem, pairs: Sequence[IntArray], top_k: int, rng: np.random.Generator
) -> list[Routes]:
    """Returns each node's routes, as many as a search takes, with its activations and pairs [P, 4].

    See `heaviest_pairs`.
    """
    tokens, expected, exists = TOKENS // len(pairs), problem.expected, problem.experts
    return [routes_of_pairs(expected[n], each, top_k, tokens, rng, exists) for n, each in enumerate(pairs)]


def rendezvous_cost(
    problem: PlacementProblem, routes: Sequence[Routes], placement: Placement, costs: RendezvousCosts
) -> float:
    """Returns the cost of a placement in the measure of `rendezvous`, summed over activations."""
    search = search_from(problem, routes, placement, costs)
    return begin(search, scratch_for(routes[0].shape[2])) + float(costs.of_calls(problem)[~placement.homes].sum())


def _whole_layers(problem: PlacementProblem, routes: Sequence[Routes], disk: BoolArray) -> BoolArray:
    """Places each layer at one node if one has room, else at few; then the sets that serve most tokens whole."""
    nodes, layers, experts = disk.shape
    homes, room = np.zeros_like(disk), problem.room
    node_of = np.repeat(np.arange(nodes), np.minimum(room // experts, layers))
    spread = entropy(problem.expected)  # an evenly chosen layer is served whole only by all its experts
    found = linear_sum_assignment(spread[node_of].T, maximize=True)
    for layer, place in zip(*found, strict=True):
        homes[node_of[place], layer] = True
    must = required(problem, disk)
    for layer in sorted(set(range(layers)) - set(found[0].tolist())):
        left = np.argsort(-problem.activations[:, layer].sum(axis=0), kind="stable")
        left = left[must[layer, left]]
        while len(left):
            free = room - homes.sum(axis=(1, 2))
            if free.max() <= 0:
                break
            node = int(np.argmax(free))
            homes[node, layer, left[: free[node]]] = True
            left = left[free[node] :]
    cover(problem, homes, must)
    for node in range(nodes):
        _serve_whole(homes[node], int(room[node]), problem.expected[node], routes[node])
    fill(problem, homes)
    return homes


def _as_now(problem: PlacementProblem, now: BoolArray, disk: BoolArray) -> BoolArray:
    """Returns the homes in force, as far as there is room, with homes for experts that have none."""
    homes = now & ~disk
    for node, room in enumerate(problem.room):
        held = np.flatnonzero(homes[node])
        coldest = held[np.argsort(problem.expected[node].ravel()[held], kind="stable")]
        homes[node].ravel()[coldest[: max(0, len(held) - int(room))]] = False
    cover(problem, homes, required(problem, disk))
    fill(problem, homes)
    return homes


def _serve_whole(homes: BoolArray, room: int, activations: Values, routes: Routes) -> None:
    """Adds to a node's homes [L, E], layer by layer, the sets of its hottest experts that serve most tokens a slot."""
    layers, experts = homes.shape
    order = np.argsort(-activations, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    last = np.stack([place[layer, routes[:, layer]].max(axis=1) for layer in range(layers)])  # [L, T]
    served = np.stack([np.cumsum(np.bincount(each, minlength=experts)) for each in last])  # [L, E] by the first e + 1
    has = np.cumsum(np.take_along_axis(homes, order, axis=1), axis=1)
    whole = np.argmin(np.take_along_axis(homes, order, axis=1), axis=1)
    whole[homes.all(axis=1)] = experts
    free = room - int(homes.sum())
    while free > 0:
        base = np.where(whole > 0, np.take_along_axis(served, np.maximum(whole - 1, 0)[:, None], axis=1)[:, 0], 0)
        price = (np.arange(experts) + 1) - has  # [L, E] slots that the first e + 1 take beyond the present ones
        gain = np.where((price > 0) & (price <= free), (served - base[:, None]) / np.maximum(price, 1), -1.0)
        layer, end = divmod(int(np.argmax(gain)), experts)
        if gain[layer, end] <= 0:
            return
        homes[layer, order[layer, : end + 1]] = True
        free -= int(price[layer, end])
        kept = np.take_along_axis(homes[layer], order[layer], axis=0)
        has[layer] = np.cumsum(kept)
        whole[layer] = experts if kept.all() else int(np.argmin(kept))


def search_from(
    problem: PlacementProblem, routes: Sequence[Routes], start: Placement, costs: RendezvousCosts
) -> HomeSearch:
    """Returns the search's tables at a start, with the costs of calls; `begin` fills the others."""
    nodes, layers, experts = start.homes.shape
    ids = np.ascontiguousarray(np.concatenate(routes).transpose(1, 0, 2), np.int16)
    top_k = ids.shape[2]
    counts = np.array([len(tokens) for tokens in routes])
    weight = costs.of_tokens(problem) * problem.activations.sum(axis=(1, 2)) / (layers * top_k) / np.maximum(counts, 1)
    flat = ids.reshape(layers, -1)
    first = np.zeros((layers, experts + 1), np.int64)
    for layer in range(layers):
        first[layer, 1:] = np.cumsum(np.bincount(flat[layer], minlength=experts))
    calls = np.ascontiguousarray(costs.of_calls(problem).transpose(1, 2, 0))
    fixed = masks_of(start.disk)
    return HomeSearch(
        ids=ids,
        node=np.repeat(np.arange(nodes), counts),
        weight=np.repeat(weight, counts),
        first=first,
        users=(np.argsort(flat, axis=1, kind="stable") // top_k).astype(np.int32),
        calls=calls,
        fixed=fixed,
        homes=masks_of(start.homes) | fixed,
        swing=calls.copy(),
        worth=calls.copy(),
        add=np.zeros((layers, nodes)),
        add_expert=np.zeros((layers, nodes), np.int64),
        drop=np.zeros((layers, nodes)),
        drop_expert=np.zeros((layers, nodes), np.int64),
        move=np.zeros((layers, nodes * nodes)),
        move_expert=np.zeros((layers, nodes * nodes), np.int64),
    )


def scratch_for(top_k: int) -> SearchScratch:
    """Returns memory for the search to count in."""
    masks = [np.zeros(top_k, np.uint64) for _ in range(2)]
    return SearchScratch(np.zeros((top_k + 2, top_k), np.uint64), masks[0], masks[1], np.zeros(top_k, np.int64))
