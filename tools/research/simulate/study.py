"""One simulated cluster: its servers, a policy's placement, and the results of its requests."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edgemoe.policy.placement.policies import PlacementOptions, place
from edgemoe.policy.placement.problem import Placement, PlacementProblem
from edgemoe.policy.placement.rendezvous import RendezvousCosts, routes_for
from edgemoe.policy.placement.route_score import heaviest_pairs, masks_of
from tools.research.placement.compared_placements import POLICIES
from tools.research.simulate.costs import Costs
from tools.research.simulate.event_heap import Numbers
from tools.research.simulate.events import Cluster, all_computing, simulate
from tools.research.simulate.routed_workload import EXPERTS, HIDDEN_BYTES, Task, prompts_of

SHAPE = (1, 1, 2)  # GPUs of the servers, in turn [Prism, IV-A]
MOST_SERVERS = 48  # of one cluster: 64 GPUs, for a cluster has 64 boxes at most
PAIRS = 900  # heaviest pairs of a layer that fit into a report


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a study, one figure each."""

    gpus: int = 4
    policy: str = "rendezvous"
    share: float = 0.35  # of a model's experts that a GPU has room for [Prism, IV-A]
    mbit_s: float = 500.0
    delay_s: float = 0.1e-3  # one way
    every_s: float = 10.0  # between two prompts at a server, on average
    prompts: int = 1000
    emitted: int = 20
    seed: int = 0


def servers_of(gpus: int) -> list[int]:
    """Returns the GPUs of each server."""
    servers = [SHAPE[n % len(SHAPE)] for n in range(gpus)]
    count = int(np.searchsorted(np.cumsum(servers), gpus)) + 1
    return servers[:count]


def placed_by(setting: Setting, tasks: list[Task], servers: list[int]) -> Placement:
    """Returns the policy's placement, by the seen tokens of each server's task."""
    seen = [np.concatenate(tasks[n % len(tasks)].seen) for n in range(len(tasks))]
    counts = [
        np.array([np.bincount(each[:, layer].ravel(), minlength=EXPERTS) for layer in range(each.shape[1])], np.float64)
        for each in seen
    ]
    pairs = [heaviest_pairs(each, EXPERTS, PAIRS) for each in seen]
    room = int(setting.share * counts[0].size)
    kinds = [n % len(tasks) for n in range(len(servers))]
    problem = PlacementProblem(tuple((room,) * gpus for gpus in servers), np.stack([counts[kind] for kind in kinds]))
    top_k = seen[0].shape[2]
    routes = routes_for(problem, [pairs[kind] for kind in kinds], top_k, np.random.default_rng(setting.seed))
    return place(
        POLICIES[setting.policy], problem, PlacementOptions(routes, RendezvousCosts(), 1), [1] * len(counts[0]), []
    )


def cluster_of(setting: Setting, placement: Placement, servers: list[int], costs: Costs) -> Cluster:
    return Cluster(
        masks_of(placement.homes),
        placement.device,
        np.array(servers),
        costs.dense_s,
        costs.dense_token_s,
        costs.launch_s,
        costs.expert_s,
        costs.token_s,
        HIDDEN_BYTES * 8 / (setting.mbit_s * 1e6),
        setting.delay_s,
        all_computing(len(servers)),
    )


def outcome(
    setting: Setting, tasks: list[Task], costs: Costs, at_s: Numbers, placements: dict[str, Placement]
) -> dict[str, float]:
    """Returns figures of the setting's prompts, arriving at these times. Known placements are not solved again.

    More servers than a cluster may have are several clusters, with a part of the prompts each.
    """
    servers = servers_of(setting.gpus)
    clusters = [servers[n : n + MOST_SERVERS] for n in range(0, len(servers), MOST_SERVERS)]
    began, solved_s = time.perf_counter(), 0.0
    ends, firsts, waits, local = [], [], [], np.zeros(3)
    for number, part in enumerate(clusters):
        key = f"{setting.policy} {setting.share} {part}"
        if key not in placements:
            start = time.perf_counter()
            placements[key] = placed_by(setting, tasks, part)
            solved_s += time.perf_counter() - start
        rng = np.random.default_rng((setting.seed, number))
        prompts = prompts_of(tasks, at_s[number :: len(clusters)], len(part), setting.emitted, rng)
        result = simulate(prompts, cluster_of(setting, placements[key], part, costs))
        ends.append(result.end_s - prompts.at_s)
        firsts.append(result.first_s - prompts.at_s)
        waits.append(result.waits)
        local += result.local
    took = np.concatenate(ends)
    return {
        "mean_s": float(took.mean()),
        "p99_s": float(np.quantile(took, 0.99)),
        "first_s": float(np.concatenate(firsts).mean()),
        "experts_s": float(np.concatenate(waits).mean()),
        "local": float(local[0] / local[1]),
        "calls": float(local[2] / len(took)),
        "solved_s": solved_s,
        "ran_s": time.perf_counter() - began - solved_s,
    }
