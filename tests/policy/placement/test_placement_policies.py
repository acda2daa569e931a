"""Every placement policy keeps every expert within memory, or names the memory that is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.gimbal_placement import gimbal
from edgemoe.policy.placement.policies import POLICIES as POLICIES_BY_NAME
from edgemoe.policy.placement.policies import PlacementFunction, PlacementOptions, place
from edgemoe.policy.placement.prism import prism
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values, protect, slots_of
from edgemoe.policy.placement.rendezvous import RendezvousCosts, rendezvous, routes_for
from edgemoe.policy.placement.route_score import Routes, heaviest_pairs, remote_calls
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.experts import layers_of_sizes

TOP_K = 2
Policy = Callable[[PlacementProblem], Placement]


def drawn(problem: PlacementProblem, tokens: int = 12) -> list[Routes]:
    """Draws tokens of each node by its activations."""
    rng = np.random.default_rng(1)
    nodes, layers, experts = problem.activations.shape
    scores = np.log(problem.activations[:, None] + 0.1) + rng.gumbel(size=(nodes, tokens, layers, experts))
    return list(np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.int16))


def passed_of(problem: PlacementProblem) -> Values:
    """Draws random successions of experts, [L - 1, E, E]."""
    _, layers, experts = problem.activations.shape
    return np.random.default_rng(2).integers(0, 50, (layers - 1, experts, experts)).astype(np.float64)


POLICIES: dict[str, Policy] = {
    "uniform": uniform,
    "prism": prism,
    "gimbal": lambda problem: gimbal(problem, passed_of(problem)),
    "exact": exact,
    "routes": lambda problem: rendezvous(problem, drawn(problem)),
    "pairs": lambda problem: rendezvous(
        problem,
        routes_for(
            problem,
            [heaviest_pairs(each, problem.activations.shape[2], 5) for each in drawn(problem)],
            TOP_K,
            np.random.default_rng(0),
        ),
    ),
}


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Draws small clusters, about a third of them with too little memory."""
    nodes, layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 8))
    most = 2 * layers * experts // nodes + 2
    devices = st.lists(st.integers(0, most), min_size=1, max_size=2).map(tuple)
    slots = tuple(draw(devices) for _ in range(nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    activations = rng.integers(0, draw(st.sampled_from([2, 1000])), (nodes, layers, experts)).astype(np.float64)
    activations[draw(st.integers(0, nodes - 1)), draw(st.integers(0, layers - 1))] = 0  # no activations known there
    on_disk = rng.random(activations.shape) < draw(st.sampled_from([0.6, 1.0]))
    on_disk[0] |= ~on_disk.any(axis=0)
    return PlacementProblem(slots, activations, 10, on_disk, from_disk=draw(st.booleans()))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(20), deadline=None)
@given(problem=problems())
def test_every_expert_has_a_home_and_no_device_more_than_it_holds(name: str, problem: PlacementProblem) -> None:
    short = problem.activations[0].size - int(problem.room.sum())
    if short > 0 and not problem.from_disk:
        with pytest.raises(PlacementInfeasible, match="bytes missing") as caught:
            POLICIES[name](problem)
        assert caught.value.missing_bytes == short * problem.expert_bytes
        return
    placement = POLICIES[name](problem)
    assert (placement.homes | placement.disk).any(axis=0).all()
    assert placement.disk.sum() == max(0, short)
    assert not (placement.disk & ~problem.disks).any()
    np.testing.assert_array_equal(placement.device >= 0, placement.homes)
    for node, devices in enumerate(problem.slots):
        for device, slots in enumerate(devices):
            assert (placement.device[node] == device).sum() <= slots


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "exact"])
@settings(max_examples=examples(20), deadline=None)
@given(problem=problems())
def test_nothing_makes_fewer_remote_calls_than_exact(name: str, problem: PlacementProblem) -> None:
    if problem.activations[0].size > problem.room.sum() and not problem.from_disk:
        return
    least = remote_calls(exact(problem), problem.activations)
    assert least <= remote_calls(POLICIES[name](problem), problem.activations) + 1e-6 * problem.activations.sum()


def test_memory_missing_for_experts_on_no_disk_is_named_in_bytes() -> None:
    on_disk = np.zeros((2, 1, 6), bool)
    on_disk[0, 0, :2] = True
    in_ram = ~on_disk
    problem = PlacementProblem(((1,), (2,)), np.ones((2, 1, 6)), 100, on_disk, in_ram, from_disk=True)
    with pytest.raises(PlacementInfeasible, match="100 bytes missing"):
        uniform(problem)


