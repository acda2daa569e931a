"""The replicated state as it was at one entry of the log, in a file; a member that lags far behind is sent it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgemoe.cluster.control.coordination.journal import Damaged, Entry, frame, unframe
from edgemoe.cluster.control.coordination.store import CoordState
from edgemoe.durable import read_plain, replace_file

MAX_SNAPSHOT_BYTES = 1 << 20


class StateSnapshot(msgspec.Struct, frozen=True):
    """`state` after `last`, the entry that follows `before`."""

    state: CoordState
    last: Entry
    before: Entry


def write_snapshot(path: Path, snapshot: StateSnapshot) -> None:
    """Raises OSError."""
    replace_file(path, frame(msgspec.msgpack.encode(snapshot)))


def read_snapshot(path: Path) -> StateSnapshot:
    """Raises Damaged, OSError."""
    return decode_snapshot(read_plain(path, MAX_SNAPSHOT_BYTES + 1))


def decode_snapshot(content: bytes) -> StateSnapshot:
    """Raises Damaged."""
    if len(content) > MAX_SNAPSHOT_BYTES:
        raise Damaged(f"more than {MAX_SNAPSHOT_BYTES} bytes")
    try:
        snapshot = msgspec.msgpack.decode(unframe(content), type=StateSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if snapshot.last[1] != snapshot.before[1] + 1:
        raise Damaged("its entries do not follow each other")
    return snapshot
