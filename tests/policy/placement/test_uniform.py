"""Uniform placement: every expert has a home, memory is never exceeded, and impossible problems are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.placement import PlacementPlan, pack_bits, unpack_bits

NODES = ("a", "b", "c")


def homes_of(
    slots: Mapping[str, int],
    disk: Mapping[str, np.ndarray],
    ram: Mapping[str, np.ndarray] | None = None,
    replicas: int = 1,
    expert_bytes: int = 0,
) -> dict[str, np.ndarray]:
    on_disk = np.stack([disk[node] for node in NODES])
    in_ram = None if ram is None else np.stack([ram[node] for node in NODES])
    problem = PlacementProblem(
        tuple((slots[node],) for node in NODES), np.zeros(on_disk.shape), expert_bytes, on_disk, in_ram
    )
    return dict(zip(NODES, uniform(problem, replicas).homes, strict=True))


def everywhere(layers: int, experts: int) -> dict[str, np.ndarray]:
    return {node: np.ones((layers, experts), bool) for node in NODES}


@pytest.mark.parametrize("seed", range(30))
def test_every_expert_has_a_home_and_no_box_more_than_it_holds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts, replicas = int(rng.integers(1, 6)), int(rng.integers(1, 20)), int(rng.integers(1, 5))
    total = layers * experts
    room = dict(zip(NODES, rng.integers(0, 2 * total + 1, 3).tolist(), strict=True))
    room["b"] += max(0, total - sum(min(total, r) for r in room.values()))
    homes = homes_of(room, everywhere(layers, experts), replicas=replicas)
    copies = sum(h.astype(int) for h in homes.values())
    assert copies.min() >= 1
    assert copies.max() <= max(1, min(replicas, 3))
    assert all(homes[node].sum() <= room[node] for node in NODES)
    if min(room.values()) >= total * replicas:
        assert (copies == min(replicas, 3)).all()


def test_layers_are_spread_in_proportion_to_memory() -> None:
    room = {"a": 40, "b": 40, "c": 80}
    homes = homes_of(room, everywhere(4, 40))
    assert {node: h.sum(axis=1).tolist() for node, h in homes.items()} == {
        "a": [10] * 4,
        "b": [10] * 4,
        "c": [20] * 4,
    }


def test_a_box_that_has_the_expert_on_disk_is_preferred() -> None:
    disk = {node: np.zeros((2, 9), bool) for node in NODES}
    for n, node in enumerate(NODES):
        disk[node][:, n::3] = True
    homes = homes_of(dict.fromkeys(NODES, 6), disk)
    assert all((homes[node] == disk[node]).all() for node in NODES)


def test_too_little_memory_is_refused_with_the_missing_bytes() -> None:
    with pytest.raises(PlacementInfeasible, match="3000 bytes missing") as caught:
        homes_of({"a": 5, "b": 5, "c": 5}, everywhere(2, 9), expert_bytes=1000)
    assert caught.value.missing_bytes == 3000


def test_an_expert_on_no_disk_is_named() -> None:
    disk = everywhere(2, 9)
    for held in disk.values():
        held[1, 4] = False
    with pytest.raises(PlacementInfeasible, match="expert 4 of layer 1"):
        homes_of(dict.fromkeys(NODES, 20), disk)


def test_an_expert_that_is_only_in_memory_stays_there_and_is_copied_from_there() -> None:
    disk = everywhere(2, 9)
    ram = {node: np.zeros((2, 9), bool) for node in NODES}
    for held in disk.values():
        held[:, 4:6] = False
    ram["b"][:, 4] = ram["c"][:, 5] = True
    homes = homes_of(dict.fromkeys(NODES, 9), disk, ram)
    assert homes["b"][:, 4].all()
    assert homes["c"][:, 5].all()
    assert sum(held.sum() for held in homes.values()) == 18
    twice = homes_of(dict.fromkeys(NODES, 14), disk, ram, replicas=2)
    assert twice["b"][:, 4].all()
    assert twice["c"][:, 5].all()
    assert (sum(held.astype(int) for held in twice.values()) == 2).all()


def test_a_box_keeps_more_than_its_share_rather_than_give_away_an_only_copy() -> None:
    disk = everywhere(2, 9)
    for held in disk.values():
        held[:, :6] = False
    ram = {node: np.zeros((2, 9), bool) for node in NODES}
    ram["b"][:, :6] = True
    homes = homes_of(dict.fromkeys(NODES, 12), disk, ram)
    assert homes["b"][:, :6].all()


def test_further_copies_are_of_the_most_frequent_experts() -> None:
    activations = np.random.default_rng(0).permutation(18.0 * np.arange(18)).reshape(1, 2, 9).repeat(3, axis=0)
    homes = uniform(PlacementProblem(((8,), (8,), (8,)), activations), replicas=2).homes
    twice = activations[0][homes.sum(axis=0) == 2]
    assert len(twice) == 6
    assert len(set(twice) & set(np.sort(activations[0], axis=None)[-6:])) >= 5, "one may be where the last room is"


def test_a_plan_has_a_home_for_each_expert() -> None:
    homes = homes_of(dict.fromkeys(NODES, 9), everywhere(3, 7))
    plan = PlacementPlan(1, 2, "d" * 32, 3, 7, NODES, tuple(pack_bits(homes[node]) for node in NODES))
    for node in NODES:
        np.testing.assert_array_equal(plan.homes_of(node), homes[node])
    assert not plan.homes_of("stranger").any()
    assert plan.digest() == msgspec.structs.replace(plan).digest()
    assert plan.digest() != msgspec.structs.replace(plan, version=3).digest()
    with pytest.raises(ValueError, match="bitmap"):
        unpack_bits(b"\0", 3, 7)


@pytest.mark.parametrize("seed", range(20))
def test_layers_may_have_different_numbers_of_experts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, experts = int(rng.integers(2, 6)), int(rng.integers(3, 20))
    exists = np.arange(experts) < rng.integers(1, experts + 1, layers)[:, None]
    total, replicas = int(exists.sum()), int(rng.integers(1, 4))
    room = rng.integers(0, total + 1, 3)
    room[1] += max(0, total - int(np.minimum(room, total).sum()))
    problem = PlacementProblem(
        tuple((int(each),) for each in room),
        np.zeros((3, layers, experts)),
        on_disk=np.repeat(exists[None], 3, axis=0),
        exists=exists,
    )
    homes = uniform(problem, replicas).homes
    assert (homes.any(axis=0) == exists).all(), "each has a home, and what does not exist has none"
    assert (homes.sum(axis=(1, 2)) <= room).all()
    if total > 1:
        with pytest.raises(PlacementInfeasible, match=f"of {total} experts"):
            uniform(replace(problem, slots=((1,), (0,), (0,))))
