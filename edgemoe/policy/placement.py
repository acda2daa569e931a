"""Where every expert is kept in memory, for boxes that serve one model together.

`uniform` is the plain policy of the literature's baselines [Prism, IV-A]: every expert once, spread evenly over
layers and boxes in proportion to their memory, then again as often as wanted, as far as memory allows. Experts that a
box has, on its disk or in its memory, are preferred there, so that nothing travels that need not; one that is on no
disk stays with a box that has it in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgemoe.errors import PlacementInfeasible
from edgemoe.types.arrays import BoolArray, IntArray


def uniform(
    nodes: Sequence[str],
    capacity_experts: Mapping[str, int],
    on_disk: Mapping[str, BoolArray],
    layers: int,
    experts: int,
    replicas: int = 1,
    *,
    in_ram: Mapping[str, BoolArray] | None = None,
    expert_bytes: int = 0,
) -> dict[str, BoolArray]:
    """Homes [L, E] of each node: every expert at least once, up to `replicas` times on different nodes.

    `on_disk` and `in_ram` [L, E] are what each node has. Raises PlacementInfeasible where memory does not suffice for
    one copy of each, or an expert is nowhere; further copies are given as far as memory goes.
    """
    total = layers * experts
    room = np.array([max(0, min(capacity_experts[node], total)) for node in nodes], np.int64)  # [N]
    disk = np.array([on_disk[node].ravel() for node in nodes], np.bool_).reshape(len(nodes), total)  # [N, L * E]
    has = disk if in_ram is None else disk | np.array([in_ram[node].ravel() for node in nodes], np.bool_)
    _check(room, has, experts, expert_bytes)
    bound = has & ~disk.any(axis=0)  # in memory only
    homes = np.zeros_like(disk)
    left = room.copy()
    for copy in range(max(1, min(replicas, len(nodes)))):
        _deal(homes, left, room, has, bound, layers, experts, copy)
    return {node: homes[n].reshape(layers, experts) for n, node in enumerate(nodes)}


def _check(room: IntArray, has: BoolArray, experts: int, expert_bytes: int) -> None:
    total = has.shape[1]
    if (short := total - int(room.sum())) > 0:
        missing = f"{short * expert_bytes} bytes" if expert_bytes else f"room for {short} experts"
        raise PlacementInfeasible(
            f"{len(room)} boxes hold {int(room.sum())} of {total} experts in memory; {missing} missing: raise "
            "memory.ram_bytes or add a box",
            short * expert_bytes,
        )
    nowhere = np.flatnonzero(~has.any(axis=0))
    if len(nowhere):
        layer, expert = divmod(int(nowhere[0]), experts)
        raise PlacementInfeasible(
            f"{len(nowhere)} experts are on no box's disk, nor in its memory, the first is expert {expert} of layer "
            f"{layer}; copy the store to one of the boxes",
            len(nowhere) * expert_bytes,
        )


def _deal(
    homes: BoolArray,
    left: IntArray,
    room: IntArray,
    has: BoolArray,
    bound: BoolArray,
    layers: int,
    experts: int,
    copy: int,
) -> None:
    """One more copy of each expert, as far as there is room: to the emptiest box that lacks it, one that has it first.

    Emptiness is judged within the layer first, so that each layer is spread as memory is. First copies of what is
    `bound` [N, L * E] stay where it is, if there is room. `homes` [N, L * E] and `left` [N] are changed.
    """
    share = room / max(1, room.sum())
    for layer in range(layers):
        given = np.zeros(len(room), np.int64)
        for step in range(experts):
            expert = (step + copy * (experts // 2 + 1)) % experts if copy else step
            bit = layer * experts + expert
            can = (left > 0) & ~homes[:, bit]
            if not copy and (can & bound[:, bit]).any():
                can &= bound[:, bit]
            if not can.any():
                if copy:
                    continue
                raise AssertionError("room was counted wrong")
            due = (given + 1) / np.maximum(share, 1e-12)  # lowest: furthest behind its share of this layer
            cost = np.where(can, due + np.where(has[:, bit], 0.0, 0.5 * len(room)), np.inf)
            node = int(np.lexsort((-left, cost))[0])
            homes[node, bit] = True
            given[node] += 1
            left[node] -= 1
