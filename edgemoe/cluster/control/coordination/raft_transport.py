"""PySyncObj's messages over our own authenticated links, in place of its TCP port and its pickles: checked and bounded.

    payload = digest of the voters (8) | msgpack map: type, fields

A message of a member with other voters is dropped, so that two lists of voters never form one majority.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pysyncobj import SyncObj
from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE, Poller
from pysyncobj.transport import Transport

from edgemoe.cluster.control.coordination.ops import MAX_OP_BYTES
from edgemoe.cluster.control.coordination.raft_journal import (
    MAX_SNAPSHOT_BYTES,
    Journal,
    JournalDamaged,
    decode_snapshot,
)
from edgemoe.cluster.control.coordination.recovery import MAX_COUNT, Count, LogEndQuery, LogEndReply, LogRecovery
from edgemoe.cluster.control.messages import ControlMessage, RaftPayload
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 1 << 20
MAX_INBOX = 10_000
MAX_INBOX_BYTES = 16 << 20

Command = Annotated[bytes, Meta(min_length=1, max_length=MAX_OP_BYTES + 1)]
Entries = Annotated[list[tuple[Command, Count, Count]], Meta(max_length=1 << 16)]
Error = Annotated[int, Meta(ge=0, le=100)]
Part = Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]  # of a snapshot


class _RaftMessage(msgspec.Struct, tag_field="type"):
    pass


class _RequestVote(_RaftMessage, tag="request_vote"):
    term: Count
    last_log_index: Count
    last_log_term: Count


class _ResponseVote(_RaftMessage, tag="response_vote"):
    term: Count


class _AppendEntries(_RaftMessage, tag="append_entries"):
    term: Count
    commit_index: Count
    prevLogIdx: Count | UnsetType | None = UNSET
    prevLogTerm: Count | UnsetType | None = UNSET
    entries: Entries | UnsetType = UNSET
    serialized: tuple[Part, bool, bool] | UnsetType | None = UNSET


class _NextNodeIdx(_RaftMessage, tag="next_node_idx"):
    next_node_idx: Count
    reset: bool
    success: bool
    term: Count | UnsetType = UNSET  # of the leader that is told


class _ApplyCommand(_RaftMessage, tag="apply_command"):
    command: Command
    request_id: Count | UnsetType = UNSET


class _Response(_RaftMessage, tag="apply_command_response"):
    request_id: Count
    error: Error | UnsetType = UNSET
    log_idx: Count | UnsetType = UNSET
    log_term: Count | UnsetType = UNSET


RaftMessage = (
    _RequestVote | _ResponseVote | _AppendEntries | _NextNodeIdx | _ApplyCommand | _Response | LogEndQuery | LogEndReply
)
_decoder: msgspec.msgpack.Decoder[RaftMessage] = msgspec.msgpack.Decoder(RaftMessage)


class RaftLink(Protocol):
    """Authenticated, lossy, ordered datagrams between the members. Callbacks may come on any thread."""

    def send(self, node: str, payload: bytes) -> bool:
        """Queues `payload` for `node`; False where there is no connection. Never blocks, any thread."""

    def listen(
        self,
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        """Sets the callbacks for messages and connections; calls `on_up` at once for connections that exist."""


class LinkTransport(Transport):  # type: ignore[misc]
    """Carries PySyncObj's messages over a RaftLink, and delivers received ones on PySyncObj's own thread.

    A member that may not vote reports no connections to PySyncObj, so that it never stands for election.
    """

    def __init__(
        self,
        sync_obj: SyncObj,
        poller: Poller,
        others: Sequence[str],
        link: RaftLink,
        journal: Journal,
        voters: bytes,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(sync_obj, None, [])
        self._say = RateLimitedLog(log)
        self.rejected = 0  # messages that were unreadable, or that PySyncObj failed on
        self.recovery = LogRecovery(journal, others, clock)
        self._sync_obj, self._link, self._journal, self._voters = sync_obj, link, journal, voters
        self._nodes = {name: Node(name) for name in others}
        self._up: set[str] = set()
        self._inbox: deque[tuple[str, str, bytes]] = deque()
        self._inbox_bytes = 0
        self._counting = threading.Lock()  # the bytes, on two threads
        self._snapshot = b""  # as far as it has come
        self._shared = MAX_COUNT  # the last entry shared with the leader, while its message is handled
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = poller
        self._poller.subscribe(self._wake, self._deliver, POLL_EVENT_TYPE.READ)

    def listen(self) -> None:
        self._link.listen(
            lambda node, payload: self._post("message", node, payload),
            lambda node: self._post("up", node, b""),
            lambda node: self._post("down", node, b""),
        )

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        if self._journal.failed:  # a promise that the disk did not keep is not sent
            return False
        if message["type"] == "next_node_idx":
            next_index = min(message["next_node_idx"], self._shared + 1)
            message = message | {"next_node_idx": next_index, "term": self._sync_obj.raftCurrentTerm}
        return self._link.send(node.id, self._voters + msgspec.msgpack.encode(message))

    def recover(self, term: int, agreed: int) -> None:
        """Asks for the replies that this member needs before it may vote; called once a tick. See `LogRecovery`."""
        if self._journal.whole:
            return
        if (asked := self.recovery.next_query()) is not None:
            for node in self.recovery.waits_for:  # without a connection nothing is sent
                self._link.send(node, self._voters + msgspec.msgpack.encode(asked))
        if self.recovery.on_agreed(term, agreed):
            log.info("this box has caught up and votes again", extra={"term": term})
            self._allow_candidacy()

    def destroy(self) -> None:
        self._link.listen(lambda _n, _p: None, lambda _n: None, lambda _n: None)
        self._poller.unsubscribe(self._wake)
        os.close(self._wake)
        self._wake = -1

    def _post(self, what: str, node: str, payload: bytes) -> None:
        full = len(self._inbox) >= MAX_INBOX or self._inbox_bytes + len(payload) > MAX_INBOX_BYTES
        if node not in self._nodes or self._wake < 0:
            return
        if what == "message" and (full or len(payload) > MAX_MESSAGE_BYTES):
            self._reject(node, "too much at once")
            return
        with self._counting:
            self._inbox_bytes += len(payload)
        self._inbox.append((what, node, payload))
        os.eventfd_write(self._wake, 1)

    def _deliver(self, _descriptor: int, _mask: int) -> None:
        os.eventfd_read(self._wake)
        while self._inbox:
            what, name, payload = self._inbox.popleft()
            with self._counting:
                self._inbox_bytes -= len(payload)
            if what == "up":
                self._up.add(name)
                if not self.recovery.waits_for:
                    self._onNodeConnected(self._nodes[name])
            elif what == "down":
                self._up.discard(name)
                self._onNodeDisconnected(self._nodes[name])
            else:
                self._on_payload(name, payload)

    def _on_payload(self, name: str, payload: bytes) -> None:
        """Handles one message. A bad message is dropped and harms nothing else."""
        if payload[: len(self._voters)] != self._voters:
            self._reject(name, "it names other voters")
            return
        try:
            message = _decoder.decode(payload[len(self._voters) :])
            self._on_message(name, message)
        except Exception as error:  # PySyncObj does not check messages
            self._reject(name, repr(error))

    def _on_message(self, name: str, message: RaftMessage) -> None:
        match message:
            case LogEndQuery():
                self._link.send(name, self._voters + msgspec.msgpack.encode(self.recovery.answer(message)))
                return
            case LogEndReply():
                waited = bool(self.recovery.waits_for)
                self.recovery.on_reply(name, message)
                if waited and not self.recovery.waits_for:
                    log.info("every voter has said how far its log goes; this box votes")
                    self._allow_candidacy()
                return
            case _RequestVote() if not self.recovery.may_vote(
                message.term, message.last_log_term, message.last_log_index
            ):
                return
            case _AppendEntries() if not _is_sound(message):
                self._reject(name, "entries that do not follow each other")
                return
            case _AppendEntries() if message.term >= self._sync_obj.raftCurrentTerm:
                self._on_append(name, message)
                return
            case _NextNodeIdx() if message.term not in (UNSET, self._sync_obj.raftCurrentTerm):
                return  # a reply to an earlier leader may be outdated
        self._onMessageReceived(self._nodes[name], _as_map(message))

    def _on_append(self, name: str, message: _AppendEntries) -> None:
        """Appends a leader's entries; removes only entries that contradict them, and never an agreed one.

        PySyncObj would delete every entry after `prevLogIdx`, even acknowledged ones if the message came late or in
        parts. It would also count entries as agreed that no leader shares.
        """
        if isinstance(message.serialized, tuple):
            message.serialized = self._collect_snapshot(name, *message.serialized)
        sync, before, term, entries = self._sync_obj, message.prevLogIdx, message.prevLogTerm, message.entries
        have = self._journal.after(before, term) if isinstance(before, int) and isinstance(term, int) else None
        if not isinstance(before, int) or entries is UNSET or have is None:
            message.commit_index = 0
        else:
            same = sum(1 for _ in itertools.takewhile(operator.truth, map(operator.eq, have, entries)))
            contradicts = same < min(len(have), len(entries))
            if contradicts and before + same < max(sync.raftCommitIndex, sync.raftLastApplied):
                self._journal.disown(f"{name} leads and has another entry {before + same + 1} than was agreed here")
                return
            self._shared = before + len(entries)
            kept = have[: len(have) if same == len(entries) else same]
            if kept:
                _, message.prevLogIdx, message.prevLogTerm = kept[-1]
            message.entries, message.commit_index = entries[same:], min(message.commit_index, self._shared)
        try:
            self._onMessageReceived(self._nodes[name], _as_map(message))
        finally:
            self._shared = MAX_COUNT

    def _collect_snapshot(self, name: str, part: bytes, first: bool, last: bool) -> tuple[bytes, bool, bool] | None:
        """Collects parts; returns the snapshot once complete, by which PySyncObj replaces the log.

        Returns None while it is incomplete, or if the log has its entries: a late snapshot would take back promises.
        """
        self._snapshot = part if first else self._snapshot[:MAX_SNAPSHOT_BYTES] + part
        if not last:
            return None
        try:
            _, index, term = decode_snapshot(self._snapshot).last
        except JournalDamaged as error:
            self._reject(name, f"a snapshot: {error}")
            return None
        agreed = max(self._sync_obj.raftCommitIndex, self._sync_obj.raftLastApplied)
        return (self._snapshot, True, True) if index > agreed and self._journal.term_at(index) != term else None

    def _allow_candidacy(self) -> None:
        for name in self._up:
            self._onNodeConnected(self._nodes[name])

    def _reject(self, node: str, why: str) -> None:
        self.rejected += 1
        self._say(logging.WARNING, "a raft message was dropped", node, why=why[:200])


def _is_sound(message: _AppendEntries) -> bool:
    """Whether the entries follow `prevLogIdx` one by one, in terms up to the leader's."""
    if message.entries is UNSET:
        return message.serialized is not UNSET
    if not isinstance(before := message.prevLogIdx, int):
        return not message.entries and before is None
    follow = all(index == before + n for n, (_, index, _) in enumerate(message.entries, 1))
    return follow and all(term <= message.term for *_, term in message.entries)


