"""Where every expert is kept in memory, for boxes that serve one model together.

`uniform` is the plain policy of the literature's baselines [Prism, IV-A]: every expert once, spread evenly over
layers and boxes in proportion to their memory, then again as often as wanted, as far as memory allows. Experts that a
box has, on its disk or in its memory, are preferred there, so that nothing travels that need not; one that is on no
disk stays with a box that has it in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgemoe.errors import PlacementInfeasible
from edgemoe.types.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class NodeCapacity:
    """How many experts a node has memory for, and which it has."""

    slots: int
    on_disk: BoolArray  # [L, E]
    in_ram: BoolArray | None = None  # [L, E]; None: none


def uniform(nodes: Mapping[str, NodeCapacity], replicas: int = 1, expert_bytes: int = 0) -> dict[str, BoolArray]:
    """Returns the homes [L, E] of each node: every expert at least once, up to `replicas` times on different nodes.

    Raises PlacementInfeasible where memory does not suffice for one copy of each, or an expert is nowhere; further
    copies are given as far as memory goes.
    """
    disk = np.stack([node.on_disk for node in nodes.values()])  # [N, L, E]
    has = np.stack([n.on_disk if n.in_ram is None else n.on_disk | n.in_ram for n in nodes.values()])
    room = np.array([max(0, min(node.slots, disk[0].size)) for node in nodes.values()], np.int64)  # [N]
    _check(room, has, expert_bytes)
    bound = has & ~disk.any(axis=0)  # in memory only
    homes = np.zeros_like(disk)
    left = room.copy()
    for copy in range(max(1, min(replicas, len(nodes)))):
        _deal(homes, left, room, has, bound, copy)
    return dict(zip(nodes, homes, strict=True))


def _check(room: IntArray, has: BoolArray, expert_bytes: int) -> None:
    total = has[0].size
    if (short := total - int(room.sum())) > 0:
        missing = f"{short * expert_bytes} bytes" if expert_bytes else f"room for {short} experts"
        raise PlacementInfeasible(
            f"{len(room)} boxes hold {int(room.sum())} of {total} experts in memory; {missing} missing: raise "
            "memory.ram_bytes or add a box",
            short * expert_bytes,
        )
    nowhere = np.argwhere(~has.any(axis=0))
    if len(nowhere):
        layer, expert = nowhere[0].tolist()
        raise PlacementInfeasible(
            f"{len(nowhere)} experts are on no box's disk, nor in its memory, the first is expert {expert} of layer "
            f"{layer}; copy the store to one of the boxes",
            len(nowhere) * expert_bytes,
        )


def _deal(homes: BoolArray, left: IntArray, room: IntArray, has: BoolArray, bound: BoolArray, copy: int) -> None:
    """Deals one more copy of each expert, as far as there is room.

    It goes to the emptiest box that is not its home yet, one that has it first. Emptiness is judged within the layer
    first, so that each layer is spread as memory is. First copies of what is `bound` [N, L, E] stay where it is, if
    there is room. `homes` [N, L, E] and `left` [N] are changed.
    """
    _, layers, experts = homes.shape
    share = room / max(1, room.sum())
    for layer in range(layers):
        given = np.zeros(len(room), np.int64)
        for step in range(experts):
            expert = (step + copy * (experts // 2 + 1)) % experts if copy else step
            can = (left > 0) & ~homes[:, layer, expert]
            if not copy and (can & bound[:, layer, expert]).any():
                can &= bound[:, layer, expert]
            if not can.any():
                if copy:
                    continue
                raise AssertionError("room was counted wrong")
            due = (given + 1) / np.maximum(share, 1e-12)  # lowest: furthest behind its share of this layer
            cost = np.where(can, due + np.where(has[:, layer, expert], 0.0, 0.5 * len(room)), np.inf)
            node = int(np.lexsort((-left, cost))[0])
            homes[node, layer, expert] = True
            given[node] += 1
            left[node] -= 1
