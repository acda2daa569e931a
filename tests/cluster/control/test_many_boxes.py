"""Many boxes in virtual time: the time without a leader, and the messages between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.planes import ABC
from support.virtual import Cluster, virtual_cluster

from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.types.bounds import MAX_NODES


async def start(cluster: Cluster) -> None:
    for box in cluster.boxes.values():
        await box.start()
    await cluster.until(lambda: cluster.one_leader() and len(refs(cluster)) == 1 and refs(cluster) != {None})


def refs(cluster: Cluster) -> set[object]:
    """Returns the plans that boxes follow."""
    return {box.plane.state.plans.ref for box in cluster.boxes.values() if box.plane is not None}


async def without_a_leader_s(cluster: Cluster) -> float:
    """Returns the time from the leader's death until all others follow another."""
    first = next(box.plane.leader for box in cluster.boxes.values() if box.plane is not None)
    await cluster.boxes[first].die()
    died_s = cluster.loop.time()
    rest = [box.plane for box in cluster.boxes.values() if box.plane is not None]
    while {plane.leader for plane in rest} & {"", first} or len({plane.leader for plane in rest}) > 1:
        await cluster.pass_time(0.1)
        assert cluster.loop.time() < died_s + 60.0
    return cluster.loop.time() - died_s


@pytest.mark.parametrize(("boxes", "voters"), [(12, 3), pytest.param(MAX_NODES, 5, marks=pytest.mark.slow)])
def test_many_boxes_obey_another_leader_as_soon_as_three_do(tmp_path: Path, boxes: int, voters: int) -> None:
    names = [*ABC, *(f"n{i:02}" for i in range(boxes - len(ABC)))]
    with virtual_cluster(tmp_path, 1, names, voters) as cluster:
        cluster.loop.run_until_complete(start(cluster))
        cluster.loop.run_until_complete(cluster.pass_time(3.0))
        cluster.said.clear()
        cluster.loop.run_until_complete(cluster.pass_time(4.0))
        beats = cluster.said.pop("Heartbeat")
        assert beats <= boxes * (boxes - 1) * (4.0 / BEAT_S + 1)
        assert not cluster.said
        assert cluster.loop.run_until_complete(without_a_leader_s(cluster)) < 5.0
        assert len(refs(cluster)) == 1
