"""The local search of `rendezvous`, compiled. Imports Numba: not for the front process.

docs/design/placement.md explains the tables that it keeps over (layer, expert, node).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.policy.placement.compiled import entry, inner
from edgemoe.policy.placement.problem import Values
from edgemoe.policy.placement.route_score import NONE, ONE, Masks, Routes, fewest, lowest
from edgemoe.types.arrays import IntArray


class HomeSearch(NamedTuple):
    """The state of the search. `homes` changes, and the tables after it follow."""

    ids: Routes  # [L, T, k] the experts that each token chose
    node: IntArray  # [T] the token's node
    weight: Values  # [T] the cost of one peer called for it
    first: IntArray  # [L, E + 1] the index in `users` of each expert's first token
    users: npt.NDArray[np.int32]  # [L, T * k] tokens by expert
    calls: Values  # [L, E, N] the cost of the node's calls for an expert without a home there
    fixed: Masks  # [L, E] homes on disk, which stay
    homes: Masks  # [L, E]
    swing: Values  # [L, E, N] the saving by another home, or the cost of losing one
    worth: Values  # [L, E, N] the saving by a home over no useful home
    add: Values  # [L, N] the least of -`swing` where there is no home
    add_expert: IntArray
    drop: Values  # [L, N] the least of `swing` where there are several
    drop_expert: IntArray
    move: Values  # [L, N * N] the least cost of moving an expert's only home, from and to
    move_expert: IntArray


class SearchScratch(NamedTuple):
    """Working memory for one token."""

    sets: Masks  # [k + 2, k]
    masks: Masks  # [k]
    useful: Masks  # [k]
    missing: IntArray  # [k]


@inner
def _useful(homes: Masks, ids: Routes, own: np.uint64, scratch: SearchScratch) -> int:
    """Fills Q of each of a token's experts and returns the number of peers called. `homes` [E] is the layer's row."""
    absent = 0
    for i in range(len(ids)):
        if homes[ids[i]] & own == NONE:
            scratch.missing[absent] = i
            scratch.masks[absent] = homes[ids[i]]
            absent += 1
    called, good = fewest(scratch.masks, absent, scratch.sets)
    for i in range(len(ids)):
        scratch.useful[i] = good | own
    for skip in range(absent):
        count = 0
        for i in range(absent):
            if i != skip:
                scratch.masks[count] = homes[ids[scratch.missing[i]]]
                count += 1
        _, good = fewest(scratch.masks, count, scratch.sets)
        scratch.useful[scratch.missing[skip]] = good | own
    return called


@inner
def _book(search: HomeSearch, scratch: SearchScratch, layer: int, token: int | np.int64, sign: float) -> float:
    """Adds a token's cost to the tables, or removes it if `sign` is -1. Returns the signed cost."""
    ids, homes = search.ids[layer, token], search.homes[layer]
    swing, worth = search.swing[layer], search.worth[layer]
    called = _useful(homes, ids, ONE << np.uint64(search.node[token]), scratch)
    share = sign * search.weight[token]
    for i in range(len(ids)):
        expert, good = ids[i], scratch.useful[i]
        met = homes[expert] & good
        left = good
        while left != NONE:
            node = lowest(left)
            left &= left - ONE
            worth[expert, node] += share
            if met == NONE:
                swing[expert, node] += share
        if met != NONE and met & (met - ONE) == NONE:
            swing[expert, lowest(met)] += share
    cost: float = share * called
    return cost


@inner
def _rehome(search: HomeSearch, scratch: SearchScratch, layer: int, expert: int, homes: np.uint64) -> float:
    """Changes an expert's homes and returns the change in total cost. Leaves the layer's best changes out of date."""
    users = search.users[layer, search.first[layer, expert] : search.first[layer, expert + 1]]
    change = 0.0
    for token in users:
        change += _book(search, scratch, layer, np.int64(token), -1.0)
    for node in range(search.calls.shape[2]):
        bit = ONE << np.uint64(node)
        if search.homes[layer, expert] & bit != homes & bit:
            cost = search.calls[layer, expert, node]
            change += cost if homes & bit == NONE else -cost
    search.homes[layer, expert] = homes
    for token in users:
        change += _book(search, scratch, layer, np.int64(token), 1.0)
    return change


@inner
def _find_best_changes(search: HomeSearch, layer: int) -> None:
    """Finds the layer's best changes."""
    nodes = search.worth.shape[2]
    add, drop, move = search.add[layer], search.drop[layer], search.move[layer]
    add[:], drop[:], move[:] = np.inf, np.inf, np.inf
    for expert in range(search.homes.shape[1]):
        homes = search.homes[layer, expert]
        swing, worth = search.swing[layer, expert], search.worth[layer, expert]
        only = homes & (homes - ONE) == NONE
        fixed = search.fixed[layer, expert]
        for node in range(nodes):
            bit = ONE << np.uint64(node)
            if homes & bit == NONE:
                if -swing[node] < add[node]:
                    add[node], search.add_expert[layer, node] = -swing[node], expert
            elif only and fixed == NONE:
                for to in range(nodes):
                    cost, pair = worth[node] - worth[to], node * nodes + to
                    if to != node and cost < move[pair]:
                        move[pair], search.move_expert[layer, pair] = cost, expert
            elif fixed & bit == NONE and swing[node] < drop[node]:
                drop[node], search.drop_expert[layer, node] = swing[node], expert


@inner
def _two_least(values: Values, value: Values, layer: IntArray) -> None:
    """Finds the two least of values [L, ...] over layers. Fills `value` [2, ...] and their layers, `layer` [2, ...]."""
    value[:] = np.inf
    for each in range(len(values)):
        row = values[each]
        for place in range(len(row)):
            if row[place] < value[0, place]:
                value[1, place], layer[1, place] = value[0, place], layer[0, place]
                value[0, place], layer[0, place] = row[place], each
            elif row[place] < value[1, place]:
                value[1, place], layer[1, place] = row[place], each


