"""Members of the embedded agreement that lose their disk, their memory, their room or their way; in simulated time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_link import FakeNet
from support.simulated import World, world

from edgemoe.cluster.control.coordination import ops, raft_journal
from edgemoe.cluster.control.coordination.coord_store import since_boot
from edgemoe.cluster.control.coordination.raft import RaftStore, StateReplica
from edgemoe.cluster.control.coordination.raft_journal import Journal, StateSnapshot, voters_digest, write_snapshot
from edgemoe.cluster.control.coordination.raft_transport import MAX_INBOX, MAX_INBOX_BYTES, MAX_MESSAGE_BYTES
from edgemoe.cluster.control.coordination.recovery import LogEndReply, LogRecovery
from edgemoe.errors import CoordUnavailable
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

ABC = ("a", "b", "c")


@pytest.fixture
def abc(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, dict.fromkeys(ABC, ABC)) as made:
        yield made


def test_a_member_sleeps_until_it_stands_for_election_and_no_longer(tmp_path: Path) -> None:
    net = FakeNet(["a", "b"])
    one = StateReplica("a", ["b"], tmp_path, net.links["a"], 1.0, time.monotonic)
    one.journal.mark_whole()
    began_s, term, ticks = time.monotonic(), one.raftCurrentTerm, 0
    net.links["b"].listen(lambda _n, _p: None, lambda _n: None, lambda _n: None)
    while one.raftCurrentTerm == term:
        one.tick()
        ticks += 1
    assert time.monotonic() - began_s > 0.3
    assert ticks <= 6
    net.cut("b", "a")
    ticks, began_s = 0, time.monotonic()
    while time.monotonic() < began_s + 0.7:  # long enough for another election, had it anybody to elect it
        one.tick()
        ticks += 1
    assert one.raftCurrentTerm == term + 1
    assert ticks <= 6
    one.destroy()


def whole(made: World) -> bool:
    return all(member.journal.whole for member in made.running.values())


def test_a_new_agreement_begins_once_all_voters_are_there_and_then_a_majority_is_enough(abc: World) -> None:
    abc.start("a", "b")
    abc.run(10)
    assert not abc.elected()
    assert abc.running["a"].transport.recovery.waits_for == ["c"]
    abc.start("c")
    abc.until(lambda: whole(abc))
    abc.stop("c")
    for name in ("a", "b"):
        abc.stop(name)
    abc.start("a", "b")
    assert abc.claim("a") == 1


def test_agreed_entries_survive_a_lost_disk_and_a_later_death(abc: World) -> None:
    """a and b agree while c is cut off. b loses its disk and a dies: b and c alone know too little to agree."""
    abc.start()
    abc.until(lambda: whole(abc))
    abc.transport.isolate("c")
    abc.until(lambda: abc.elected() and abc.elected() != ["c"])
    epoch = abc.claim("a")
    plan = abc.commit("a", "agreed")
    abc.stop("b")
    abc.lose_disk("b")
    abc.stop("a")
    abc.transport.rejoin("c")
    abc.start("b")
    began = abc.running["c"].raftCurrentTerm
    abc.until(lambda: abc.running["c"].raftCurrentTerm > began + 5)
    assert not abc.elected()
    assert not abc.running["b"].journal.whole
    abc.start("a")
    abc.until(lambda: whole(abc) and abc.elected())
    abc.until(lambda: all(member.state.plan == plan for member in abc.running.values()))
    assert abc.claim("c") == epoch + 1
    assert abc.commit("c", "next").version == plan.version + 1


@pytest.mark.parametrize("damage", [b"", b"PYSYNCOBJ" + bytes(1015), b"edgemoe raft 1\0\0" + bytes(500)])
def test_a_member_with_a_damaged_journal_catches_up_and_votes_again(abc: World, damage: bytes) -> None:
    abc.start()
    abc.until(lambda: whole(abc))
    epoch = abc.claim("a")
    abc.stop("b")
    (abc.directory / "b" / "raft.journal").write_bytes(damage)
    abc.start("b")
    assert not abc.running["b"].journal.whole
    abc.until(lambda: whole(abc))
    abc.stop("a")
    assert abc.claim("c") == epoch + 1  # with b's vote


def test_boxes_of_an_earlier_release_start_a_new_log_together(abc: World) -> None:
    for name in ABC:
        (abc.directory / name).mkdir()
        (abc.directory / name / "raft.journal").write_bytes(b"PYSYNCOBJ" + bytes(1015))
        (abc.directory / name / "raft.snapshot").write_bytes(b"\x83\xa5state")
    abc.start()
    abc.until(lambda: whole(abc))
    assert abc.claim("b") == 1
    assert {(abc.directory / name / "raft.journal.aside").stat().st_size for name in ABC} == {1024}


# PySyncObj leaves the snapshot that it sends to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_member_that_lags_behind_a_snapshot_is_sent_it_and_has_the_same_state(abc: World) -> None:
    abc.start()
    abc.until(lambda: whole(abc))
    epoch = abc.claim("a")
    abc.stop("c")
    abc.lose_disk("c")
    for _ in range(20):
        abc.agree("a", ops.RenewLease(epoch))
    for name in ("a", "b"):
        abc.running[name].forceLogCompaction()
    abc.until(lambda: all(abc.running[name].journal[0][1] > 15 for name in ("a", "b")))
    abc.start("c")
    abc.until(lambda: whole(abc) and abc.running["c"].state == abc.running["a"].state)
    for name in ABC:
        abc.stop(name)
    abc.start()
    abc.until(lambda: all(member.state.renewals == 20 for member in abc.running.values()))


@pytest.mark.parametrize("whole_one", [True, False], ids=["late", "garbled"])
def test_a_snapshot_that_comes_late_takes_back_nothing_that_a_member_has(abc: World, whole_one: bool) -> None:
    abc.start()
    abc.until(lambda: whole(abc))
    epoch, leader = abc.claim("a"), abc.elected()[0]
    hit = next(name for name in ABC if name != leader)
    for _ in range(10):
        abc.agree("a", ops.RenewLease(epoch))
    abc.running[leader].forceLogCompaction()
    abc.until(lambda: abc.running[leader].journal[0][1] > 5)
    late = (abc.directory / leader / "raft.snapshot").read_bytes() if whole_one else b"edgemoe raft"
    for _ in range(10):
        abc.agree("a", ops.RenewLease(epoch))
    member, term = abc.running[hit], abc.running[leader].raftCurrentTerm
    abc.until(lambda: member.state.renewals == 20)
    had, applied = member.journal[:], member.raftLastApplied
    for part in ((late, True, False), (b"", False, True)):
        said = {"type": "append_entries", "term": term, "commit_index": applied, "serialized": part}
        member.transport._on_payload(leader, voters_digest(ABC) + msgspec.msgpack.encode(said))
    assert member.journal[:] == had
    assert member.raftLastApplied == applied
    assert member.state.renewals == 20
    abc.agree("a", ops.RenewLease(epoch))
    abc.until(lambda: member.state.renewals == 21)


def test_boxes_that_name_other_voters_make_no_majority_together(tmp_path: Path) -> None:
    five = ("a", "b", "c", "d", "e")
    with world(tmp_path, {"a": ABC, "b": ABC, "c": five, "d": five, "e": five}) as made:
        made.start()
        made.run(10)
        assert not made.elected()
        assert made.running["a"].transport.rejected
        made.stop("c")
        made.lose_disk("c")
        made.voters["c"] = ABC
        made.start("c")
        made.until(lambda: len(made.elected()) == 1)
        made.claim("a")
        plan = made.commit("a", "of three")
        made.stop("c")
        made.voters["c"] = five
        made.start("c")
        made.run(10)
        assert made.elected() in (["a"], ["b"])
        assert not made.running["c"].journal.whole
        assert made.running["b"].state.plan == plan


def test_a_member_whose_disk_is_full_leaves_the_agreement_to_the_others(
    abc: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    abc.start()
    abc.until(lambda: whole(abc))
    first, pwrite = abc.elected()[0], os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(abc.directory / first)):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    rest = [name for name in ABC if name != first]
    assert abc.claim(rest[0]) == 1
    assert first not in abc.running
    monkeypatch.undo()
    abc.start(first)
    abc.until(lambda: abc.running[first].state.epoch == 1)
    assert abc.running[first].journal.whole


@pytest.mark.parametrize("votes", [False, True], ids=["raft has another lead", "raft has the one lead that ends"])
def test_without_room_a_member_keeps_entries_in_its_journal_but_gives_no_vote(
    abc: World, monkeypatch: pytest.MonkeyPatch, votes: bool
) -> None:
    abc.start()
    abc.until(lambda: whole(abc) and abc.elected())
    first = abc.elected()[0]
    second, hit = (name for name in ABC if name != first)
    ends, third = (first, second) if votes else (second, first)
    assert abc.claim(ends) == 1
    replace = raft_journal.replace_file

    def full(path: Path, data: bytes) -> None:
        if path.is_relative_to(abc.directory / hit):
            raise OSError(28, "No space left on device")
        replace(path, data)

    monkeypatch.setattr(raft_journal, "replace_file", full)
    abc.stop(ends)
    assert abc.claim(third) == (0 if votes else 2)
    assert (hit in abc.running) is not votes


def test_a_member_whose_vote_could_not_be_kept_says_nothing_more(abc: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not vote even if there is room again at the second request: it starts again from its files."""
    abc.start()
    abc.until(lambda: whole(abc) and abc.elected())
    asks, hit = abc.elected()[0], next(name for name in ABC if name not in abc.elected())
    link, said = abc.transport.links[hit], list[bytes]()
    monkeypatch.setattr(abc.transport.links[asks], "message", lambda _node, payload: said.append(payload))
    replace, failed = raft_journal.replace_file, list[Path]()

    def full_once(path: Path, data: bytes) -> None:
        if not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        replace(path, data)

    monkeypatch.setattr(raft_journal, "replace_file", full_once)
    last = abc.running[hit].journal[-1]
    asked = {"type": "request_vote", "term": 1000, "last_log_index": last[1], "last_log_term": last[2]}
    said.clear()
    for _ in range(3):
        link.message(asks, voters_digest(ABC) + msgspec.msgpack.encode(asked))
    abc.running[hit].tick(0.0)
    assert failed
    assert said == []
    assert abc.running[hit].journal.failed


