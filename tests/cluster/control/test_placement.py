"""The leader's plan is of the experts that the model has."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.cluster.control.placement import ExpertHome, PlanTask
from edgemoe.cluster.control.planning.targets import make_target
from edgemoe.cluster.rpc.control_messages import EngineCard


def card(layer_experts: tuple[int, ...]) -> EngineCard:
    return EngineCard("boot", 1, 2, "m", 3, 6, 4096, 10, b"", b"", True, layer_experts)


def test_what_a_layer_does_not_have_is_nobody_s() -> None:
    engine = card((6, 2, 4))
    exists = np.arange(6) < np.array([6, 2, 4])[:, None]
    boxes = tuple(ExpertHome(node, 6, exists) for node in "ab")
    homes = make_target(PlanTask(engine, boxes, 1)).homes
    assert (homes[0] ^ homes[1] == exists).all()


@pytest.mark.parametrize("stated", [(), (6,), (6, 6, 6, 6)])
def test_without_a_number_for_each_layer_all_have_as_many(stated: tuple[int, ...]) -> None:
    boxes = tuple(ExpertHome(node, 9, np.ones((3, 6), np.bool_)) for node in "ab")
    homes = make_target(PlanTask(card(stated), boxes, 1)).homes
    assert (homes[0] ^ homes[1]).all()
