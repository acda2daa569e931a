"""Places experts on nodes by remote calls and by successions: which expert follows which in the next layer.

Source: [Gimbal, Algorithm 3], which places experts on the devices of one machine. Between nodes it refines a plan of
[Prism]: two nodes exchange experts of a layer while that lowers the plan's cost. Remote calls take the place of even
load (Eq. 12); a succession counts as cut where no node has both experts.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, placed
from edgemoe.types.arrays import BoolArray, IntArray

CUT = 0.5  # of a remote call: the price if no node has an expert together with its successors
ROUNDING = 1e-9  # of all that is asked for: a gain that counts


def gimbal(problem: PlacementProblem, passed: Values) -> Placement:
    """Returns Prism's placement refined by successions [L - 1, E, E]. Raises PlacementInfeasible."""
    start = prism(problem)
    homes = exchanged(start, problem.activations, passed * _price(problem, passed))
    return placed(problem, homes, start.disk)


def cut_between(placement: Placement, passed: Values) -> float:
    """Returns how many of the successions [L - 1, E, E] have their experts on no node together (Eq. 11)."""
    has = placement.homes | placement.disk
    return sum(float(each[~(has[:, layer].T @ has[:, layer + 1])].sum()) for layer, each in enumerate(passed))


def refined_cost(problem: PlacementProblem, placement: Placement, passed: Values) -> float:
    """Returns the cost of a placement in the measure of `gimbal`, in remote calls."""
    remote = float(problem.activations[~placement.homes].sum())
    return remote + _price(problem, passed) * cut_between(placement, passed)


def _price(problem: PlacementProblem, passed: Values) -> float:
    """Returns the price of a cut succession in remote calls: CUT for each choice of its second expert."""
    return CUT * float(problem.activations[:, 1:].sum() / passed.sum()) if passed.any() else 0.0


def exchanged(start: Placement, asked: Values, passed: Values) -> BoolArray:
    """Returns better homes [N, L, E] in memory: each exchange lowers the cost of calls and cuts.

    `asked` [N, L, E] is the cost of an expert that is not at a node, `passed` [L - 1, E, E] the cost of a cut.
    """
    homes, disk = start.homes.copy(), start.disk
    least = ROUNDING * float(asked.sum())
    waiting = list(range(homes.shape[1]))
    while waiting:
        layer = waiting.pop(0)
        if _improve(homes, disk, layer, asked[:, layer], _beside(homes | disk, layer, passed), least):
            near = (layer - 1, layer + 1)
            waiting += [each for each in near if 0 <= each < homes.shape[1] and each not in waiting]
    return homes


def _beside(has: BoolArray, layer: int, passed: Values) -> tuple[Values, BoolArray]:
    """Returns a layer's successions with the experts beside it, [E, F], and the nodes that have these, [N, F]."""
    weights, there = [], []
    if layer > 0:
        weights.append(passed[layer - 1].T)
        there.append(has[:, layer - 1])
    if layer < len(passed):
        weights.append(passed[layer])
        there.append(has[:, layer + 1])
    if not weights:
        return np.zeros((has.shape[2], 0)), np.zeros((len(has), 0), np.bool_)
    return np.concatenate(weights, axis=1), np.concatenate(there, axis=1)


def _improve(
    homes: BoolArray, disk: BoolArray, layer: int, asked: Values, beside: tuple[Values, BoolArray], least: float
) -> bool:
    """Exchanges two of a layer's experts, the best two, again and again; returns whether any were."""
    own, changed = homes[:, layer], False
    dear = _moves(own, disk[:, layer], asked, beside, np.arange(own.shape[1]))  # [E, N, N]
    while True:
        expert = dear.argmin(axis=0)  # [N, N] that is best given away
        cost = np.take_along_axis(dear, expert[None], axis=0)[0]
        a, b = divmod(int(np.argmin(cost + cost.T)), len(own))
        if not cost[a, b] + cost[b, a] < -least:
            return changed
        two = expert[[a, b], [b, a]]
        own[[a, b], two], own[[b, a], two] = False, True
        dear[two] = _moves(own, disk[:, layer], asked, beside, two)
        changed = True


def _moves(
    own: BoolArray, disk: BoolArray, asked: Values, beside: tuple[Values, BoolArray], experts: IntArray
) -> Values:
    """Returns the added cost of moving experts [n] from node to node, [n, N, N]; inf where one cannot move."""
    weights, there = beside[0][experts], beside[1].astype(np.float64)
    held = own[:, experts]
    has = (held | disk[:, experts]).astype(np.float64)
    shared = has.T @ there  # [n, F] how many nodes have both
    joined = np.where(shared == 0, weights, 0.0) @ there.T  # [n, N] by a home more
    single = np.where(shared == 1, weights, 0.0)
    cost = asked[:, experts].T[:, :, None] - asked[:, experts].T[:, None, :] - joined[:, None, :]
    for node in range(len(own)):
        only = single * has[node][:, None] * there[node]  # [n, F] that no other node keeps together
        cost[:, node] += only.sum(axis=1)[:, None] - only @ there.T
    return np.asarray(np.where(held.T[:, :, None] & ~held.T[:, None, :], cost, np.inf))
