"""Every later release reads the files of the agreement: their bytes of today, written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgemoe.cluster.control.coordination import ops
from edgemoe.cluster.control.coordination.coord_store import CoordState, PlanRef
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.raft_journal import (
    Journal,
    JournalDamaged,
    StateSnapshot,
    read_snapshot,
    write_snapshot,
)

VOTERS = b"abcdefgh"
ENTRIES = [(ops.encode(ops.RenewLease(n)), n, 1) for n in (1, 2, 3)]
SNAPSHOT = StateSnapshot(CoordState(3, "b", PlanRef(2, "d"), 9), (b"x", 5, 2), (b"y", 4, 2))
# a line a record: voters, three entries, all but two entries given up, whole
JOURNAL = bytes.fromhex(
    "656467656d6f652072616674203100001200000011c359237cd8b41792a6766f74657273c4086162636465666768"
    "1400000005ac51a90b85042f94a5656e747279c4090192a572656e65770101"
    "011400000040c9672a2892ea5294a5656e747279c4090192a572656e6577020201"
    "14000000331ba6b4c61c137f94a5656e747279c4090192a572656e6577030301"
    "0700000095a2ddf5d13708a692a46b65657002"
    "0700000015fac48bb75c071391a577686f6c65"
)
DISOWNED = bytes.fromhex("0c0000008d8d783689de843a92a86469736f776e6564a178")
VOTE = bytes.fromhex("656467656d6f6520726166742031000059540ff1889014519203a162")
KEPT_SNAPSHOT = bytes.fromhex(
    "656467656d6f65207261667420310000e6a5e98f53913d3b83a5737461746584a565706f636803a66c6561646572a162a4706c616e82a7"
    "76657273696f6e02a6646967657374a164a872656e6577616c7309a46c61737493c401780502a66265666f726593c401790402"
)
EPOCH = "12 7ecd2e572c949f74\n"


def test_a_journal_and_a_vote_lie_on_disk_for_ever_as_they_do_now(tmp_path: Path) -> None:
    made = Journal(tmp_path, VOTERS)
    for entry in ENTRIES:
        made.add(*entry)
    made.deleteEntriesFrom(2)
    made.setCurrentTerm(3, "b")
    made.mark_whole()
    made.close()
    file, vote = tmp_path / "raft.journal", tmp_path / "raft.vote"
    size = file.stat().st_size
    assert (file.read_bytes().rstrip(b"\0"), vote.read_bytes()) == (JOURNAL, VOTE)

    file.write_bytes(JOURNAL.ljust(size, b"\0"))
    vote.write_bytes(VOTE)
    read = Journal(tmp_path, VOTERS)
    assert (read[:], read.whole) == (ENTRIES[:2], True)
    assert (read.getCurrentTerm(), read.getVotedForNodeId()) == (3, "b")
    read.close()
    file.write_bytes((JOURNAL + DISOWNED).ljust(size, b"\0"))
    with pytest.raises(JournalDamaged, match=r"^x$"):
        Journal(tmp_path, VOTERS)


def test_a_snapshot_and_an_epoch_lie_on_disk_for_ever_as_they_do_now(tmp_path: Path) -> None:
    snapshot, epoch = tmp_path / "raft.snapshot", tmp_path / "epoch"
    write_snapshot(snapshot, SNAPSHOT)
    EpochFence(epoch).admit(12)
    assert (snapshot.read_bytes(), epoch.read_text()) == (KEPT_SNAPSHOT, EPOCH)
    snapshot.write_bytes(KEPT_SNAPSHOT)
    epoch.write_text(EPOCH)
    assert read_snapshot(snapshot) == SNAPSHOT
    assert EpochFence(epoch).highest == 12
