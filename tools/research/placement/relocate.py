"""Places experts on devices by load and by traffic between layers, and again every so many steps.

Source: [Gimbal, Algorithm 3], "Expert Dynamic Replacement". It puts the experts of the strongest pairs on one anchor
device, the others in order of their load on the device with the least, and an expert's number has one place in all
layers: `published`. Here each (layer, expert) has its own, and the anchor is only where the search begins: exchanges of
two experts of a layer follow while one lowers the cost (Eq. 12) by more than moving two experts does. So devices keep
how many experts of each layer they have, what is well placed stays, and a second call on the same counts moves nothing.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.arrays import IntArray
from tools.research.placement.traffic import ExpertTraffic, RelocationPrices, Values, loads

ROUNDING = 1e-9  # of the largest load: a gain that counts


def published(traffic: ExpertTraffic, devices: int, anchor: int, pairs: int) -> IntArray:
    """Returns the literal placement, [L, E] with layers alike: `pairs` strongest pairs of numbers on the anchor.

    Each device has E / g experts (Eq. 4), so the anchor takes no more than these.
    """
    layers, experts = traffic.chosen.shape
    return np.tile(by_columns(traffic, _rooms(experts, devices), anchor, pairs), (layers, 1))


def by_columns(traffic: ExpertTraffic, rooms: IntArray, anchor: int, pairs: int) -> IntArray:
    """Returns the place of each number [E], where places have so much room [g]; -1 of what no place has room for."""
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
    """Returns a placement to begin with, [L, E]: of each layer the experts most passed to, on the anchor.

    `share` is how much of the anchor's room is for them; the others go by load.
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
    """Returns how many experts of a layer each device has, [g]; as even as they come."""
    return np.bincount(np.arange(experts) * devices // experts, minlength=devices)


def _greedy(home: IntArray, load: Values, rooms: IntArray) -> None:
    """Gives those without a home one, the heaviest first, each the device with the least load that has room."""
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
    """Exchanges two of a layer's experts, the best two, again and again; returns whether any were."""
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
    """Returns the traffic that each expert has with each device's experts of the layers beside its own, [E, g]."""
    kept = np.zeros((home.shape[1], devices))
    if layer > 0:
        kept += traffic.passed[layer - 1].T @ np.eye(devices)[home[layer - 1]]
    if layer + 1 < len(home):
        kept += traffic.passed[layer] @ np.eye(devices)[home[layer + 1]]
    return kept


def _gain_of_traffic(kept: Values, own: IntArray) -> Values:
    """Returns how much traffic each exchange saves, [E, E]."""
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
