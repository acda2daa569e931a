"""Placements for comparison keep every expert within memory, or name the memory that is missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.exact import exact
from edgemoe.policy.placement.policies import PlacementOptions
from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.policy.placement.rendezvous import RendezvousCosts
from edgemoe.policy.placement.route_score import remote_calls
from tools.research.placement.compared_placements import POLICIES, SERVED

COMPARED = [name for name in POLICIES if name not in SERVED]


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


def options(problem: PlacementProblem) -> PlacementOptions:
    _, layers, experts = problem.activations.shape
    passed = np.random.default_rng(2).integers(0, 50, (layers - 1, experts, experts)).astype(np.float64)
    return PlacementOptions([], RendezvousCosts(), 1, passed)


@pytest.mark.parametrize("name", COMPARED)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_every_expert_has_a_home_and_no_device_more_than_it_holds(name: str, problem: PlacementProblem) -> None:
    short = problem.activations[0].size - int(problem.room.sum())
    if short > 0 and not problem.from_disk:
        with pytest.raises(PlacementInfeasible, match="bytes missing"):
            POLICIES[name](problem, options(problem))
        return
    placement = POLICIES[name](problem, options(problem))
    assert (placement.homes | placement.disk).any(axis=0).all()
    assert placement.disk.sum() == max(0, short)
    for node, devices in enumerate(problem.slots):
        for device, slots in enumerate(devices):
            assert (placement.device[node] == device).sum() <= slots


@pytest.mark.parametrize("name", COMPARED)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_nothing_makes_fewer_remote_calls_than_exact(name: str, problem: PlacementProblem) -> None:
    if problem.activations[0].size > problem.room.sum() and not problem.from_disk:
        return
    least = remote_calls(exact(problem), problem.activations)
    found = remote_calls(POLICIES[name](problem, options(problem)), problem.activations)
    assert least <= found + 1e-6 * problem.activations.sum()