@inner
def _with(homes: np.uint64, node: int) -> np.uint64:
    return homes | (ONE << np.uint64(node))


@inner
def _without(homes: np.uint64, node: int) -> np.uint64:
    return homes & ~(ONE << np.uint64(node))


@inner
def _add(search: HomeSearch, scratch: SearchScratch, layer: int, node: int) -> float:
    expert = search.add_expert[layer, node]
    return _rehome(search, scratch, layer, expert, _with(search.homes[layer, expert], node))


@inner
def _drop(search: HomeSearch, scratch: SearchScratch, layer: int, node: int) -> float:
    expert = search.drop_expert[layer, node]
    return _rehome(search, scratch, layer, expert, _without(search.homes[layer, expert], node))


@inner
def _move(search: HomeSearch, scratch: SearchScratch, layer: int, node: int, to: int) -> float:
    expert = search.move_expert[layer, node * search.worth.shape[2] + to]
    return _rehome(search, scratch, layer, expert, _with(_without(search.homes[layer, expert], node), to))


@inner
def _step(search: HomeSearch, scratch: SearchScratch, gain: float) -> float:
    """Makes the best change with parts in different layers. Returns the change in cost.

    It is one of three. A node replaces a replica by another expert. Two nodes exchange experts. Or a node replaces a
    replica by an expert of a second node, which takes in a third expert for it.
    """
    nodes = search.add.shape[1]
    pairs = nodes * nodes
    add, add_at = np.empty((2, nodes)), np.zeros((2, nodes), np.int64)
    drop, drop_at = np.empty((2, nodes)), np.zeros((2, nodes), np.int64)
    move, move_at = np.empty((2, pairs)), np.zeros((2, pairs), np.int64)
    _two_least(search.add, add, add_at)
    _two_least(search.drop, drop, drop_at)
    _two_least(search.move, move, move_at)
    least, kind = -gain, 0
    node = to = a = b = c = add_at[0, 0]
    for n in range(nodes):
        for i in range(4):
            x, y = i & 1, i >> 1
            if add_at[x, n] != drop_at[y, n] and add[x, n] + drop[y, n] < least:
                least, kind, node, a, b = add[x, n] + drop[y, n], 1, n, add_at[x, n], drop_at[y, n]
    for n in range(nodes):
        for m in range(nodes):
            there, back = n * nodes + m, m * nodes + n
            for i in range(4):
                x, y = i & 1, i >> 1
                cost = move[x, there] + move[y, back]
                if n < m and move_at[x, there] != move_at[y, back] and cost < least:
                    least, kind, node, to, a, b = cost, 2, n, m, move_at[x, there], move_at[y, back]
            for i in range(8):
                x, y, z = i & 1, (i >> 1) & 1, i >> 2
                cost = add[x, n] + move[y, there] + drop[z, m]
                if cost < least:
                    j, k, o = add_at[x, n], move_at[y, there], drop_at[z, m]
                    if j != k and k != o and j != o:
                        least, kind, node, to, a, b, c = cost, 3, n, m, j, k, o
    if kind == 0:
        return 0.0
    if kind == 1:
        change = _add(search, scratch, a, node) + _drop(search, scratch, b, node)
    elif kind == 2:
        change = _move(search, scratch, a, node, to) + _move(search, scratch, b, to, node)
    else:
        change = _add(search, scratch, a, node) + _move(search, scratch, b, node, to) + _drop(search, scratch, c, to)
        _find_best_changes(search, c)
    _find_best_changes(search, a)
    _find_best_changes(search, b)
    return change


@inner
def _within(search: HomeSearch, scratch: SearchScratch, layer: int, gain: float) -> float:
    """Makes the changes with both parts in this layer, while they pay. Returns the change in cost."""
    nodes = search.worth.shape[2]
    total = 0.0
    for n in range(nodes):
        for m in range(n, nodes):
            if n == m:
                promised = search.drop[layer, n] + search.add[layer, n]
            else:
                promised = search.move[layer, n * nodes + m] + search.move[layer, m * nodes + n]
            if promised >= -gain:
                continue
            if n == m:
                first, second = search.add_expert[layer, n], search.drop_expert[layer, n]
            else:
                first = search.move_expert[layer, n * nodes + m]
                second = search.move_expert[layer, m * nodes + n]
            before = search.homes[layer, first], search.homes[layer, second]
            if n == m:
                change = _add(search, scratch, layer, n) + _drop(search, scratch, layer, n)
            else:
                change = _move(search, scratch, layer, n, m) + _move(search, scratch, layer, m, n)
            if change < -gain:
                total += change
                _find_best_changes(search, layer)
            else:
                _rehome(search, scratch, layer, first, before[0])
                _rehome(search, scratch, layer, second, before[1])
    return total


@entry
def begin(search: HomeSearch, scratch: SearchScratch) -> float:
    """Adds all tokens to the tables. Returns the total cost of calls."""
    layers, tokens, _ = search.ids.shape
    cost = 0.0
    for layer in range(layers):
        for token in range(tokens):
            cost += _book(search, scratch, layer, token, 1.0)
        _find_best_changes(search, layer)
    return cost


@entry
def descend(search: HomeSearch, scratch: SearchScratch, most: int, gain: float) -> float:
    """Makes at most `most` changes, until none gains more than `gain`. Returns the total change in cost."""
    total = 0.0
    for _ in range(most):
        change = _step(search, scratch, gain)
        if change == 0.0:
            for layer in range(len(search.homes)):
                change += _within(search, scratch, layer, gain)
        total += change
        if change == 0.0:
            break
    return total
