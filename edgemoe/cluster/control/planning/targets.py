"""Pure: from what the leader knows of the boxes to a question for the solver, or to the plain placement at once."""

from __future__ import annotations

import math

import numpy as np

from edgemoe.cluster.control.placement import PlanTask, Target
from edgemoe.cluster.control.planning.messages import PlacementAnswer, PlacementQuestion, QuestionedBox
from edgemoe.cluster.control.planning.observation import Observation, observe
from edgemoe.cluster.rpc.control_messages import Report
from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.problem import PlacementProblem, by_size
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PlacementPolicy, pack_bits, unpack_bits


def question(
    task: PlanTask, policy: PlacementPolicy = "uniform", isolation: float = 0.0, horizon_s: float = 0.0
) -> PlacementQuestion:
    """Returns the task as the solver is asked. Raises PlacementInfeasible where no box can be a home."""
    engine, there, now = task.engine, task.there, task.now
    layers, experts = engine.layers, engine.experts
    if not there:
        raise PlacementInfeasible("no box has room for experts yet", layers * experts * engine.expert_bytes)
    none = np.zeros((layers, experts), np.bool_)
    boxes = tuple(
        QuestionedBox(
            rooms=box.rooms,
            disk=pack_bits(none if box.disk is None else box.disk),
            ram=pack_bits(none if box.ram is None else box.ram),
            homes=pack_bits(none if now is None else now.homes_of(box.node)),
            report=_fitting(task.reports.get(box.node), engine.model),
        )
        for box in there
    )
    return PlacementQuestion(
        number=0,
        policy=policy,
        layers=layers,
        experts=experts,
        layer_experts=engine.experts_of_layers,
        layer_bytes=engine.bytes_of_layers,
        replicas=task.replicas,
        isolation=isolation,
        boxes=boxes,
        horizon_s=horizon_s,
    )


def _fitting(report: Report | None, model: str) -> Report | None:
    return report if report is not None and report.model == model else None


def problem_of(asked: PlacementQuestion, seen: Observation) -> PlacementProblem:
    """Returns what the boxes have in memory and on disk, and what they ask for."""
    layers, experts = asked.layers, asked.experts
    exists: BoolArray = np.arange(experts) < np.array(asked.layer_experts, np.int64)[:, None]
    return PlacementProblem(
        slots=tuple((sum(box.rooms),) for box in asked.boxes),
        activations=np.where(exists, seen.activations, 0.0),
        expert_bytes=max(asked.layer_bytes),
        on_disk=np.stack([unpack_bits(box.disk, layers, experts) for box in asked.boxes]),
        in_ram=np.stack([unpack_bits(box.ram, layers, experts) for box in asked.boxes]),
        from_disk=True,
        exists=exists,
    )


def make_target(task: PlanTask) -> Target:
    """Returns the uniform placement over the boxes that are there. Raises PlacementInfeasible."""
    asked = question(task)
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    rooms = [box.rooms for box in asked.boxes]
    placement = by_size(problem_of(asked, seen), asked.layer_bytes, rooms, lambda part, _: uniform(part, task.replicas))
    return Target(tuple(box.node for box in task.there), placement.homes, placement.disk, _heat(seen), policy="uniform")


def target_of(task: PlanTask, asked: PlacementQuestion, solved: PlacementAnswer) -> Target:
    """Returns the solver's answer as the leader has it. Raises ValueError for one that does not fit the question."""
    homes, disk = (
        np.stack([unpack_bits(each, asked.layers, asked.experts) for each in bits])
        for bits in (solved.homes, solved.disk)
    )
    seen = observe([box.report for box in asked.boxes], asked.layers, asked.experts)
    known = task.now is not None and solved.known
    now_s, then_s = (solved.now_s, solved.then_s) if known else (math.nan, math.nan)
    nodes = tuple(box.node for box in task.there)
    return Target(nodes, homes, disk, _heat(seen), now_s, then_s, solved.policy)


def _heat(seen: Observation) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(seen.activations.sum(axis=0), np.float32)
