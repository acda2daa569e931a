"""Each method's placement by prior knowledge, written as the plan with which daemons start.

All boxes start with the same plan on disk, as after a restart of all, and the new agreement adopts it. From then on the
leader seeks better plans by the same method if `cluster.placement` has it, else by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from edgemoe.policy.placement.policies import PlacementOptions, place
from edgemoe.policy.placement.problem import Placement, PlacementProblem, Values
from edgemoe.policy.placement.rendezvous import costs_of, routes_for
from edgemoe.policy.placement.route_score import Routes, heaviest_pairs
from edgemoe.store.manifest import Manifest
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PLAN_FORMAT, PlacementPlan, pack_bits
from tools.research.placement.compared_placements import POLICIES
from tools.research.placement.placement_study import activations_of
from tools.research.placement.prism.models import Model
from tools.research.placement.prism.profile import PROMPT_TOKENS, Profile, geometry_of
from tools.testbed.daemons import Cluster

NODES = ("a", "b", "c")
DEVICES = (1, 1, 2)  # CPU share of each box [Prism, IV-A]
METHODS = tuple(each for each in POLICIES if each not in ("prism", "gimbal", "columns"))
STILL = ("uniform", "redundance")  # methods that never migrate [Prism, IV-B]
PAIRS = 900  # heaviest pairs of a layer that fit into a report


def room(model: Model) -> int:
    """Returns the number of experts that a device has room for."""
    return int(model.share * geometry_of(model.store).count)


def mixed_routes(model: Model, setting: str, by_task: dict[str, Routes], seed: int = 0) -> list[Routes]:
    """Returns each box's routes: tokens of each task in the setting's shares."""
    rng = np.random.default_rng(seed)
    found = []
    for weights in model.weights(setting):
        tasks = [task for task, weight in zip(model.tasks_of(setting), weights, strict=True) if weight]
        tokens = min(len(by_task[task]) for task in tasks)
        parts = [
            by_task[task][np.sort(rng.permutation(len(by_task[task]))[: round(weight * tokens)])]
            for task, weight in zip(model.tasks_of(setting), weights, strict=True)
        ]
        found.append(np.concatenate(parts))
    return found


def steps_of(model: Model, setting: str, by_task: dict[str, Routes]) -> tuple[Values, Values]:
    """Counts how often a token's steps compute each expert [N, L, E], and the steps per token [N], of each box.

    A prompt is one step, each further token another.
    """
    experts = geometry_of(model.store).experts
    computed, steps = {}, {}
    for task in model.tasks_of(setting):
        routes = by_task[task]
        request = PROMPT_TOKENS + model.tokens_of(task) - 1
        begins = np.arange(len(routes)) % request
        of_step = np.cumsum((begins == 0) | (begins >= PROMPT_TOKENS)) - 1
        counts = np.zeros((routes.shape[1], experts))
        for layer in range(routes.shape[1]):
            met = np.zeros((of_step[-1] + 1, experts), np.bool_)
            met[of_step[:, None], routes[:, layer]] = True
            counts[layer] = met.sum(axis=0)
        computed[task], steps[task] = counts / len(routes), (of_step[-1] + 1) / len(routes)
    parts = [dict(zip(model.tasks_of(setting), weights, strict=True)) for weights in model.weights(setting)]
    return (
        np.array([sum(weight * computed[task] for task, weight in each.items()) for each in parts]),
        np.array([sum(weight * steps[task] for task, weight in each.items()) for each in parts]),
    )


def place_by(method: str, model: Model, setting: str, profile: Profile) -> Placement:
    """Returns the method's placement for the setting's tasks."""
    geometry = geometry_of(model.store)
    seen = mixed_routes(model, setting, profile.seen)
    shares = activations_of(seen, geometry.experts) / [[[len(each)]] for each in seen]  # boxes ask equally often
    tokens = min(map(len, seen))
    problem = PlacementProblem(tuple((room(model),) * devices for devices in DEVICES), shares * tokens)
    routes: list[Routes] = []
    if method == "rendezvous":  # the others know no pairs
        pairs = [heaviest_pairs(each[:tokens], geometry.experts, PAIRS) for each in seen]
        routes = routes_for(problem, pairs, geometry.top_k, np.random.default_rng(0))
    computed, steps_per_token = steps_of(model, setting, profile.seen)
    costs = replace(costs_of(model.expert_share), computed=computed * tokens, steps_per_token=steps_per_token)
    return place(POLICIES[method], problem, PlacementOptions(routes, costs, 1), [1] * geometry.layers, [])


def partly_remote(model: Model, remote: float) -> BoolArray:
    """Returns homes [N, L, E]: the first box lacks that share of each layer's experts, the others have all."""
    geometry = geometry_of(model.store)
    rng = np.random.default_rng(1)
    homes = np.ones((len(NODES), geometry.layers, geometry.experts), np.bool_)
    for layer in homes[0]:
        layer[rng.permutation(geometry.experts)[: round(remote * geometry.experts)]] = False
    return homes


def write_plan(cluster: Cluster, model: Model, homes: BoolArray, method: str, goal: BoolArray | None = None) -> None:
    """Writes a plan with these homes for the boxes' start, and with a goal to move to, if there is one."""
    geometry = geometry_of(model.store)
    plan = PlacementPlan(
        epoch=0,
        version=1,
        model=Manifest.load(model.store).digest,
        layers=geometry.layers,
        experts=geometry.experts,
        nodes=NODES,
        homes=tuple(map(pack_bits, homes)),
        format=PLAN_FORMAT,
        policy=method,
        goal=() if goal is None else tuple(map(pack_bits, goal)),
    )
    for node in NODES:
        cluster.state_dir(node).mkdir(mode=0o700, parents=True, exist_ok=True)
        (cluster.state_dir(node) / "plan").write_bytes(msgspec.msgpack.encode(plan))


def boxes_of(model: Model, slots: Sequence[int], link_bytes_per_s: float) -> dict[str, dict[str, object]]:
    """Returns each box's own settings: memory and emulated devices for its slots."""
    slot_bytes = geometry_of(model.store).stride_bytes(0)
    found: dict[str, dict[str, Any]] = {}
    for node, devices, experts in zip(NODES, DEVICES, slots, strict=True):
        each = -(-experts // devices)
        found[node] = {"memory.ram_bytes": (devices * each * 16 // 15 + 3) * slot_bytes}
        for number in range(devices):
            found[node] |= {
                f"device.{number}.kind": "emulated",
                f"device.{number}.expert_bytes": each * slot_bytes,
                f"device.{number}.link_bytes_per_s": link_bytes_per_s,
                f"device.{number}.memory_bytes_per_s": slot_bytes / model.expert_s,
            }
    return found
