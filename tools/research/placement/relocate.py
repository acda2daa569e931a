"""Places experts on devices by load and traffic between layers, and again after a number of steps.

Source: [Gimbal, Algorithm 3], "Expert Dynamic Replacement": the strongest pairs' experts on an anchor, others by load,
one place per expert number (`published`). Here each (layer, expert) is placed alone, starting from the anchor.
Exchanges of a layer's experts follow while one saves more (Eq. 12) than it costs. Loads per layer stay; a repeat moves
nothing.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.arrays import IntArray
from tools.research.placement.traffic import ExpertTraffic, RelocationPrices, Values, loads

ROUNDING = 1e-9  # of the largest load: the least gain that counts


def published(traffic: ExpertTraffic, devices: int, anchor: int, pairs: int) -> IntArray:
    """Returns the literal placement, [L, E] with equal layers: `pairs` strongest pairs of numbers on the anchor.

    Each device has E / g experts (Eq. 4), so the anchor takes no more than these.
    """
    layers, experts = traffic.chosen.shape
    return np.tile(by_columns(traffic, _rooms(experts, devices), anchor, pairs), (layers, 1))


def by_columns(traffic: ExpertTraffic, rooms: IntArray, anchor: int, pairs: int) -> IntArray:
    """Assigns each column [E] to a device with room [g]; -1 if none fits."""
    experts, rooms = traffic.chosen.shape[1], rooms.copy()
    home = np.full(experts, -1, np.int64)
    between = traffic.columns + traffic.columns.T
    strongest = np.argsort(-np.triu(between, 1), axis=None, kind="stable")[:pairs]
    for pair in strongest:  # line 2
        new = [expert for expert in divmod(int(pair), experts) if home[expert] < 0]
        if len(new) <= rooms[anchor]:
            home[new] = anchor
            rooms[anchor] -= len(new)
    _greedy(home, traffic.chosen.sum(axis=0), rooms)  # line 3
    return home


def anchored(traffic: ExpertTraffic, devices: int, anchor: int, share: float) -> IntArray:
    """Returns an initial placement, [L, E]: of each layer the experts with most traffic, on the anchor.

    `share` is their part of the anchor's room; the others go by load.
    """
    layers, experts = traffic.chosen.shape
    strength = np.zeros((layers, experts))
    strength[:-1] += traffic.passed.max(axis=2)
    strength[1:] += traffic.passed.max(axis=1)
    home = np.full((layers, experts), -1, np.int64)
    for at, strong, load in zip(home, strength, traffic.chosen, strict=True):
        rooms = _rooms(experts, devices)
        most = int(share * rooms[anchor])
        at[np.argsort(-strong, kind="stable")[:most]] = anchor
        rooms[anchor] -= most
        _greedy(at, load, rooms)
    return home


def relocate(
    home: IntArray, traffic: ExpertTraffic, devices: int, weights: RelocationPrices, move_cost: float = 0.0
) -> IntArray:
    """Returns a better placement than `home` [L, E], near it: every exchange saves more than its two moves cost."""
    home = home.copy()
    least = 2 * move_cost + ROUNDING * float(traffic.chosen.max())
    waiting = list(range(len(home)))
    while waiting:
        layer = waiting.pop(0)
        if _improve(home, layer, traffic, devices, weights, least):
            near = (layer - 1, layer, layer + 1)
            waiting += [each for each in near if 0 <= each < len(home) and each not in waiting]
    return home


def _rooms(experts: int, devices: int) -> IntArray:
    """Returns the number of a layer's experts on each device, [g], as even as possible."""
    return np.bincount(np.arange(experts) * devices // experts, minlength=devices)


def _greedy(home: IntArray, load: Values, rooms: IntArray) -> None:
    """Assigns the remaining experts, the heaviest first, each to the least loaded device with room."""
    there = np.bincount(home[home >= 0], weights=load[home >= 0], minlength=len(rooms))
    for expert in np.argsort(-load, kind="stable"):
        if home[expert] < 0 and rooms.any():
            device = int(np.argmin(np.where(rooms > 0, there, np.inf)))
            home[expert] = device
            there[device] += load[expert]
            rooms[device] -= 1


def _improve(
    home: IntArray, layer: int, traffic: ExpertTraffic, devices: int, weights: RelocationPrices, least: float
) -> bool:
    """Exchanges two of a layer's experts, the best two, repeatedly. Returns whether any were exchanged."""
    kept = _kept(home, layer, traffic, devices)
    load, own, changed = traffic.chosen[layer], home[layer], False
    while True:
        there = loads(own[None], load[None], devices)[0]
        gain = weights.cut * _gain_of_traffic(kept, own) + weights.uneven * (there.max() - _fullest(there, load, own))
        gain[own[:, None] == own[None, :]] = 0.0
        a, b = divmod(int(np.argmax(gain)), len(own))
        if gain[a, b] <= least:
            return changed
        own[a], own[b] = own[b], own[a]
        changed = True


def _kept(home: IntArray, layer: int, traffic: ExpertTraffic, devices: int) -> Values:
    """Returns each expert's traffic with each device's experts of the neighbouring layers, [E, g]."""
    kept = np.zeros((home.shape[1], devices))
    if layer > 0:
        kept += traffic.passed[layer - 1].T @ np.eye(devices)[home[layer - 1]]
    if layer + 1 < len(home):
        kept += traffic.passed[layer] @ np.eye(devices)[home[layer + 1]]
    return kept


def _gain_of_traffic(kept: Values, own: IntArray) -> Values:
    """Returns the traffic that each exchange saves, [E, E]."""
    there = kept[:, own]  # [E, E] of an expert with the other's device
    stays = np.diag(there)
    return np.asarray(there + there.T - stays[:, None] - stays[None, :])


def _fullest(there: Values, load: Values, own: IntArray) -> Values:
    """Returns the load of the layer's fullest device after each exchange, [E, E]."""
    more = load[None, :] - load[:, None]  # on the first one's device
    after = np.maximum(there[own][:, None] + more, there[own][None, :] - more)
    for device in range(len(there)):
        others = own != device
        untouched = np.where(others[:, None] & others[None, :], there[device], -np.inf)
        after = np.maximum(after, untouched)
    return np.asarray(after)
