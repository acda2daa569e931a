"""A box whose answers were found wrong is cut off by its finder, and by all on the word of two boxes or the leader."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import pytest
from support.boxes import secret
from support.fake_agreement import FakeMember
from support.planes import ABC, Front, fronts, led
from support.waiting import until

from edgemoe.cluster.control.distrust import DistrustedBoxes
from edgemoe.cluster.control.membership import BoxState
from edgemoe.cluster.control.messages import (
    Accusation,
    ControlMessage,
    EtcdJoin,
    HandOver,
    LostRequestsQuery,
    MemberChange,
    PlanRequest,
    SnapshotRequest,
    StoreLocationRequest,
)
from edgemoe.errors import ConfigError, PeerRefused
from edgemoe.types.bounds import MAX_NODES

NODES = ("a", "b", "c", "d")


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[dict[str, Front]]:
    async with fronts(tmp_path, NODES) as made:
        await until(
            lambda: all(
                member.state is BoxState.MEMBER for front in made.values() for member in front.plane.state.members
            )
        )
        yield made


def refusal(front: Front, of: str) -> str:
    return front.plane.state.members[of].refusal


class Roles(NamedTuple):
    """The leader of four boxes, and the three others: at least one of these has a vote."""

    leader: Front
    accused: Front
    finder: Front
    second: Front


async def roles(four: dict[str, Front]) -> Roles:
    leader = four[await led(list(four.values()))]
    accused, finder, second = (front for front in four.values() if front is not leader)
    return Roles(leader, accused, finder, second)


async def test_one_finding_cuts_the_box_off_here_and_two_cut_it_off_everywhere(four: dict[str, Front]) -> None:
    leader, accused, finder, second = await roles(four)
    node = accused.node
    finder.plane.distrust(node, "2 wrong answers of 9")
    assert f"{node} (key " in refusal(finder, node)
    assert "2 wrong answers of 9" in refusal(finder, node)
    assert finder.peers[node].key in refusal(finder, node)
    assert not finder.plane.state.members[node].can_take_part
    await until(lambda: leader.plane.state.suspected() == second.plane.state.suspected() == (node,))
    assert not refusal(leader, node)
    second.plane.distrust(node, "3 wrong answers of 7")
    await until(lambda: refusal(leader, node) != "")
    assert f"{finder.node} and {second.node} found its answers wrong" in refusal(leader, node)
    assert leader.plane.state.suspected() == ()
    assert not refusal(leader, finder.node)


async def test_the_leader_s_own_finding_cuts_the_box_off_everywhere(four: dict[str, Front]) -> None:
    leader, accused, finder, second = await roles(four)
    leader.plane.distrust(accused.node, "2 wrong answers of 9")
    for other in (finder, second):
        await until(lambda other=other: refusal(other, accused.node) != "")
        assert "2 wrong answers of 9" in refusal(other, accused.node)
        assert f"said by the leader, {leader.node}" in refusal(other, accused.node)
        assert not other.plane.announcement.accuses, "this is no finding of its own"


async def test_a_leader_that_two_boxes_find_wrong_gives_its_leadership_back_for_good(four: dict[str, Front]) -> None:
    leader, *others = await roles(four)
    for finder in others[1:]:
        finder.plane.distrust(leader.node, "sums differ")
    await until(lambda: leader.plane.state.why_cut_off() != "" and leader.plane.leading == 0)
    await until(lambda: all(front.plane.leader not in ("", leader.node) for front in others))
    following = await led(others)
    await four[following].die()
    rest = [front for front in others if front.node != following]
    await until(lambda: {front.plane.leader for front in rest} < {front.node for front in rest})
    assert leader.plane.leading == 0


QUESTIONS: tuple[ControlMessage, ...] = (
    *(MemberChange(verb, "b") for verb in ("begin", "voting", "vote", "unvote", "remove", "invite", "key")),
    EtcdJoin(),
    HandOver(),
    PlanRequest("0" * 64),
    SnapshotRequest(),
    LostRequestsQuery("engine", ()),
    StoreLocationRequest(),
)


async def test_a_box_that_is_cut_off_is_refused_everything_but_its_presence(four: dict[str, Front]) -> None:
    _, accused, finder, _ = await roles(four)
    finder.plane.distrust(accused.node, "sums differ")
    for question in QUESTIONS:
        with pytest.raises(PeerRefused, match=r"sums differ.*another key"):
            await accused.plane.channel.ask(finder.node, question, timeout_s=10.0)
    assert finder.plane.state.members.is_alive(accused.node)


@pytest.mark.parametrize("disk", ["works", "is full"])
async def test_a_box_that_is_cut_off_loses_its_vote_where_members_are_agreed(
    four: dict[str, Front], disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disk == "is full":
        monkeypatch.setattr(FakeMember, "forget", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    leader, *others = await roles(four)
    await leader.plane.changes.command(MemberChange("begin"))
    await until(lambda: all(front.plane.state.roster is not None for front in four.values()))
    accused = next(front for front in others if front.node in ABC)
    leader.plane.distrust(accused.node, "sums differ")
    await until(lambda: all(accused.node not in front.plane.state.voters for front in four.values()))
    assert len(leader.plane.state.voters) == 2
    await until(lambda: accused.plane.etcd is None)
    assert accused.plane.leading == 0
    with pytest.raises(PeerRefused, match="another key"):
        await accused.plane.channel.ask(leader.node, MemberChange("vote", accused.node), timeout_s=10.0)


async def test_a_box_stays_cut_off_after_a_restart_until_its_entry_has_another_key(four: dict[str, Front]) -> None:
    _, accused, finder, other = await roles(four)
    node = accused.node
    finder.plane.distrust(node, "sums differ")
    await finder.die()
    await finder.start()
    await until(lambda: finder.plane.state.members.is_alive(node))
    assert "sums differ" in refusal(finder, node)
    assert [each.node for each in finder.plane.announcement.accuses] == [node]
    await until(lambda: other.plane.state.suspected() == (node,))
    mended = msgspec.structs.replace(finder.peers[node], key=secret().public.decode())
    finder.plane.set_peers({**finder.peers, node: mended})
    assert not refusal(finder, node)


async def test_the_word_of_a_box_that_this_one_does_not_list_counts_for_nothing(tmp_path: Path) -> None:
    async with fronts(tmp_path, ABC, voters=["b"], coordination="single", leader="b") as three:
        a, b, c = three.values()
        c.plane.set_peers({node: peer for node, peer in c.peers.items() if node != "a"})
        await until(lambda: "a" in c.plane.state.members)  # b vouches for it
        a.plane.distrust("b", "sums differ")
        b.plane.distrust("a", "sums differ")
        await until(lambda: "said by the leader, b" in refusal(c, "a"))
        heard = c.plane.state.members["a"]
        await until(lambda: heard.announcement is not None and bool(heard.announcement.accuses))
        assert c.plane.state.suspected() == ()
        assert not refusal(c, "b")


def test_findings_are_bounded_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "distrusted.json"
    kept = DistrustedBoxes(path)
    for n in range(MAX_NODES + 5):
        kept.add(f"n{n}", [f"key{n}"], "sums differ")
        kept.add(f"n{n}", [f"key{n}"], "again")
    again = DistrustedBoxes(path)
    assert len(again.found) == MAX_NODES
    assert again.found[-1] == Accusation(f"n{MAX_NODES + 4}", f"key{MAX_NODES + 4}", "sums differ")
    assert again.reason(["key0"]) == ""
    path.write_text("[{]")
    with pytest.raises(ConfigError, match=r"distrusted\.json.*remove it"):
        DistrustedBoxes(path)
