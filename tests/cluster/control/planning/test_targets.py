"""The leader's plan is of the experts that the model has, in the room that boxes have for each size of them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.cluster.control.messages import Announce, ChannelDescription
from edgemoe.cluster.control.planning.targets import (
    ExpertHome,
    HomeInventory,
    PlacementTask,
    make_plan,
    make_target,
    replan_reason,
)
from edgemoe.errors import PlacementInfeasible
from edgemoe.types.placement import pack_bits


def card(layer_experts: tuple[int, ...]) -> ChannelDescription:
    return ChannelDescription("boot", 1, 2, "m", 3, 6, 4096, 10, b"", b"", True, layer_experts)


def test_experts_beyond_a_layer_have_no_home() -> None:
    engine = card((6, 2, 4))
    exists = np.arange(6) < np.array([6, 2, 4])[:, None]
    boxes = tuple(ExpertHome(node, (6,), exists) for node in "ab")
    homes = make_target(PlacementTask(engine, boxes, 1)).homes
    assert (homes[0] ^ homes[1] == exists).all()


@pytest.mark.parametrize("stated", [(), (6,), (6, 6, 6, 6)])
def test_without_a_number_for_each_layer_all_have_as_many(stated: tuple[int, ...]) -> None:
    boxes = tuple(ExpertHome(node, (9,), np.ones((3, 6), np.bool_)) for node in "ab")
    homes = make_target(PlacementTask(card(stated), boxes, 1)).homes
    assert (homes[0] ^ homes[1]).all()


SIZES = (4096, 8192, 4096)  # of an expert, by layer


@pytest.mark.parametrize("rooms", [((9, 4), (6, 5)), ((12, 1), (2, 6)), ((5, 2), (7, 4))])
def test_experts_of_each_size_are_placed_in_the_room_for_that_size(rooms: tuple[tuple[int, ...], ...]) -> None:
    engine = msgspec.structs.replace(card(()), layer_bytes=SIZES)
    boxes = tuple(ExpertHome(node, room, np.ones((3, 6), np.bool_)) for node, room in zip("ab", rooms, strict=True))
    homes = make_target(PlacementTask(engine, boxes, 1)).homes
    assert homes.any(axis=0).all()
    for box, (small, large) in zip(homes, rooms, strict=True):
        assert box[[0, 2]].sum() <= small
        assert box[1].sum() <= large


@pytest.mark.parametrize(("rooms", "why"), [((12, 6), ""), ((11, 7), "a has less room"), ((13, 5), "a has less room")])
def test_a_plan_goes_on_while_there_is_room_for_each_size(rooms: tuple[int, ...], why: str) -> None:
    engine = msgspec.structs.replace(card(()), layer_bytes=SIZES)
    whole = np.ones((3, 6), np.bool_)
    plan = make_plan(engine, make_target(PlacementTask(engine, (ExpertHome("a", (12, 6), whole),), 1)), 1, 1)
    assert replan_reason(plan, engine, (ExpertHome("a", rooms, whole),), 5.0) == why


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 18), st.floats(0.0, 1e5)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_no_expert_lives_on_a_box_that_may_leave_and_its_coming_and_going_changes_no_plan(
    boxes: list[tuple[bool, int, float]], replicas: int
) -> None:
    """Boxes: whether it may leave, its room for experts, and for how long it is away if it may."""
    bits = pack_bits(np.ones((3, 6), np.bool_))
    engine = msgspec.structs.replace(card(()), disk=bits, ram=bits)
    announced = {
        f"box-{n}": Announce("1", "box", "", engine=msgspec.structs.replace(engine, rooms=(room,)), may_leave=leaves)
        for n, (leaves, room, _) in enumerate(boxes)
    }
    staying = [f"box-{n}" for n, (leaves, room, _) in enumerate(boxes) if not leaves and room]
    inventory, away = HomeInventory(), {f"box-{n}": away_s for n, (leaves, _, away_s) in enumerate(boxes) if leaves}
    seen = inventory.update(announced, lambda _: 0.0, engine, 0.0)
    task = PlacementTask(engine, seen, replicas)
    if not staying:
        with pytest.raises(PlacementInfeasible):
            make_target(task)
        return
    target = make_target(task)
    assert set(target.nodes) == set(staying)
    assert (target.homes | target.disk).any(axis=0).all(), "each expert has a home that stays"
    plan = make_plan(engine, target, 1, 1)
    for gone in (away, {}, dict.fromkeys(away, 0.5)):
        later = inventory.update(announced, lambda node: gone.get(node, 0.0), engine, 1.0)  # noqa: B023
        assert replan_reason(plan, engine, later, 5.0) == ""
    without = inventory.update({node: announced[node] for node in staying}, lambda _: 0.0, engine, 2.0)
    assert replan_reason(plan, engine, without, 5.0) == ""
    changed = announced | {staying[0]: msgspec.structs.replace(announced[staying[0]], may_leave=True)}
    assert replan_reason(plan, engine, inventory.update(changed, lambda _: 0.0, engine, 3.0), 5.0)


@pytest.mark.parametrize(("rooms", "seen"), [((7, 3), (7, 3)), ((), (0, 0)), ((10,), (0, 0)), ((1, 2, 3), (0, 0))])
def test_room_that_is_not_told_by_size_is_none(rooms: tuple[int, ...], seen: tuple[int, ...]) -> None:
    bits = pack_bits(np.ones((3, 6), np.bool_))
    engine = msgspec.structs.replace(card(()), layer_bytes=SIZES, rooms=rooms, disk=bits, ram=bits)
    (box,) = HomeInventory().update({"a": Announce("1", "box", "", engine=engine)}, lambda _: 0.0, engine, 0.0)
    assert box.rooms == seen
