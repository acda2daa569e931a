"""The process that solves placements; `python -m` starts it with its niceness as argument. Imports Numba."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np

from edgemoe.cluster.control.messages import BoxReport
from edgemoe.cluster.control.planning.observation import ActivityObservation, observe, successions
from edgemoe.cluster.control.planning.planning_questions import PlacementAnswer, PlacementBox, PlacementQuestion
from edgemoe.cluster.control.planning.targets import problem_of
from edgemoe.errors import PlacementInfeasible
from edgemoe.guard import refuse_pickle
from edgemoe.helper.child_process import serve
from edgemoe.policy.placement.gimbal_placement import refined_cost
from edgemoe.policy.placement.policies import POLICIES, PlacementOptions, place
from edgemoe.policy.placement.problem import PlacementProblem, Values, as_served, refuse_nowhere
from edgemoe.policy.placement.rendezvous import costs_of, rendezvous_cost, routes_for
from edgemoe.policy.placement.route_score import remote_calls
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import ACTIVITY_UNIT, pack_bits, unpack_bits


def solve(asked: PlacementQuestion) -> PlacementAnswer:
    """Returns the placement by the policy asked for, with the waiting time that it saves."""
    reports = [box.report for box in asked.boxes]
    seen = observe(reports, asked.layers, asked.experts)
    problem = problem_of(asked, seen)
    costs = costs_of(seen.expert_share, seen.call_s / seen.call_s.mean())
    costs = replace(costs, computed=seen.computed, steps_per_token=seen.steps_per_token)
    policy = asked.policy if seen.top_k else "uniform"  # if no box has reported any choices
    wishes = PlacementOptions([], costs, asked.replicas)
    now = np.stack([unpack_bits(box.homes, asked.layers, asked.experts) for box in asked.boxes])
    if policy == "rendezvous":
        wishes = replace(wishes, routes=routes_for(problem, seen.pairs, seen.top_k, np.random.default_rng(0)))
    elif policy == "gimbal":
        wishes = replace(wishes, passed=successions(reports, seen))
    held = wishes
    try:
        refuse_nowhere(problem)
        now_cost = _cost(problem, wishes, now)
        if policy == "rendezvous" and asked.horizon_s and now.any():
            held = replace(wishes, costs=replace(costs, stay=_stay(asked, seen, now, now_cost)))
        placement = place(POLICIES[policy], problem, held, asked.layer_bytes, [box.rooms for box in asked.boxes])
    except PlacementInfeasible as error:
        return PlacementAnswer(asked.number, infeasible=str(error), missing_bytes=error.missing_bytes)
    second = float(seen.per_s * seen.call_s.mean())
    return PlacementAnswer(
        asked.number,
        tuple(pack_bits(each) for each in placement.homes),
        tuple(pack_bits(each) for each in placement.disk),
        now_cost * second,
        _cost(problem, wishes, placement.homes) * second,
        bool(seen.top_k),
        policy,
    )


def _stay(asked: PlacementQuestion, seen: ActivityObservation, now: BoolArray, now_cost: float) -> Values:
    """Returns the cost [N, L, E] of giving up a home: that of copying another expert there, see `migration.pays`."""
    copying_s = np.array(asked.layer_bytes) / seen.bytes_per_s[:, None]  # [N, L]
    return np.asarray(now * (now_cost * copying_s / asked.horizon_s)[:, :, None], np.float64)


def _cost(problem: PlacementProblem, wishes: PlacementOptions, homes: BoolArray) -> float:
    """Returns the cost that the policy minimizes: rendezvous, remote calls and cuts, or remote calls."""
    placement = as_served(problem, homes)
    if wishes.routes:
        return rendezvous_cost(problem, wishes.routes, placement, wishes.costs)
    if len(wishes.passed):
        return refined_cost(problem, placement, wishes.passed)
    return remote_calls(placement, problem.activations)


def compile_all() -> None:
    """Compiles all kernels by a small question, before pickle is refused: Numba unpickles its own data to compile."""
    layers, experts = 2, 4
    chosen = np.full((layers, experts), ACTIVITY_UNIT // 2, "<u2").tobytes()
    pairs = np.array([[layer, 0, 1, ACTIVITY_UNIT // 4] for layer in range(layers)], "<u2").tobytes()
    everything = pack_bits(np.ones((layers, experts), np.bool_))
    box = PlacementBox((layers * experts,), everything, everything, everything, BoxReport("", 1.0, chosen, pairs=pairs))
    counts, sizes = (experts,) * layers, (1,) * layers
    solve(PlacementQuestion(0, "rendezvous", layers, experts, counts, sizes, 1, (box, box)))


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    compile_all()
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer, PlacementQuestion, solve)
