"""The embedded agreement: PySyncObj's Raft over our own links, with our own journal, operations and snapshots.

PySyncObj would pickle, and number operations by the order of its methods' names. Here the log holds operations (`ops`),
files are checksummed (`raft_journal`), and messages are checked (`raft_transport`). A member with a failed disk leaves
the agreement, and returns from its files as soon as it can write again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf
from pysyncobj.monotonic import monotonic
from pysyncobj.node import Node

from edgemoe.cluster.control.coordination import ops
from edgemoe.cluster.control.coordination.coord_store import (
    AgreementView,
    CoordState,
    PlanRef,
    plan_outcome,
    wait_event,
)
from edgemoe.cluster.control.coordination.raft_journal import (
    Journal,
    JournalDamaged,
    StateSnapshot,
    read_snapshot,
    voters_digest,
    write_snapshot,
)
from edgemoe.cluster.control.coordination.raft_transport import LinkTransport, RaftLink
from edgemoe.cluster.control.coordination.recovery import ASK_S, open_journal
from edgemoe.durable import make_folder
from edgemoe.errors import CoordUnavailable, StaleEpoch
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

log = logging.getLogger(__name__)
BACK_S = 1.0  # between two tries to write again
OPERATION = 0  # PySyncObj's types of entries
NO_OPERATION = b"\1"


class StateReplica(SyncObj):  # type: ignore[misc]
    """The replicated CoordState. Operations are applied on every member in the same order, on PySyncObj's thread."""

    def __init__(
        self,
        name: str,
        others: Sequence[str],
        directory: Path,
        link: RaftLink,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        voters = voters_digest([name, *others])
        self.journal: Journal = open_journal(directory, voters)
        self.state = CoordState()
        self._say = RateLimitedLog(log)
        self.skipped = 0  # operations that this release cannot read, or that are none
        self.renewed_at = clock()
        self.on_applied: Callable[[], None] = lambda: None
        self._clock = clock
        self._exceptions = 0
        conf = SyncObjConf(
            autoTick=False,
            fullDumpFile=str(directory / "raft.snapshot"),
            serializer=self._save,
            deserializer=self._restore,
            useFork=False,
            appendEntriesUseBatch=False,
            appendEntriesPeriod=lease_s / 8,  # each renewal of the lease is said as well
            raftMinTimeout=lease_s * 0.4,
            raftMaxTimeout=lease_s * 2 / 3,
            leaderFallbackTimeout=lease_s * 2 / 3,
            connectionTimeout=lease_s,  # for connections that it never makes here; it must exceed raftMaxTimeout
            commandsWaitLeader=False,
            commandsQueueSize=1000,
            dynamicMembershipChange=False,
        )
        super().__init__(
            Node(name),
            [Node(other) for other in others],
            conf,
            transportClass=lambda *_: LinkTransport(self, self._poller, others, link, self.journal, voters, clock),
        )
        self.transport.listen()

    # --- in place of PySyncObj's own --------------------------------------------------------------------------

    @property
    def _SyncObj__raftLog(self) -> Journal:
        """PySyncObj's journal is a sparse map of memory: a full disk would be a SIGBUS, a flipped byte go unnoticed."""
        return self.journal

    @_SyncObj__raftLog.setter
    def _SyncObj__raftLog(self, _: object) -> None:
        """The one that PySyncObj makes, in memory, is not used."""

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:
        """Applies an operation in place of PySyncObj, which unpickles a call. Counts and skips an unreadable one."""
        if command[:1] == NO_OPERATION:
            return None
        op = ops.decode(command[1:]) if command[:1] == bytes([OPERATION]) else None
        if op is None:
            self.skipped += 1
            self._say(logging.ERROR, "an operation of the agreement is passed over: another release wrote it")
            return None
        answer = self.state.apply(op)
        if answer and isinstance(op, ops.ClaimLease | ops.RenewLease):
            self.renewed_at = self._clock()
        self.on_applied()
        return answer

    # --- ours -------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> LinkTransport:
        found: LinkTransport = self._SyncObj__transport
        return found

    def propose(self, op: bytes, done: Callable[[Any, int], None]) -> None:
        """Proposes an operation. Calls `done(answer, failure)` on PySyncObj's thread once the outcome is known."""
        self._applyCommand(op, done, OPERATION)

    def tick(self, longest_s: float = ASK_S) -> bool:
        """Takes one step, then waits for a timer or a message. Returns False once the files cannot be used."""
        try:
            self.doTick(min(longest_s, self._rest_s()))
            self.transport.recover(self.raftCurrentTerm, self.raftCommitIndex)
        except Exception:
            self._exceptions += 1
            if self._exceptions & (self._exceptions - 1) == 0 and not self.journal.failed:
                log.exception("raft step failed; going on", extra={"times": self._exceptions})
        return not self.journal.failed

    def _rest_s(self) -> float:
        """Returns the time until a timer is due. A box without connections does not stand for election."""
        leads, hears = self._isLeader(), self._SyncObj__connectedNodes
        due_s = self._SyncObj__newAppendEntriesTime if leads else self._SyncObj__raftElectionDeadline
        return max(0.0, due_s - monotonic()) if leads or hears else ASK_S

    def _save(self, file_name: str, raft: tuple[Any, ...]) -> None:
        last, before, _cluster = raft
        write_snapshot(Path(file_name), StateSnapshot(self.state, last, before))

    def _restore(self, file_name: str) -> tuple[Any, ...]:
        try:
            snapshot = read_snapshot(Path(file_name))
        except (JournalDamaged, OSError):
            self.journal.failed = True  # it has replaced the good one already, so all files are read again
            raise
        self.state, self.renewed_at = snapshot.state, self._clock()  # its last renewal may be a moment ago
        self.on_applied()
        return snapshot.last, snapshot.before, set()


class RaftStore:
    """CoordStore over the embedded Raft. `peers` are the other members' node names; three or more in all."""

    def __init__(
        self,
        name: str,
        peers: Sequence[str],
        directory: Path,
        link: RaftLink,
        lease_s: float = 1.5,
        *,
        clock: Callable[[], float],
        readable: Callable[[], int] = lambda: PROTOCOL_VERSIONS.highest,
    ) -> None:
        """Calls `readable` for the version of the protocol that every voter is known to speak."""
        self.lease_s = lease_s
        self._name, self._peers, self._directory, self._link = name, tuple(peers), directory, link
        self._clock, self._readable = clock, readable
        self._event = asyncio.Event()
        self._stop = threading.Event()
        self._replica: StateReplica | None = None
        self._thread: threading.Thread | None = None
        self._started_at = 0.0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            make_folder(self._directory, 0o700)
            self._replica = self._open()
        except OSError as error:
            raise CoordUnavailable(f"{self._directory}: no journal can be kept there: {error.strerror}") from error
        self._started_at = self._clock()
        self._launch()

    def _launch(self) -> None:
        self._thread = threading.Thread(target=self._run, name="raft", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        if self._thread:
            await asyncio.to_thread(self._thread.join, 5.0)

    def view(self) -> AgreementView:
        replica = self._joined()
        lives = self._clock() - max(replica.renewed_at, self._started_at) < self.lease_s
        return replica.state.view(lease_lives=lives)

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self._event, timeout_s)

    async def claim(self, node: str, above: int) -> int:
        replica = self._joined()
        renewals, view = replica.state.renewals, self.view()
        if view.leader and view.leader != node:
            raise StaleEpoch(f"{view.leader} leads already, in epoch {view.epoch}")
        epoch = await self._agree(ops.ClaimLease(node, max(view.epoch, above) + 1, view.epoch, renewals))
        if not epoch:
            raise StaleEpoch(f"another box claimed an epoch after {view.epoch} first")
        return int(epoch)

    async def renew(self, epoch: int) -> None:
        if not await self._agree(ops.RenewLease(epoch)):
            raise StaleEpoch(f"epoch {epoch} is over; the present one is {self.view().epoch}")

    async def resign(self, epoch: int) -> None:
        await self._agree(ops.ResignLease(epoch))

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        outcome = await self._agree(ops.CommitPlan(epoch, plan.version, plan.digest))
        plan_outcome(outcome, epoch, plan, self.view().plan)

    @property
    def blocker(self) -> str:
        """Why this box has no vote now; "" while it has one."""
        if self._replica is None or self._replica.journal.failed:
            return f"{self._directory} cannot be written: this box takes no part in the agreement"
        waits_for = self._replica.transport.recovery.waits_for
        return f"no vote before a leader, or word of {', '.join(waits_for)}, is heard" if waits_for else ""

    def agreed(self) -> tuple[int, str]:
        """Returns how many entries have been applied here, and the digest of the state that they made."""
        replica = self._joined()
        return replica.raftLastApplied, xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(replica.state))

    def _joined(self) -> StateReplica:
        assert self._replica is not None, "start() first"
        return self._replica

    async def _agree(self, op: ops.Op) -> Any:
        """Has the operation agreed. Returns its answer once a majority has it."""
        if self._readable() < op.SINCE:
            raise CoordUnavailable(
                f"not every voter knows the operation {type(op).__name__}: bring all boxes to this release"
            )
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(answer: Any, failure: int) -> None:
            self._loop.call_soon_threadsafe(self._resolve, future, answer, failure)

        self._joined().propose(ops.encode(op), done)
        try:
            async with asyncio.timeout(self.lease_s):
                return await future
        except TimeoutError as error:
            raise CoordUnavailable(f"no majority of the members answered within {self.lease_s:g} s") from error

    @staticmethod
    def _resolve(future: asyncio.Future[Any], answer: Any, failure: int) -> None:
        if future.done():
            return
        if failure == FAIL_REASON.SUCCESS:
            future.set_result(answer)
        else:
            future.set_exception(CoordUnavailable(f"the members could not agree now (reason {failure})"))

    def _open(self) -> StateReplica:
        """Makes the replica from its files. Raises OSError."""
        replica = StateReplica(self._name, self._peers, self._directory, self._link, self.lease_s, self._clock)
        replica.on_applied = self._post_change
        return replica

    def _post_change(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    def _run(self) -> None:
        replica = self._joined()
        while not self._stop.is_set():
            if replica.tick():
                continue
            log.error("the journal cannot be used; leaving the agreement", extra={"directory": str(self._directory)})
            replica.destroy()
            if (found := self._reopen()) is None:
                return
            replica = self._replica = found
        replica.destroy()

    def _reopen(self) -> StateReplica | None:
        """Returns a replica made from the files, as soon as the disk can be written; None once closed."""
        while not self._stop.wait(BACK_S):
            try:
                return self._open()
            except OSError:
                continue
        return None
