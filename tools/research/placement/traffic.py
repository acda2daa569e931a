"""Counts of chosen experts, and of successions between layers, online with decay.

Source: [Gimbal, III-D1]: the activation matrix A (Eq. 1) and the traffic E to the next layer, counted there in advance
on random tokens. A placement's cost is Eq. 12 with a variable for each (layer, expert); the source places an expert's
number in all layers at once (Eq. 2 to 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import IntArray

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTraffic:
    """Counts of each expert's choices, and of its predecessors in the layer before."""

    chosen: Values  # [L, E] A
    passed: Values  # [L - 1, E, E] from an expert to one of the next layer

    @property
    def columns(self) -> Values:
        """The traffic between expert numbers, all layers together, [E, E] (Eq. 2)."""
        return np.asarray(self.passed.sum(axis=0))


class TrafficCounts:
    """Owns the decayed counts."""

    def __init__(self, layers: int, experts: int, decay: float = 0.9) -> None:
        """Multiplies older counts by `decay` at each call of `observe`."""
        self._decay = decay
        self._chosen = np.zeros((layers, experts))
        self._passed = np.zeros((layers - 1, experts, experts))

    def observe(self, routes: npt.NDArray[np.integer]) -> None:
        """Adds tokens by the experts that each chose, [T, L, k]."""
        tokens, layers, _ = routes.shape
        hot = np.zeros((layers, tokens, self._chosen.shape[1]))
        np.put_along_axis(hot, routes.transpose(1, 0, 2).astype(np.int64), 1.0, axis=2)
        self._chosen = self._decay * self._chosen + hot.sum(axis=1)
        self._passed = self._decay * self._passed + hot[:-1].transpose(0, 2, 1) @ hot[1:]

    def traffic(self) -> ExpertTraffic:
        return ExpertTraffic(self._chosen.copy(), self._passed.copy())


@dataclass(frozen=True, slots=True)
class RelocationPrices:
    """Weights of uneven load and of traffic between devices [Gimbal, Eq. 12]."""

    uneven: float = 1.0  # alpha: of each layer's load on its fullest device beyond an even share
    cut: float = 1.0  # beta: of traffic between devices


def loads(home: IntArray, chosen: Values, devices: int) -> Values:
    """Returns the load of each layer on each device, [L, g] (Eq. 7), for `home` [L, E]."""
    return np.stack([np.bincount(at, weights=row, minlength=devices) for at, row in zip(home, chosen, strict=True)])


def uneven(home: IntArray, traffic: ExpertTraffic, devices: int) -> float:
    """Returns the excess of the layers' fullest devices over an even share, together.

    Eq. 8 bounds all layers by one D; a layer waits for its own fullest device, so each has its own here.
    """
    each = loads(home, traffic.chosen, devices)
    return float((each.max(axis=1) - each.mean(axis=1)).sum())


def cut(home: IntArray, traffic: ExpertTraffic) -> float:
    """Returns the traffic between devices (Eq. 11)."""
    apart = home[:-1, :, None] != home[1:, None, :]
    return float(traffic.passed[apart].sum())


def cost(home: IntArray, traffic: ExpertTraffic, devices: int, weights: RelocationPrices) -> float:
    """Returns the cost of a placement (Eq. 12)."""
    return weights.uneven * uneven(home, traffic, devices) + weights.cut * cut(home, traffic)
