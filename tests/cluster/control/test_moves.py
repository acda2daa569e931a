"""A plan moves while somebody dies, at each of its steps; control planes are real, time and engines are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.planes import ABC, EXPERTS, LAYERS
from support.virtual import Cluster, virtual_cluster

from edgemoe.cluster.control.planning.targets import PlacementTarget
from edgemoe.types.arrays import BoolArray

STEPS = [
    ("solved", "leader"),
    ("committing", "leader"),
    ("committed", "leader"),
    ("adopted", "leader"),
    ("obeyed", "leader"),
    ("adopted", "follower"),
    ("obeyed", "follower"),
    ("pinned", "leader"),
    ("pinned", "follower"),
    ("told", "leader"),
    ("told", "follower"),
]


def turned(shift: int) -> BoolArray:
    """Returns homes with each expert at one box, in turn."""
    which = (np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) + shift) % len(ABC)
    return np.stack([which == n for n in range(len(ABC))])


def pinned(cluster: Cluster) -> bool:
    """Whether every engine holds and announces its homes, and no migration is in progress."""
    for box in cluster.boxes.values():
        if box.plane is None or (plan := box.plane.state.plans.plan) is None or plan.goal:
            return False
        engine = box.plane.announcement.engine
        if engine is None or engine.plan != plan.digest() or (box.pins != plan.homes_of(box.node)).any():
            return False
    return cluster.settled()


def homes(cluster: Cluster) -> BoolArray:
    """Homes [N, L, E] by the plan in force."""
    plane = cluster.boxes["a"].plane
    assert plane is not None
    assert plane.state.plans.plan is not None
    return np.stack([plane.state.plans.plan.homes_of(node) for node in ABC])


@pytest.mark.parametrize("away_s", [1.0, 9.0], ids=["soon-back", "given-up"])
@pytest.mark.parametrize(("step", "role"), STEPS)
def test_a_death_at_any_step_drops_no_last_copy_and_the_move_is_completed(
    tmp_path: Path, step: str, role: str, away_s: float
) -> None:
    die_and_move_on(tmp_path, 1, step, role, away_s)


@pytest.mark.parametrize("seed", [3, 5])
def test_a_better_plan_found_during_a_move_is_adopted(tmp_path: Path, seed: int) -> None:
    """With these the answer is there in the moment in which the next step of a move is committed."""
    die_and_move_on(tmp_path, seed, "committed", "leader", 9.0)


def die_and_move_on(folder: Path, seed: int, step: str, role: str, away_s: float) -> None:
    with virtual_cluster(folder, seed) as cluster:
        run = cluster.loop.run_until_complete
        cluster.pinning = True
        for box in cluster.boxes.values():
            box.engine = None
            box.settings = {"migrate_s": 5.0}
            run(box.start())
            box.announce_pins()
        run(cluster.until(lambda: pinned(cluster)))
        goal = next(turned(shift) for shift in range(3) if not (turned(shift) & homes(cluster)).any())
        cluster.step, cluster.role = step, role
        cluster.better = PlacementTarget(
            ABC, goal, np.zeros_like(goal), np.zeros((LAYERS, EXPERTS), np.float32), 1.0, 0.5
        )
        run(cluster.until(lambda: bool(cluster.killed)))
        run(cluster.pass_time(away_s))
        box = cluster.boxes[cluster.killed]
        run(box.start())
        box.announce_pins()
        run(cluster.until(lambda: pinned(cluster) and bool((homes(cluster) == goal).all())))
        assert not cluster.lost
