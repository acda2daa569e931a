"""The files of a member of the embedded agreement: cut, flipped, on a full disk, of another release."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

import msgspec
import pytest
from support.power import Disk

from edgemoe import durable
from edgemoe.cluster.control.coordination import ops
from edgemoe.cluster.control.coordination.coord_store import CoordState, PlanRef
from edgemoe.cluster.control.coordination.raft_journal import (
    SEGMENT_BYTES,
    Journal,
    JournalDamaged,
    StateSnapshot,
    read_snapshot,
    write_snapshot,
)
from edgemoe.cluster.control.coordination.recovery import open_journal
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

VOTERS = b"abcdefgh"
ENTRIES = [(ops.encode(ops.RenewLease(n)), n, n // 4) for n in range(1, 12)]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fsynced."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def filled(directory: Path) -> Journal:
    """Makes a journal with some entries that remembers all its promises."""
    journal = Journal(directory, VOTERS)
    for entry in ENTRIES:
        journal.add(*entry)
    journal.setCurrentTerm(3, "b")
    journal.mark_whole()
    return journal


def test_a_journal_has_the_same_entries_after_a_restart(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.deleteEntriesFrom(8)
    journal.add(b"\0x", 9, 3)
    write_snapshot(tmp_path / "raft.snapshot", StateSnapshot(CoordState(), ENTRIES[3], ENTRIES[2]))
    journal.deleteEntriesTo(2)
    kept = list(journal[:])
    journal.close()
    again = open_journal(tmp_path, VOTERS)
    assert again[:] == kept == [*ENTRIES[2:8], (b"\0x", 9, 3)]
    assert (again.getCurrentTerm(), again.getVotedForNodeId(), again.whole) == (3, "b", True)
    assert again.term_at(9) == 3
    again.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seed", range(3))
def test_a_journal_damaged_anywhere_is_set_aside_and_a_new_one_has_no_vote(tmp_path: Path, seed: int) -> None:
    """Every byte of the records, and some of the zeros behind them."""
    journal = filled(tmp_path)
    end = journal._end
    journal.close()
    file, rng = tmp_path / "raft.journal", random.Random(seed)
    good, vote = file.read_bytes(), (tmp_path / "raft.vote").read_bytes()
    places = [*range(seed, end, 3), *(rng.randrange(end, len(good)) for _ in range(5))]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        for damage in (bytes(bad), good[:at]):
            file.write_bytes(damage)
            again = open_journal(tmp_path, VOTERS)
            assert (len(again), again.whole, again.failed) == (0, False, False), at
            assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, "b")
            again.add(*ENTRIES[0])
            again.close()
            assert (tmp_path / "raft.journal.aside").read_bytes() == damage
    assert (tmp_path / "raft.vote").read_bytes() == vote


@pytest.mark.usefixtures("hasty")
def test_a_vote_that_is_lost_or_damaged_costs_the_vote_and_no_entry(tmp_path: Path) -> None:
    filled(tmp_path).close()
    vote = tmp_path / "raft.vote"
    good = vote.read_bytes()
    for at in range(len(good)):
        for damage in (good[:at], good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]):
            vote.write_bytes(damage)
            again = open_journal(tmp_path, VOTERS)
            assert (again[:], again.whole) == (ENTRIES, False)
            again.close()
    vote.unlink()
    assert not open_journal(tmp_path, VOTERS).whole


@pytest.mark.usefixtures("hasty")
def test_a_snapshot_that_is_damaged_or_lost_is_put_aside_with_the_journal(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    write_snapshot(tmp_path / "raft.snapshot", StateSnapshot(CoordState(epoch=4), ENTRIES[5], ENTRIES[4]))
    journal.deleteEntriesTo(4)
    journal.close()
    good = {name: (tmp_path / name).read_bytes() for name in ("raft.journal", "raft.snapshot")}
    size = len(good["raft.snapshot"])
    for at in range(size):
        (tmp_path / "raft.journal").write_bytes(good["raft.journal"])
        (tmp_path / "raft.snapshot").write_bytes(good["raft.snapshot"][:at] + b"\xff" * (at % 2))
        again = open_journal(tmp_path, VOTERS)
        assert (len(again), again.whole) == (0, False)
        again.close()
        assert not (tmp_path / "raft.snapshot").exists()
    (tmp_path / "raft.journal").write_bytes(good["raft.journal"])
    assert len(open_journal(tmp_path, VOTERS)) == 0  # entries before its first one are nowhere
    (tmp_path / "raft.snapshot").write_bytes(good["raft.snapshot"])
    (tmp_path / "raft.journal").unlink()
    assert not open_journal(tmp_path, VOTERS).whole
    assert not (tmp_path / "raft.snapshot").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        CoordState(epoch=-1),
        CoordState(renewals=1 << 63),
        CoordState(leader="n" * 65),
        CoordState(plan=PlanRef(-1, "d")),
        CoordState(plan=PlanRef(1, "d" * 257)),
    ],
)
def test_a_snapshot_that_says_more_than_can_be_is_not_believed(tmp_path: Path, wrong: CoordState) -> None:
    for state in (CoordState(1, "b", PlanRef(1, "d"), 1), wrong):
        write_snapshot(tmp_path / "raft.snapshot", StateSnapshot(state, ENTRIES[5], ENTRIES[4]))
        with pytest.raises(JournalDamaged) if state is wrong else contextlib.nullcontext():
            read_snapshot(tmp_path / "raft.snapshot")


def test_a_crash_between_snapshot_and_cutting_the_journal_loses_no_entry(tmp_path: Path) -> None:
    """PySyncObj would take the journal for another one, and drop the entries after the snapshot."""
    filled(tmp_path).close()
    write_snapshot(tmp_path / "raft.snapshot", StateSnapshot(CoordState(), ENTRIES[5], ENTRIES[4]))
    again = open_journal(tmp_path, VOTERS)
    assert again[:] == ENTRIES[4:]
    assert again.whole
    assert read_snapshot(tmp_path / "raft.snapshot").before == again[0]


def test_a_journal_of_other_voters_or_of_an_earlier_release_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path).close()
    assert not open_journal(tmp_path, b"others!!").whole
    (tmp_path / "raft.journal").write_bytes(b"PYSYNCOBJ" + bytes(1024))
    (tmp_path / "raft.snapshot").write_bytes(msgspec.msgpack.encode({"state": CoordState()}))
    assert len(open_journal(tmp_path, b"others!!")) == 0
    assert any("an earlier release wrote it" in str(getattr(r, "why", "")) for r in caplog.records)


def test_a_journal_grows_beforehand_and_is_never_written_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = filled(tmp_path)
    file = tmp_path / "raft.journal"
    assert file.stat().st_blocks * 512 >= SEGMENT_BYTES == file.stat().st_size
    monkeypatch.setattr(os, "posix_fallocate", full)
    command, count = b"\0" * 4000, len(ENTRIES)
    while not journal.failed:
        with contextlib.suppress(OSError):
            journal.add(command, count + 1, 3)
            count += 1
    journal.deleteEntriesTo(3)  # where it cannot be shortened either, it stays as it is
    assert len(journal) == count > SEGMENT_BYTES // 4100
    journal.close()
    assert len(open_journal(tmp_path, VOTERS)) == count
    monkeypatch.undo()
    again = open_journal(tmp_path, VOTERS)
    again.add(command, count + 1, 3)
    assert file.stat().st_size == 2 * SEGMENT_BYTES


def test_a_partial_write_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, pwrite = filled(tmp_path), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    with pytest.raises(OSError, match="in part"):
        journal.add(b"\0half", 12, 3)
    monkeypatch.undo()
    journal._take_back(64)
    journal.close()
    assert open_journal(tmp_path, VOTERS)[:] == ENTRIES


def test_a_vote_that_cannot_be_kept_is_not_given(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    (tmp_path / "raft.vote").unlink()
    (tmp_path / "raft.vote").mkdir()  # nothing can be put in its place
    with pytest.raises(OSError):
        journal.setCurrentTerm(4, "c")
    assert journal.failed
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (3, "b")


def test_a_file_is_fsynced_before_it_takes_the_others_place_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def fsync(fd: int) -> None:
        there = (tmp_path / "file").exists()
        done.append(f"{os.readlink(f'/proc/self/fd/{fd}').removeprefix(str(tmp_path))} {there}")

    monkeypatch.setattr(os, "fsync", fsync)
    durable.replace_file(tmp_path / "file", b"content")
    assert [each.split(".")[-1] for each in done] == ["tmp False", " True"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_journal_that_was_shortened_survives_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    journal = filled(tmp_path)
    journal.deleteEntriesTo(4)
    for kept in ("raft.journal", "raft.vote"):
        assert disk.after_power_loss(tmp_path / kept) == (tmp_path / kept).read_bytes()
    journal.close()


# --- operations -----------------------------------------------------------------------------------------------

GOLDEN = {
    ops.ClaimLease("kitchen", 7, 6, 300): "0195a5636c61696da76b69746368656e0706cd012c",
    ops.RenewLease(7): "0192a572656e657707",
    ops.ResignLease(7): "0192a672657369676e07",
    ops.CommitPlan(7, 2, "d1"): "0194a4706c616e0702a26431",
}


@pytest.mark.parametrize("op", GOLDEN, ids=lambda op: type(op).__name__)
def test_operations_lie_in_journals_for_ever_as_they_do_now(op: ops.Op) -> None:
    assert ops.encode(op).hex() == GOLDEN[op]
    assert ops.decode(bytes.fromhex(GOLDEN[op])) == op
    assert op.SINCE == 1


def test_an_operation_of_a_later_release_and_one_that_is_none_are_read_as_nothing() -> None:
    good = ops.encode(ops.RenewLease(7))
    rng = random.Random(5)
    later = bytes([PROTOCOL_VERSIONS.highest + 1]) + good[1:]
    for data in (b"", b"\0" + good[1:], later, good[:-1], good + b"\0", good[:1] + b"\x91\xa4none", b"\1" * 5000):
        assert ops.decode(data) is None
    assert ops.decode(bytes([1]) + msgspec.msgpack.encode(["renew", 1 << 63])) is None
    assert ops.decode(
        bytes([1]) + msgspec.msgpack.encode(["renew", 1, "a field of a later release"])
    ) == ops.RenewLease(1)
    for _ in range(3000):
        ops.decode(rng.randbytes(rng.randrange(40)))


def test_an_epoch_that_leaps_is_claimed_by_nobody() -> None:
    state = CoordState(epoch=5)
    assert state.claim("a", 5 + 10**6 + 1, 5, 0) == 0
    assert state.claim("a", 5 + 10**6, 5, 0) == 5 + 10**6


def test_damage_is_no_error_of_the_daemon(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").touch()
    with pytest.raises(JournalDamaged):
        read_snapshot(empty)
