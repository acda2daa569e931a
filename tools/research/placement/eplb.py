"""Expert Parallelism Load Balancer [EPLB]: hot experts are replicated, and copies packed for equal loads of devices.

On equal nodes and devices the result is the published one: groups of experts to nodes, copies within a node, copies to
devices. Without fitting groups it places all at once. Unequal devices get loads in proportion to their slots, as in
[Prism, IV-A].
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import (
    Placement,
    PlacementProblem,
    Values,
    cover,
    disk_homes,
    pack,
    placed,
    required,
)
from edgemoe.types.arrays import IntArray


def eplb(problem: PlacementProblem) -> Placement:
    """Returns its placement over all devices of all nodes. Raises PlacementInfeasible."""
    disk = disk_homes(problem)
    homes = np.zeros_like(disk)
    slots, node_of = device_slots(problem)
    for layer, load in enumerate(problem.activations.sum(axis=0)):
        copies = replicate(load, int(slots[layer].sum()))
        for device, members in enumerate(pack(_each(load, copies), slots[layer])):
            homes[node_of[device], layer, copies[members]] = True
    cover(problem, homes, required(problem, disk))
    return placed(problem, homes, disk)


def device_slots(problem: PlacementProblem) -> tuple[IntArray, IntArray]:
    """Returns the slots of each layer on each device [L, D], as even as they come, and each device's node [D]."""
    layers = problem.activations.shape[1]
    node_of = np.repeat(np.arange(len(problem.slots)), [len(devices) for devices in problem.slots])
    sizes = np.minimum([each for devices in problem.slots for each in devices], problem.activations[0].size)
    ends = np.cumsum(sizes)
    dealt = [np.arange(end - size, end) % layers for end, size in zip(ends, sizes, strict=True)]
    return np.stack([np.bincount(layer, minlength=layers) for layer in dealt], axis=1), node_of


def rebalance(load: Values, slots: int, groups: int, nodes: int, devices: int) -> IntArray:
    """Returns the expert of each of `slots`, [L, slots] in order of device, from the experts' load [L, E].

    `groups` of experts, `nodes` and `devices` are total numbers of equal ones.
    """
    if groups % nodes:
        groups, nodes = 1, 1
    return np.stack([_rebalance_layer(each, slots, groups, nodes, devices) for each in load])


def _rebalance_layer(load: Values, slots: int, groups: int, nodes: int, devices: int) -> IntArray:
    group = np.arange(len(load)).reshape(groups, -1)  # [groups, experts of each]
    on_device = np.full(devices // nodes, slots // devices)
    answer: list[IntArray] = []
    for members in pack(load[group].sum(axis=1), np.full(nodes, groups // nodes)):
        own = group[members].ravel()
        copies = replicate(load[own], slots // nodes)
        answer += [own[copies[each]] for each in pack(_each(load[own], copies), on_device)]
    return np.concatenate(answer)


def replicate(load: Values, slots: int) -> IntArray:
    """Returns the expert of each slot, [slots]: all once, then repeatedly the one with most load per copy."""
    copies = np.ones(len(load), np.int64)
    more = np.empty(max(0, slots - len(load)), np.int64)
    for place in range(len(more)):
        more[place] = expert = int(np.argmax(load / copies))
        copies[expert] += 1
    return np.concatenate([np.arange(len(load))[:slots], more])


def _each(load: Values, copies: IntArray) -> Values:
    """Returns the load of each copy."""
    return load[copies] / np.bincount(copies, minlength=len(load))[copies]