def test_an_operation_of_a_later_release_is_passed_over_by_all_alike(abc: World) -> None:
    abc.start()
    abc.until(lambda: whole(abc))
    epoch = abc.claim("a")
    assert abc.agree("a", bytes([PROTOCOL_VERSIONS.highest + 1]) + msgspec.msgpack.encode(["advise", 3])) is None
    assert abc.agree("b", b"\xc1 none at all") is None
    plan = abc.commit("a", "after")
    assert epoch == 1
    abc.until(lambda: all(member.state.plan == plan for member in abc.running.values()))
    assert {member.skipped >= 2 for member in abc.running.values()} == {True}
    abc.stop("b")
    abc.start("b")
    abc.until(lambda: abc.running["b"].state == abc.running["a"].state)


def test_a_bad_message_of_a_member_costs_that_message_only(abc: World) -> None:
    """Well-formed and hostile, garbled, and noise."""
    abc.start()
    abc.until(lambda: whole(abc))
    rng, digest = random.Random(4), voters_digest(ABC)
    numbers = [0, 1, 2, 5, 1 << 40, 1 << 62, 1 << 63, -1, None, "x", True]

    def fields() -> dict[str, object]:
        n = lambda: rng.choice(numbers)  # noqa: E731
        kinds: list[dict[str, object]] = [
            {"type": "request_vote", "term": rng.choice([0, -1, None]), "last_log_index": n(), "last_log_term": n()},
            {"type": "append_entries", "term": 0, "commit_index": n(), "prevLogIdx": n(), "entries": [[b"", n(), n()]]},
            {"type": "append_entries", "term": 1 << 60, "commit_index": 3, "transmission": "finish", "data": b"x"},
            {"type": "append_entries", "term": 1 << 60, "commit_index": 3, "serialized": False},
            {"type": "apply_command", "command": rng.randbytes(rng.randrange(9)), "request_id": n()},
            {"type": "apply_command", "command": bytes(9000)},
            {"type": "apply_command_response", "request_id": n(), "log_idx": n()},
            {"type": "next_node_idx", "next_node_idx": n(), "reset": False, "success": False},
            {"type": "response_vote", "term": n()},
            {"type": "timeout_now", "term": 1 << 60},
            {"type": "where", "nonce": n()},
        ]
        return rng.choice(kinds)

    for _ in range(2000):
        payload = bytearray(digest + msgspec.msgpack.encode(fields()))
        if rng.random() < 0.3:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        abc.transport.links["b"].message("c", bytes(payload))
        if rng.random() < 0.05:
            abc.step()
    assert abc.running["b"].transport.rejected > 100
    assert abc.claim("a") == 1
    abc.until(lambda: abc.running["b"].state == abc.running["a"].state)


