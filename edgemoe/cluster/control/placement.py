"""When a leader makes a new plan, and from what. Pure: what the boxes have in, a plan or the reason for none out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.cluster.rpc.control_messages import EngineCard
from edgemoe.errors import PlacementInfeasible
from edgemoe.policy.placement.problem import PlacementProblem
from edgemoe.policy.placement.uniform import uniform
from edgemoe.types.arrays import BoolArray
from edgemoe.types.placement import PlacementPlan, pack_bits


@dataclass(frozen=True, slots=True, eq=False)
class ExpertHome:
    """A box as a home of experts, and which it has. Without `disk` nothing is known of it yet."""

    node: str
    room: int = 0  # experts
    disk: BoolArray | None = None  # [L, E]
    ram: BoolArray | None = None
    absent_s: float = 0.0
    leaving: bool = False

    @property
    def there(self) -> bool:
        return self.disk is not None and not self.absent_s and not self.leaving


def why_anew(plan: PlacementPlan | None, engine: EngineCard, boxes: Sequence[ExpertHome], absent_s: float) -> str:
    """Returns why a new plan is due for the model that the engine serves.

    "" while the present one will do, or something may still come back.
    """
    known = {box.node: box for box in boxes}
    if plan is None or (plan.model, plan.layers, plan.experts) != (engine.model, engine.layers, engine.experts):
        awaited = [box for box in boxes if not box.there and not box.leaving and box.absent_s < absent_s]
        return "" if awaited else "there is none for this model"
    for node in plan.nodes:
        box = known.get(node)
        if box is None or box.leaving:
            return f"{node} leaves"
        if box.absent_s >= absent_s:
            return f"{node} is gone"
        if box.disk is not None and int(plan.homes_of(node).sum()) > box.room:
            return f"{node} has less room"
    if any(not box.there and not box.leaving and box.node in plan.nodes for box in boxes):
        return ""  # one of them may come back in a moment; then all is decided at once
    return next(
        (f"{box.node} has joined" for box in boxes if box.there and box.room and box.node not in plan.nodes), ""
    )


def make_plan(
    engine: EngineCard, boxes: Sequence[ExpertHome], replicas: int, epoch: int, version: int
) -> PlacementPlan:
    """Returns the uniform plan over the boxes that are there, for the engine's model. Raises PlacementInfeasible."""
    there = [box for box in sorted(boxes, key=lambda box: box.node) if box.there and box.room]
    if not there:
        all_bytes = engine.layers * engine.experts * engine.expert_bytes
        raise PlacementInfeasible("no box has room for experts yet", all_bytes)
    none = np.zeros((engine.layers, engine.experts), np.bool_)
    problem = PlacementProblem(
        slots=tuple((box.room,) for box in there),
        activations=np.zeros((len(there), engine.layers, engine.experts)),
        expert_bytes=engine.expert_bytes,
        on_disk=np.stack([none if box.disk is None else box.disk for box in there]),
        in_ram=np.stack([none if box.ram is None else box.ram for box in there]),
        exists=_exists(engine),
    )
    bits = tuple(pack_bits(homes) for homes in uniform(problem, replicas).homes)
    nodes = tuple(box.node for box in there)
    return PlacementPlan(epoch, version, engine.model, engine.layers, engine.experts, nodes, bits)


def _exists(engine: EngineCard) -> BoolArray:
    """Returns which experts the model has, [L, E]: all where the engine does not state a number for each layer."""
    counts = engine.layer_experts if len(engine.layer_experts) == engine.layers else (engine.experts,) * engine.layers
    exists: BoolArray = np.arange(engine.experts) < np.array(counts, np.int64)[:, None]
    return exists
