"""SmartMoE's placement: every expert once, devices with equal loads [SmartMoE].

Experts go in the order of falling load to the least loaded device with a slot; unequal devices get loads in proportion.
It keeps no replicas, so some memory may stay empty.
"""

from __future__ import annotations

import numpy as np

from edgemoe.policy.placement.problem import Placement, PlacementProblem, cover, disk_homes, pack, placed, required
from tools.research.placement.eplb import device_slots


def smartmoe(problem: PlacementProblem) -> Placement:
    """Returns its placement over all devices of all nodes. Raises PlacementInfeasible."""
    disk = disk_homes(problem)
    homes = np.zeros_like(disk)
    slots, node_of = device_slots(problem)
    for layer, load in enumerate(problem.activations.sum(axis=0)):
        fitting = np.argsort(-load, kind="stable")[: int(slots[layer].sum())]
        for device, members in enumerate(pack(load[fitting], slots[layer])):
            homes[node_of[device], layer, fitting[members]] = True
    cover(problem, homes, required(problem, disk))
    return placed(problem, homes, disk)