def test_unread_messages_are_bounded_in_bytes_and_number(abc: World) -> None:
    abc.start()
    transport, link = abc.running["a"].transport, abc.transport.links["a"]
    for _ in range(2 * MAX_INBOX_BYTES // MAX_MESSAGE_BYTES):
        link.message("b", bytes(MAX_MESSAGE_BYTES))
    assert transport._inbox_bytes == MAX_INBOX_BYTES
    link.message("b", bytes(1))
    assert transport._inbox_bytes == MAX_INBOX_BYTES
    transport._deliver(0, 0)
    assert transport._inbox_bytes == 0
    for _ in range(2 * MAX_INBOX):
        link.message("b", b"")
    assert len(transport._inbox) == MAX_INBOX
    link.message("b", bytes(MAX_MESSAGE_BYTES + 1))
    assert transport._inbox_bytes == 0


def test_a_vote_needs_a_complete_log_and_a_term_that_cannot_be_forgotten(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, b"abcdefgh")
    journal.add(b"\1", 1, 0)
    recovery = LogRecovery(journal, ["a", "c"], lambda: 0.0)
    asked = recovery.next_query()
    assert asked is not None
    recovery.on_reply("a", LogEndReply(asked.nonce, term=7, last_log_term=6, last_log_index=40))
    recovery.on_reply("c", LogEndReply(b"of another incarnation", 7, 6, 40))
    assert not recovery.may_vote(8, 6, 40)
    recovery.on_reply("c", LogEndReply(asked.nonce, term=5, last_log_term=5, last_log_index=90))
    assert recovery.may_vote(8, 6, 40)
    assert not recovery.may_vote(7, 6, 40)
    assert not recovery.may_vote(8, 6, 39)
    assert not recovery.may_vote(8, 5, 90)
    journal.add(b"\1", 2, 8)
    assert not recovery.on_agreed(9, 2)  # agreed by an earlier leader
    assert recovery.on_agreed(8, 2)
    assert journal.whole
    assert journal.getVotedForNodeId() == ""  # in term 8 it may have voted
    assert not recovery.may_vote(8, 8, 2)
    assert recovery.may_vote(9, 1, 1)  # PySyncObj compares the logs from here on


def deliver(made: World, name: str, source: str, **said: object) -> None:
    """Delivers a message as if the source had sent it."""
    transport = made.running[name].transport
    made.transport.links[name].message(source, voters_digest(ABC) + msgspec.msgpack.encode(said))
    transport._deliver(0, 0)


def follower_of(made: World) -> tuple[str, str]:
    """Stops one member; returns the leader and a member that has applied all its entries."""
    made.start()
    made.until(lambda: whole(made))
    epoch = made.claim("a")
    for _ in range(5):
        made.agree("a", ops.RenewLease(epoch))
    made.until(lambda: len(made.elected()) == 1 and len({m.raftLastApplied for m in made.running.values()}) == 1)
    first = made.elected()[0]
    other, third = (name for name in ABC if name != first)
    made.stop(third)
    return first, other


def test_a_late_message_of_the_leader_takes_no_entries_away(abc: World) -> None:
    """Nor does the answer to it count as word of entries that it did not have."""
    first, other = follower_of(abc)
    member = abc.running[other]
    had, said = member.journal[:], list[dict[str, Any]]()
    _, index, term = had[2]
    abc.transport.links[first].message = lambda _node, payload: said.append(msgspec.msgpack.decode(payload[8:]))
    late = {"type": "append_entries", "term": member.raftCurrentTerm, "commit_index": 2}
    deliver(abc, other, first, **late, prevLogIdx=index, prevLogTerm=term, entries=had[3:5])
    assert member.journal[:] == had
    assert said[-1]["next_node_idx"] == had[4][1] + 1
    more = (b"\1", had[-1][1] + 1, member.raftCurrentTerm)
    deliver(abc, other, first, **late, prevLogIdx=index, prevLogTerm=term, entries=[*had[3:], more])
    assert member.journal[:] == [*had, more]
    assert said[-1]["next_node_idx"] == more[1] + 1
    other_term = (b"\1", more[1], member.raftCurrentTerm + 1)
    late["term"] = member.raftCurrentTerm + 1
    deliver(abc, other, first, **late, prevLogIdx=had[-1][1], prevLogTerm=had[-1][2], entries=[other_term])
    assert member.journal[:] == [*had, other_term]  # an entry that is not agreed gives way


def test_a_member_that_applied_other_entries_than_its_leader_counts_as_damaged(abc: World) -> None:
    first, other = follower_of(abc)
    member = abc.running[other]
    _, index, term = member.journal[3]
    wrong = (b"\1", index + 1, term)
    message = {"type": "append_entries", "term": member.raftCurrentTerm, "commit_index": index + 1}
    assert member.journal[4] != wrong
    deliver(abc, other, first, **message, prevLogIdx=index, prevLogTerm=term, entries=[wrong])
    assert member.journal[4] != wrong
    abc.step()
    assert other not in abc.running
    abc.start(other)
    assert not abc.running[other].journal.whole
    assert (abc.directory / other / "raft.journal.aside").exists()
    abc.until(lambda: abc.running[other].state == abc.running[first].state)


def test_entries_are_taken_for_agreed_only_where_they_are_the_leaders(abc: World) -> None:
    first, other = follower_of(abc)
    member = abc.running[other]
    applied = member.raftLastApplied
    member.journal.add(b"\1", applied + 1, member.raftCurrentTerm)
    said = {"type": "append_entries", "term": member.raftCurrentTerm, "commit_index": applied + 9}
    deliver(abc, other, first, **said, serialized=None)
    assert member.raftCommitIndex == applied
    last = member.journal[-2]
    deliver(abc, other, first, **said, prevLogIdx=last[1], prevLogTerm=last[2], entries=[])
    assert member.raftCommitIndex == applied


def test_messages_to_a_leader_count_in_its_term_only(abc: World) -> None:
    first, other = follower_of(abc)
    leader = abc.running[first]
    ahead = leader.journal[-1][1] + 100
    said = {"type": "next_node_idx", "next_node_idx": ahead, "reset": False, "success": True}
    deliver(abc, first, other, **said, term=leader.raftCurrentTerm - 1)
    assert leader.getStatus()[f"match_idx_server_{other}"] < ahead - 1
    deliver(abc, first, other, **said, term=leader.raftCurrentTerm)
    assert leader.getStatus()[f"match_idx_server_{other}"] == ahead - 1


def test_a_member_without_a_vote_does_not_stand_for_election(abc: World) -> None:
    abc.start("a", "b")
    abc.run(5)
    assert {member.raftCurrentTerm for member in abc.running.values()} == {0}


def test_a_lease_in_a_snapshot_counts_from_its_arrival(abc: World) -> None:
    abc.start("a")
    member = abc.running["a"]
    abc.now += 60
    file = abc.directory / "sent"
    write_snapshot(file, StateSnapshot(member.state, (b"\1", 2, 0), (b"\1", 1, 0)))
    member._restore(str(file))
    assert member.renewed_at == abc.now


@pytest.mark.parametrize("lease_s", [0.3, 60.0])
async def test_every_lease_that_can_be_set_is_one_to_start_with(lease_s: float, tmp_path: Path) -> None:
    store = RaftStore("a", ["b", "c"], tmp_path, FakeNet(list(ABC)).links["a"], lease_s, clock=since_boot)
    await store.start()
    await store.close()


async def test_no_operation_is_proposed_that_a_voter_does_not_read(tmp_path: Path) -> None:
    transport = FakeNet(list(ABC))
    store = RaftStore("a", ["b", "c"], tmp_path, transport.links["a"], clock=since_boot, readable=lambda: 0)
    await store.start()
    with pytest.raises(CoordUnavailable, match="not every voter knows the operation Renew"):
        await store.renew(1)
    await store.close()
