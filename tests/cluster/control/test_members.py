"""The boxes as one of them sees them: what its engine is told of them changes only when a change is noted."""

from __future__ import annotations

from support.planes import card

from edgemoe.cluster.control.members import DEAD_S, Members
from edgemoe.cluster.rpc.control_messages import Announce
from edgemoe.cluster.rpc.keys import Peer


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_silence_that_ends_before_anybody_noted_it_is_told_to_no_engine() -> None:
    clock = Clock()
    members = Members(clock)
    members.add(Peer("a", "127.0.0.1:1", "key"))
    member = members["a"]
    member.card = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    member.up, member.heard_s = True, clock.now_s
    assert members.watch() == ["a"]
    told = members.engines()
    assert told[0].heard
    clock.now_s += 2 * DEAD_S  # and something else has the list made now
    assert members.engines() == told
    member.heard_s = clock.now_s
    assert members.watch() == []  # so nobody makes it again
    assert members.engines() == told


def test_a_silence_that_was_noted_is_told() -> None:
    clock = Clock()
    members = Members(clock)
    members.add(Peer("a", "127.0.0.1:1", "key"))
    members["a"].card = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    members["a"].up, members["a"].heard_s = True, clock.now_s
    assert members.watch() == ["a"]
    clock.now_s += 2 * DEAD_S
    assert members.watch() == ["a"]
    assert not members.engines()[0].heard
    members["a"].heard_s = clock.now_s
    assert members.watch() == ["a"]
    assert members.engines()[0].heard