def _as_map(message: Any) -> dict[str, Any]:
    """Returns the message in PySyncObj's form."""
    fields = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not UNSET}
    return {"type": type(message).__struct_config__.tag, **fields}


class RaftChannel:
    """A RaftLink over a control channel. Made on the channel's loop; `send` may be called from any thread.

    The control plane passes RaftPayloads to `deliver`, and changes of connections to `up` and `down`.
    """

    def __init__(self, channel: Channel[ControlMessage], nodes: list[str]) -> None:
        self._channel, self._nodes = channel, nodes
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[str, bytes], None] = lambda _n, _p: None
        self._on_up: Callable[[str], None] = lambda _n: None
        self._on_down: Callable[[str], None] = lambda _n: None

    def listen(
        self,
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        for node in self._nodes:
            if self._channel.is_up(node):
                on_up(node)

    def send(self, node: str, payload: bytes) -> bool:
        if not self._channel.is_up(node):
            return False
        self._loop.call_soon_threadsafe(self._channel.notify_peer, node, RaftPayload(payload))
        return True

    def readable(self, nodes: Sequence[str]) -> int:
        """Returns the version of the protocol that all of these are known to speak."""
        return min((self._channel.version(node) for node in nodes), default=PROTOCOL_VERSIONS.highest)

    def deliver(self, node: str, message: RaftPayload) -> None:
        self._on_message(node, message.data)

    def up(self, node: str) -> None:
        self._on_up(node)

    def down(self, node: str) -> None:
        self._on_down(node)
