"""The placement problem and the placements that policies answer, with the steps that they share.

Memory is counted in slots of one expert, device by device, so that nothing is planned across two devices. Where memory
cannot hold every expert, the coldest experts may stay on the disks that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgemoe.errors import PlacementInfeasible
from edgemoe.types.arrays import BoolArray, IntArray
from edgemoe.types.experts import layers_of_sizes


def pack(weight: npt.NDArray[np.float64], slots: IntArray) -> list[IntArray]:
    """Assigns items to packs, the heaviest first, each to the lightest pack with a slot. Returns each pack's items.

    How light a pack is counts in proportion to its slots. Where each has one, they get one after the other.
    """
    if (slots == 1).all():
        return list(np.arange(len(weight))[:, None])
    members: list[list[int]] = [[] for _ in slots]
    total, left = np.zeros(len(slots)), slots.copy()
    share = slots / max(1, slots.max())
    for item in np.argsort(-weight, kind="stable"):
        best = int(np.argmin(np.where(left > 0, total / np.maximum(share, 1e-300), np.inf)))
        members[best].append(int(item))
        total[best] += weight[item]
        left[best] -= 1
    return [np.array(each, np.int64) for each in members]


def shares(number: int, room: IntArray) -> IntArray:
    """Returns a number divided in proportion to room [n], at most that each; the largest remainders are rounded up."""
    exact = number * room / max(1, room.sum())
    answer: IntArray = np.floor(exact).astype(np.int64)
    answer[np.argsort(answer - exact, kind="stable")[: number - int(answer.sum())]] += 1
    return answer


Values = npt.NDArray[np.float64]
TIE = 1e-6  # weight of all nodes' choices against the node's own


def slots_of(memory_bytes: Sequence[Sequence[int]], expert_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Returns how many whole experts each device of each node has memory for."""
    return tuple(tuple(each // expert_bytes for each in devices) for devices in memory_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """The nodes' memory for experts, the experts that they have, and the routing of their own requests."""

    slots: tuple[tuple[int, ...], ...]  # of each node's devices, in experts
    activations: Values  # [N, L, E] how often the node's requests chose the expert
    expert_bytes: int = 0
    on_disk: BoolArray | None = None  # [N, L, E]; None: every node has every expert
    in_ram: BoolArray | None = None  # [N, L, E]; None: none has any yet
    from_disk: bool = False  # whether experts beyond memory may stay on disk
    exists: BoolArray | None = None  # [L, E]; None: every layer has as many experts

    @property
    def experts(self) -> BoolArray:
        """Returns which experts there are, [L, E]."""
        return np.ones(self.activations.shape[1:], np.bool_) if self.exists is None else self.exists

    @property
    def room(self) -> IntArray:
        """Returns how many experts each node keeps at most, [N]."""
        most = int(np.count_nonzero(self.experts))
        return np.array([min(sum(devices), most) for devices in self.slots], np.int64)

    @property
    def disks(self) -> BoolArray:
        """Returns which node has which expert on disk, [N, L, E]."""
        return np.ones(self.activations.shape, np.bool_) if self.on_disk is None else self.on_disk

    @property
    def held(self) -> BoolArray:
        """Returns which node has which expert at all, [N, L, E]."""
        return self.disks if self.in_ram is None else self.disks | self.in_ram

    @property
    def expected(self) -> Values:
        """Returns the activations [N, L, E] by which a node chooses among experts.

        A node without counts at a layer gets the mean of the others. The choices of all nodes decide between experts
        that a node chooses equally often.
        """
        known = self.activations.sum(axis=2, keepdims=True) > 0
        mean = self.activations.sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        scale = TIE * min(1.0, float(1 / max(mean.max(), 1e-300)))
        expected: Values = np.where(known, self.activations + scale * mean, mean)
        return expected


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """States where every expert is kept."""

    homes: BoolArray  # [N, L, E] in the node's memory
    device: npt.NDArray[np.int8]  # [N, L, E] on which of the node's devices; -1: not in its memory
    disk: BoolArray  # [N, L, E] on the node's disk, for all: no memory holds it


def refuse_nowhere(problem: PlacementProblem) -> None:
    """Raises PlacementInfeasible where an expert is nowhere."""
    nowhere = np.argwhere(problem.experts & ~problem.held.any(axis=0))
    if len(nowhere):
        layer, expert = nowhere[0].tolist()
        raise PlacementInfeasible(
            f"{len(nowhere)} experts are neither on disk nor in memory of any box; the first is expert {expert} of "
            f"layer {layer}. Copy the store to one of the boxes",
            len(nowhere) * problem.expert_bytes,
        )


def as_served(problem: PlacementProblem, homes: BoolArray) -> Placement:
    """Returns the homes [N, L, E] as engines serve them: experts without one in memory are on every disk that has them.

    Experts on no disk either stay at the nodes that hold them in RAM.
    """
    homeless = problem.experts & ~homes.any(axis=0)
    on_disk = homeless & problem.disks.any(axis=0)
    disk = problem.disks & on_disk | problem.held & homeless & ~on_disk
    return Placement(homes, np.where(homes, 0, -1).astype(np.int8), disk)


def disk_homes(problem: PlacementProblem) -> BoolArray:
    """Returns the homes [N, L, E] on disk of the experts beyond memory: the least chosen ones.

    None where memory suffices. Raises PlacementInfeasible where an expert is nowhere, or memory is too small and disks
    cannot make up for it.
    """
    room, held, disks = problem.room, problem.held, problem.disks
    homes = np.zeros(held.shape, np.bool_)
    experts = problem.experts
    total = int(np.count_nonzero(experts))
    short = total - int(room.sum())
    spare = int((experts & disks.any(axis=0)).sum()) if problem.from_disk else 0
    if short > spare:
        lacking = (short - spare) * problem.expert_bytes
        missing = f"{lacking} bytes" if lacking else f"room for {short - spare} experts"
        raise PlacementInfeasible(
            f"{len(room)} boxes hold {int(room.sum())} of {total} experts in memory; {missing} missing: raise "
            "memory.ram_bytes or add a box",
            lacking,
        )
    refuse_nowhere(problem)
    if short > 0:
        asked = np.where(experts & disks.any(axis=0), problem.activations.sum(axis=0), np.inf)
        given = np.zeros(len(room))
        for place in np.argsort(asked, axis=None, kind="stable")[:short]:
            layer, expert = divmod(int(place), held.shape[2])
            node = int(np.argmin(np.where(disks[:, layer, expert], given, np.inf)))
            homes[node, layer, expert] = True
            given[node] += 1
    return homes


def required(problem: PlacementProblem, disk: BoolArray) -> BoolArray:
    """Returns the experts [L, E] that must be in a memory: no disk is their home."""
    return np.asarray(problem.experts & ~disk.any(axis=0), np.bool_)


def placed(problem: PlacementProblem, homes: BoolArray, disk: BoolArray) -> Placement:
    """Returns the placement with these homes [N, L, E], divided among each node's devices.

    Each layer is divided in proportion to the devices' free room. The most chosen expert goes first, each to the device
    with the least work for the layer.
    """
    device = np.full(homes.shape, -1, np.int8)
    asked = problem.activations.sum(axis=0)
    for node, devices in enumerate(problem.slots):
        free = np.array(devices, np.int64)
        for layer in range(homes.shape[1]):
            here = np.flatnonzero(homes[node, layer])
            part = shares(len(here), free)
            for each, members in enumerate(pack(asked[layer, here], part)):
                device[node, layer, here[members]] = each
            free -= part
    return Placement(homes, device, disk)


Solve = Callable[[PlacementProblem, IntArray], Placement]  # of the layers of one size


def by_size(
    problem: PlacementProblem, layer_bytes: Sequence[int], rooms: Sequence[Sequence[int]], solve: Solve
) -> Placement:
    """Returns the placements of all sizes as one, each placed by itself in the room that boxes have for it.

    `rooms` [N, C] counts experts of each size, the smallest first; it is not looked at where there is one size. Raises
    PlacementInfeasible.
    """
    homes, disk = np.zeros(problem.activations.shape, np.bool_), np.zeros(problem.activations.shape, np.bool_)
    sizes = layers_of_sizes(layer_bytes)
    for number, layers in enumerate(sizes):
        part = problem
        if len(sizes) > 1:
            part = _part(problem, layers, layer_bytes[layers[0]], [room[number] for room in rooms])
        found = solve(part, layers)
        homes[:, layers], disk[:, layers] = found.homes, found.disk
    return placed(problem, homes, disk)


def _part(problem: PlacementProblem, layers: IntArray, size_bytes: int, rooms: Sequence[int]) -> PlacementProblem:
    """Returns the problem for the layers of one size of experts."""

    def of(which: BoolArray | None) -> BoolArray | None:
        return None if which is None else which[:, layers]

    return replace(
        problem,
        slots=tuple((room,) for room in rooms),
        activations=problem.activations[:, layers],
        expert_bytes=size_bytes,
        on_disk=of(problem.on_disk),
        in_ram=of(problem.in_ram),
        exists=None if problem.exists is None else problem.exists[layers],
    )


def cover(problem: PlacementProblem, homes: BoolArray, must: BoolArray) -> None:
    """Gives a home to each expert that must [L, E] have one, where it costs least. `homes` [N, L, E] is changed.

    It takes free room, or the place of the expert least asked for there that others keep, too, or that need not be
    kept.
    """
    nodes = len(homes)
    value = problem.expected.reshape(nodes, -1)
    kept, needed = homes.reshape(nodes, -1), must.ravel()
    free = problem.room - kept.sum(axis=1)
    lost = np.flatnonzero(needed & ~kept.any(axis=0))
    for expert in lost[np.argsort(-value[:, lost].sum(axis=0), kind="stable")]:
        spare = np.where(kept & ((kept.sum(axis=0) > 1) | ~needed), value, np.inf)  # [N, M]
        price = np.where(free > 0, 0.0, spare.min(axis=1)) - value[:, expert]
        node = int(np.argmin(price))
        if free[node] > 0:
            free[node] -= 1
        else:
            kept[node, int(np.argmin(spare[node]))] = False
        kept[node, expert] = True
    homes[:] = kept.reshape(homes.shape)


def fill(problem: PlacementProblem, homes: BoolArray) -> None:
    """Gives each node's free room to the experts that its requests choose most. Changes `homes` [N, L, E]."""
    value = problem.expected
    for node, room in enumerate(problem.room):
        free = int(room) - int(homes[node].sum())
        if free > 0:
            wanted = np.where(homes[node], -np.inf, value[node])
            best = np.argsort(-wanted, axis=None, kind="stable")[:free]
            homes[node].ravel()[best] = True


def protect(problem: PlacementProblem, homes: BoolArray, replicas: int) -> None:
    """Gives each expert `replicas` holders, in memory or on disk, as far as there is room. Changes `homes` [N, L, E].

    The most chosen experts are copied first, each to the cheapest node. A copy takes free room there, or replaces the
    least chosen expert that enough other nodes hold and another node has in memory.
    """
    nodes = len(homes)
    wanted = min(replicas, nodes)
    value = problem.expected.reshape(nodes, -1)
    kept, disks = homes.reshape(nodes, -1), problem.disks.reshape(nodes, -1)
    holders, copies = (kept | disks).sum(axis=0), kept.sum(axis=0)
    free = problem.room - kept.sum(axis=1)
    order = [each[np.argsort(value[node, each], kind="stable")] for node, each in enumerate(map(np.flatnonzero, kept))]
    place = np.zeros(nodes, np.int64)  # in `order`: the experts before it are not given up

    def spare(node: int) -> int:
        """Returns the expert that the node gives up first; -1 if it keeps all."""
        while place[node] < len(order[node]):
            expert = int(order[node][place[node]])
            if copies[expert] > 1 and (disks[node, expert] or holders[expert] > wanted):
                return expert
            place[node] += 1
        return -1

    short = np.flatnonzero(problem.experts.ravel() & (holders < wanted))
    for expert in short[np.argsort(-value[:, short].sum(axis=0), kind="stable")]:
        for _ in range(wanted - int(holders[expert])):
            prices = {
                node: (0.0 if free[node] > 0 else float(value[node, out])) - float(value[node, expert])
                for node in range(nodes)
                if not (kept[node, expert] or disks[node, expert]) and (free[node] > 0 or (out := spare(node)) >= 0)
            }
            if not prices:
                break
            node = min(prices, key=lambda each: prices[each])
            if free[node] > 0:
                free[node] -= 1
            else:
                out = spare(node)
                kept[node, out] = False
                place[node] += 1  # it is not there to be given up again
                copies[out] -= 1
                holders[out] -= not disks[node, out]
            kept[node, expert] = True
            copies[expert] += 1
            holders[expert] += 1
