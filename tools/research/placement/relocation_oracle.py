"""The optimum of small cases, as a mixed-integer program [Gimbal, Eq. 3 to 12], solved by scipy's HiGHS.

`per_layer` has a variable for each (layer, expert) and device. Without it an expert's number has one place in all
layers, as in the source. Each layer has its own D. Eq. 9 is left out: a load below an even share delays no step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from edgemoe.types.arrays import IntArray
from tools.research.placement.traffic import ExpertTraffic, RelocationPrices


class OptimalHomes(NamedTuple):
    """A placement, and whether it is proved optimal."""

    home: IntArray  # [L, E]
    proved: bool


def optimum(
    traffic: ExpertTraffic, devices: int, weights: RelocationPrices, per_layer: bool = True, limit_s: float = 60.0
) -> OptimalHomes | None:
    """Returns the best placement found in `limit_s`; None if none was."""
    layers, experts = traffic.chosen.shape
    groups = layers if per_layer else 1
    place = np.arange(groups * experts * devices).reshape(groups, experts, devices)
    of_layer = [place[layer if per_layer else 0] for layer in range(layers)]
    pairs = np.argwhere(traffic.passed > 0)  # [P, 3]
    together = place.size + np.arange(len(pairs) * devices).reshape(len(pairs), devices)
    beyond = place.size + together.size + np.arange(layers)
    rows = _Rows()
    for spot in place.reshape(-1, devices):
        rows.add(spot, np.ones(devices), 1.0, 1.0)  # Eq. 3
    room = np.bincount(np.arange(experts) * devices // experts, minlength=devices)
    for group in place:
        for device in range(devices):
            rows.add(group[:, device], np.ones(experts), room[device], room[device])  # Eq. 4
    for layer, spots in enumerate(of_layer):
        even = traffic.chosen[layer].sum() / devices
        for device in range(devices):
            rows.add(
                np.append(spots[:, device], beyond[layer]), np.append(traffic.chosen[layer], -1.0), -np.inf, even
            )  # Eq. 8
    for (layer, j, k), both in zip(pairs, together, strict=True):
        for device, same in enumerate(both):  # Eq. 10; its third part follows from the minimisation
            rows.add(np.array([same, of_layer[layer][j, device]]), np.array([1.0, -1.0]), -np.inf, 0.0)
            rows.add(np.array([same, of_layer[layer + 1][k, device]]), np.array([1.0, -1.0]), -np.inf, 0.0)
    price = np.zeros(beyond[-1] + 1)
    price[together] = -weights.cut * traffic.passed[tuple(pairs.T)][:, None]  # Eq. 11, without a constant
    price[beyond] = weights.uneven
    whole = np.zeros(len(price))
    whole[: place.size] = 1
    bounds = Bounds(np.zeros(len(price)), np.where(np.arange(len(price)) < beyond[0], 1.0, np.inf))
    found = milp(
        price, integrality=whole, bounds=bounds, constraints=rows.made(len(price)), options={"time_limit": limit_s}
    )
    if found.x is None:
        return None
    home = found.x[: place.size].reshape(place.shape).argmax(axis=2)
    return OptimalHomes(np.broadcast_to(home, (layers, experts)).copy(), found.status == 0)


class _Rows:
    """Owns the constraints while they are written down."""

    def __init__(self) -> None:
        self._at: list[tuple[IntArray, np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(
        self, which: IntArray, factors: np.ndarray[tuple[int], np.dtype[np.float64]], low: float, high: float
    ) -> None:
        """Adds a constraint: the sum of variables lies between two values."""
        self._at.append((which, factors))
        self._low.append(low)
        self._high.append(high)

    def made(self, variables: int) -> LinearConstraint:
        row = np.concatenate([np.full(len(which), n) for n, (which, _) in enumerate(self._at)])
        column = np.concatenate([which for which, _ in self._at])
        factor = np.concatenate([factors for _, factors in self._at])
        matrix = coo_array((factor, (row, column)), shape=(len(self._at), variables))
        return LinearConstraint(matrix.tocsr(), np.array(self._low), np.array(self._high))
