"""The boxes as one of them sees them: what its engine is told of them changes only when a change is noted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from support.planes import card

from edgemoe.cluster.control.coordination.store import PlanRef
from edgemoe.cluster.control.leader import Leader
from edgemoe.cluster.control.membership import DEAD_S, Members
from edgemoe.cluster.control.messages import Announce, Heartbeat
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.errors import PeerUnavailable


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_silence_that_ends_before_anybody_noted_it_is_told_to_no_engine() -> None:
    clock = Clock()
    members = Members(clock)
    members.admit(Peer("a", "127.0.0.1:1", "key"))
    member = members["a"]
    member.announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    member.up, member.heard_s = True, clock.now_s
    assert members.update_presence() == ["a"]
    told = members.engines()
    assert told[0].heard
    clock.now_s += 2 * DEAD_S  # and something else has the list made now
    assert members.engines() == told
    member.heard_s = clock.now_s
    assert members.update_presence() == []  # so nobody makes it again
    assert members.engines() == told


def test_a_silence_that_was_noted_is_told() -> None:
    clock = Clock()
    members = Members(clock)
    members.admit(Peer("a", "127.0.0.1:1", "key"))
    members["a"].announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    members["a"].up, members["a"].heard_s = True, clock.now_s
    assert members.update_presence() == ["a"]
    clock.now_s += 2 * DEAD_S
    assert members.update_presence() == ["a"]
    assert not members.engines()[0].heard
    members["a"].heard_s = clock.now_s
    assert members.update_presence() == ["a"]
    assert members.engines()[0].heard


def boxes(*nodes: str, beat: Heartbeat) -> Members:
    """All alive, with an engine, and of the same beat."""
    members = Members(lambda: 0.0)
    for node in nodes:
        members.admit(Peer(node, "127.0.0.1:1", "key"))
        members[node].up, members[node].heard_s, members[node].beat = True, 0.0, beat
        members[node].announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine"))
    return members


def test_an_engine_that_calls_itself_by_anothers_name_is_one_more_and_takes_nothing_from_it() -> None:
    found = boxes("a", "b", beat=Heartbeat(engine="engine")).serving("m" * 32)
    assert found == {"a:engine": "a", "b:engine": "b"}


async def test_boxes_that_come_while_a_plan_is_looked_for_end_nothing() -> None:
    members, asked = boxes("a", "b", beat=Heartbeat(plan_digest="digest")), list[str]()

    async def fetch(node: str, _digest: str) -> None:
        asked.append(node)
        await asyncio.sleep(0)
        members.admit(Peer(f"{node}-new", "127.0.0.1:1", "key"))
        raise PeerUnavailable("it has died")

    leader = object.__new__(Leader)
    leader._proposed = None
    leader._state, leader._exchange = SimpleNamespace(members=members), SimpleNamespace(fetch=fetch)  # type: ignore
    assert await leader._find_plan(PlanRef(1, "digest")) is None
    assert asked == ["a", "b"]
