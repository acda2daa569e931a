"""The leader's plan is of the experts that the model has."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.cluster.control.placement import ExpertHome, make_plan
from edgemoe.cluster.rpc.control_messages import EngineCard


def card(layer_experts: tuple[int, ...]) -> EngineCard:
    return EngineCard("boot", 1, 2, "m", 3, 6, 4096, 10, b"", b"", True, layer_experts)


def test_what_a_layer_does_not_have_is_nobody_s() -> None:
    engine = card((6, 2, 4))
    exists = np.arange(6) < np.array([6, 2, 4])[:, None]
    boxes = [ExpertHome(node, 6, exists) for node in "ab"]
    plan = make_plan(engine, boxes, 1, 1, 1)
    assert (plan.homes_of("a") ^ plan.homes_of("b") == exists).all()


@pytest.mark.parametrize("stated", [(), (6,), (6, 6, 6, 6)])
def test_without_a_number_for_each_layer_all_have_as_many(stated: tuple[int, ...]) -> None:
    boxes = [ExpertHome(node, 9, np.ones((3, 6), np.bool_)) for node in "ab"]
    plan = make_plan(card(stated), boxes, 1, 1, 1)
    assert (plan.homes_of("a") ^ plan.homes_of("b")).all()