def test_the_least_frequent_experts_stay_on_disk() -> None:
    activations = np.array([[[9.0, 1, 8, 7]], [[6, 2, 9, 1]]])
    problem = PlacementProblem(((1,), (2,)), activations, 100, from_disk=True)
    for policy in POLICIES.values():
        assert np.argwhere(policy(problem).disk.any(axis=0)).tolist() == [[0, 1]]


def test_memory_is_counted_device_by_device() -> None:
    assert slots_of([(19, 19), (38,)], 10) == ((1, 1), (3,))


def test_a_nodes_devices_share_the_load_of_each_layer() -> None:
    activations = np.tile(np.array([8.0, 4, 3, 1]), (1, 3, 1))
    devices = uniform(PlacementProblem(((6, 6),), activations)).device[0]
    for layer in range(3):
        assert sorted(activations[0, layer][devices[layer] == d].sum() for d in (0, 1)) == [7, 9]


@settings(max_examples=examples(20), deadline=None)
@given(
    problem=problems(), replicas=st.integers(1, 3), sizes=st.lists(st.sampled_from([10, 25]), min_size=3, max_size=3)
)
def test_boxes_enough_hold_each_expert_where_there_is_room_for_its_size(
    problem: PlacementProblem, replicas: int, sizes: list[int]
) -> None:
    nodes, layers, experts = problem.activations.shape
    layer_bytes = sizes[:layers]
    counts = [len(part) * experts for part in layers_of_sizes(layer_bytes)]
    wishes = PlacementOptions(drawn(problem), RendezvousCosts(), replicas)

    def placed(policy: PlacementFunction, room: list[int]) -> Placement:
        ours = replace(problem, slots=((sum(room),),) * nodes)
        return place(policy, ours, wishes, layer_bytes, [room] * nodes)

    for policy in POLICIES_BY_NAME.values():
        placement = placed(policy, [2 * count for count in counts])
        assert ((placement.homes | problem.disks).sum(axis=0) >= min(replicas, nodes)).all()
    tight = [-(-count // nodes) + 2 for count in counts]
    placement = placed(POLICIES_BY_NAME["prism"], tight)
    assert placement.homes.any(axis=0).all()
    for part, room in zip(layers_of_sizes(layer_bytes), tight, strict=True):
        assert (placement.homes[:, part].sum(axis=(1, 2)) <= room).all()


def test_replicated_experts_make_way_for_those_on_one_box_only() -> None:
    activations = np.array([[[9.0, 8, 1, 1]], [[9, 8, 1, 1]]])
    on_disk = np.array([[[True, True, True, True]], [[True, True, False, False]]])
    problem = PlacementProblem(((2,), (3,)), activations, on_disk=on_disk)
    homes = np.array([[[True, True, False, False]], [[True, True, True, False]]])
    protect(problem, homes, 2)
    assert homes[1, 0, 2:].all(), "box 0 alone had them"
    assert homes.any(axis=0).all()


@pytest.mark.parametrize("policy", [prism, exact])
def test_remaining_room_goes_to_the_most_frequent_experts(policy: Policy) -> None:
    activations = np.array([[[9.0, 8, 1, 2, 3, 4]], [[1, 2, 9, 8, 7, 3]]])
    homes = policy(PlacementProblem(((4,), (4,)), activations)).homes
    assert homes[:, 0].tolist() == [[True, True, False, False, True, True], [False, False, True, True, True, True]] or (
        activations[homes].sum() == 9 + 8 + 3 + 4 + 9 + 8 + 7 + 3
    )


@pytest.mark.parametrize("room", [8, 12, 20, 30])
def test_no_policy_gives_a_home_to_an_expert_that_a_layer_has_not_got(room: int) -> None:
    exists = np.arange(8) < np.array([8, 4, 8, 2])[:, None]
    activations = np.random.default_rng(1).random((3, 4, 8)) * exists
    problem = PlacementProblem(((room,),) * 3, activations, TOP_K, exists=exists)
    pairs = np.array([[0, 1, 7, 50], [1, 2, 3, 50], [1, 3, 6, 50], [3, 4, 5, 50]])  # as boxes may report them
    routes = routes_for(problem, [pairs] * 3, TOP_K, np.random.default_rng(0))
    wishes = PlacementOptions(routes, RendezvousCosts(), 2)
    for policy, function in POLICIES_BY_NAME.items():
        homes = place(function, problem, wishes, [10] * 4, [[room]] * 3).homes
        assert (homes.any(axis=0) == exists).all(), policy
