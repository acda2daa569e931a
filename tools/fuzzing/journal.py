"""Fuzzes the files of the embedded agreement: no damaged one is trusted, and none keeps a box from starting.

Damage is a cut at any byte, a flipped bit, a run of zeros or noise, or the file of another moment.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from edgemoe.cluster.control.coordination import ops
from edgemoe.cluster.control.coordination.coord_store import CoordState, PlanRef
from edgemoe.cluster.control.coordination.raft_journal import Journal, StateSnapshot, write_snapshot
from edgemoe.cluster.control.coordination.recovery import open_journal

WHATS = ("journal", "snapshot", "vote")
VOTERS = b"abcdefgh"
ENTRIES = [(b"\0" + ops.encode(ops.CommitPlan(1, n, f"digest {n}")), n, 1 + n // 9) for n in range(1, 40)]


def fuzz(what: str, count: int, seed: int) -> dict[str, Any]:
    """Damages one of the files (or any) `count` times. `ok` if the member always came up correctly."""
    logging.getLogger(open_journal.__module__).setLevel(logging.CRITICAL)
    logging.getLogger(Journal.__module__).setLevel(logging.CRITICAL)
    rng, wrong = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        good = _made(Path(folder) / "good")
        for n in range(count):
            name = what or rng.choice(WHATS)
            directory = Path(folder) / "member"
            shutil.copytree(good, directory)
            file = directory / f"raft.{name}"
            before = file.read_bytes()
            file.write_bytes(after := _damaged(before, rng))
            if after != before and (why := _wrong(name, directory)):
                wrong.append(f"{n}: {name}: {why}")
            shutil.rmtree(directory)
    return {"ok": not wrong, "count": count, "seed": seed, "wrong": wrong[:10]}


def _made(directory: Path) -> Path:
    directory.mkdir()
    journal = Journal(directory, VOTERS)
    for entry in ENTRIES:
        journal.add(*entry)
    journal.setCurrentTerm(6, "b")
    journal.mark_whole()
    write_snapshot(
        directory / "raft.snapshot", StateSnapshot(CoordState(3, "b", PlanRef(9, "d")), ENTRIES[9], ENTRIES[8])
    )
    journal.deleteEntriesTo(8)
    journal.close()
    return directory


def _damaged(content: bytes, rng: random.Random) -> bytes:
    used = len(content.rstrip(b"\0"))
    at = rng.randrange(used) if rng.random() < 0.9 else rng.randrange(len(content))
    length = rng.randrange(1, 40)
    match rng.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        case 2:
            return content[:at] + bytes(length) + content[at + length :]
        case _:
            return content[:at] + rng.randbytes(length) + content[at + length :]


def _wrong(name: str, directory: Path) -> str:
    """Returns the fault of the member that comes up; "" if there is none."""
    journal = open_journal(directory, VOTERS)
    try:
        if journal.whole:
            return "it votes as if it remembered all"
        if name == "vote":
            return "" if journal[:] == ENTRIES[8:] else "its log has changed"
        if len(journal):
            return "it believes a damaged file"
        journal.add(*ENTRIES[0])
        return "" if journal.getVotedForNodeId() == "b" else "it forgot its vote"
    finally:
        journal.close()
