"""The embedded agreement: PySyncObj's Raft over our own authenticated links.

PySyncObj would open a TCP port of its own and unpickle what arrives there; here its messages travel as msgpack over
the links between daemons, and its snapshots are msgpack files. What it still pickles are the commands in its log:
tuples of numbers and strings, which the audit hook lets through because they name no class.

It does not fsync its journal: after power loss on a majority an agreed change can be lost, which is why each box also
keeps the highest epoch in a file of its own (`fence`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, replicated
from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.transport import Transport

from edgemoe.cluster.control.coord import CoordState, PlanRef, View, plan_outcome, wait_event
from edgemoe.errors import CoordUnavailable, StaleEpoch

log = logging.getLogger(__name__)
TICK_S = 0.05
MAX_MESSAGE_BYTES = 1 << 20
MAX_INBOX = 10_000


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
        """Names who is told of messages and connections; at once told of those that stand already."""


class _LinkTransport(Transport):  # type: ignore[misc]
    """Carries PySyncObj's messages over a RaftLink, and delivers what arrives on PySyncObj's own thread."""

    def __init__(self, sync_obj: SyncObj, others: Sequence[str], link: RaftLink) -> None:
        super().__init__(sync_obj, None, [])
        self._link = link
        self._nodes = {name: Node(name) for name in others}
        self._inbox: deque[tuple[str, str, bytes]] = deque(maxlen=MAX_INBOX)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = sync_obj._poller
        self._poller.subscribe(self._wake, self._deliver, POLL_EVENT_TYPE.READ)
        link.listen(
            lambda node, payload: self._post("message", node, payload),
            lambda node: self._post("up", node, b""),
            lambda node: self._post("down", node, b""),
        )

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        return self._link.send(node.id, msgspec.msgpack.encode(message))

    def destroy(self) -> None:
        self._link.listen(lambda _n, _p: None, lambda _n: None, lambda _n: None)
        self._poller.unsubscribe(self._wake)
        os.close(self._wake)
        self._wake = -1

    def _post(self, what: str, node: str, payload: bytes) -> None:
        if node in self._nodes and len(payload) <= MAX_MESSAGE_BYTES and self._wake >= 0:
            self._inbox.append((what, node, payload))
            os.eventfd_write(self._wake, 1)

    def _deliver(self, _descriptor: int, _mask: int) -> None:
        os.eventfd_read(self._wake)
        while self._inbox:
            what, name, payload = self._inbox.popleft()
            node = self._nodes[name]
            if what == "up":
                self._onNodeConnected(node)
            elif what == "down":
                self._onNodeDisconnected(node)
            elif (message := _read_message(payload)) is not None:
                self._onMessageReceived(node, message)


def _read_message(payload: bytes) -> dict[str, Any] | None:
    """PySyncObj's message, or None for one that it could not have sent. Large entries would come pickled: refused."""
    try:
        message = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str) or "transmission" in message:
        log.warning("a raft message that cannot be read was dropped")
        return None
    if serialized := message.get("serialized"):
        message["serialized"] = tuple(serialized)
    if "entries" in message:
        message["entries"] = [tuple(entry) for entry in message["entries"]]
    return message


class _Replica(SyncObj):  # type: ignore[misc]
    """The replicated CoordState. Methods run on every member in the same order, on PySyncObj's thread."""

    def __init__(self, name: str, others: Sequence[str], directory: Path, link: RaftLink, lease_s: float) -> None:
        self.state = CoordState()
        self.renewed_at = time.monotonic()
        self.on_applied: Callable[[], None] = lambda: None
        conf = SyncObjConf(
            autoTick=False,
            journalFile=str(directory / "raft.journal"),
            fullDumpFile=str(directory / "raft.snapshot"),
            serializer=self._save,
            deserializer=self._restore,
            useFork=False,
            appendEntriesUseBatch=False,
            appendEntriesPeriod=lease_s / 30,
            raftMinTimeout=lease_s / 3,
            raftMaxTimeout=lease_s * 2 / 3,
            leaderFallbackTimeout=lease_s * 2 / 3,
            commandsWaitLeader=False,
            commandsQueueSize=1000,
            dynamicMembershipChange=False,
        )
        super().__init__(
            Node(name),
            [Node(other) for other in others],
            conf,
            transportClass=lambda sync_obj, _self, _others: _LinkTransport(sync_obj, others, link),
        )

    @replicated  # type: ignore[untyped-decorator]
    def claim(self, node: str, epoch: int, expect_epoch: int, expect_renewals: int) -> Any:
        claimed = self.state.claim(node, epoch, expect_epoch, expect_renewals)
        return self._applied(claimed, renewed=bool(claimed))

    @replicated  # type: ignore[untyped-decorator]
    def renew(self, epoch: int) -> Any:
        renewed = self.state.renew(epoch)
        return self._applied(renewed, renewed=renewed)

    @replicated  # type: ignore[untyped-decorator]
    def resign(self, epoch: int) -> Any:
        return self._applied(self.state.resign(epoch))

    @replicated  # type: ignore[untyped-decorator]
    def commit_plan(self, epoch: int, version: int, digest: str) -> Any:
        return self._applied(self.state.commit_plan(epoch, version, digest))

    def _applied(self, answer: Any, renewed: bool = False) -> Any:
        if renewed:
            self.renewed_at = time.monotonic()
        self.on_applied()
        return answer

    def _save(self, file_name: str, raft: tuple[Any, ...]) -> None:
        last, before, _cluster = raft
        state = {"state": self.state, "last": last, "before": before}
        Path(file_name).write_bytes(msgspec.msgpack.encode(state))

    def _restore(self, file_name: str) -> tuple[Any, ...]:
        saved = msgspec.msgpack.decode(Path(file_name).read_bytes())
        self.state = msgspec.convert(saved["state"], CoordState)
        return tuple(saved["last"]), tuple(saved["before"]), set()


class RaftStore:
    """CoordStore over the embedded Raft. `peers` are the other members' node names; three or more in all."""

    def __init__(self, name: str, peers: Sequence[str], directory: Path, link: RaftLink, lease_s: float = 1.5) -> None:
        self.lease_s = lease_s
        self._name, self._peers, self._directory, self._link = name, tuple(peers), directory, link
        self._event = asyncio.Event()
        self._stop = threading.Event()
        self._replica: _Replica | None = None
        self._thread: threading.Thread | None = None
        self._started_at = 0.0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._replica = _Replica(self._name, self._peers, self._directory, self._link, self.lease_s)
        self._replica.on_applied = self._post_change
        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._tick, name="raft", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        if self._thread:
            await asyncio.to_thread(self._thread.join, 5.0)

    def view(self) -> View:
        replica = self._joined()
        lives = time.monotonic() - max(replica.renewed_at, self._started_at) < self.lease_s
        return replica.state.view(lease_lives=lives)

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self._event, timeout_s)

    async def claim(self, node: str, above: int) -> int:
        replica = self._joined()
        renewals, view = replica.state.renewals, self.view()
        if view.leader and view.leader != node:
            raise StaleEpoch(f"{view.leader} leads already, in epoch {view.epoch}")
        epoch = await self._call(replica.claim, node, max(view.epoch, above) + 1, view.epoch, renewals)
        if not epoch:
            raise StaleEpoch(f"another box claimed an epoch after {view.epoch} first")
        return int(epoch)

    async def renew(self, epoch: int) -> None:
        if not await self._call(self._joined().renew, epoch):
            raise StaleEpoch(f"epoch {epoch} is over; the present one is {self.view().epoch}")

    async def resign(self, epoch: int) -> None:
        await self._call(self._joined().resign, epoch)

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        outcome = await self._call(self._joined().commit_plan, epoch, plan.version, plan.digest)
        plan_outcome(outcome, epoch, plan, self.view().plan)

    def _joined(self) -> _Replica:
        assert self._replica is not None, "start() first"
        return self._replica

    async def _call(self, method: Callable[..., None], *arguments: int | str) -> Any:
        """Runs one replicated method; its answer once a majority has it."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(answer: Any, failure: int) -> None:
            self._loop.call_soon_threadsafe(self._settle, future, answer, failure)

        method(*arguments, callback=done)
        try:
            async with asyncio.timeout(self.lease_s):
                return await future
        except TimeoutError as error:
            raise CoordUnavailable(f"no majority of the members answered within {self.lease_s:g} s") from error

    @staticmethod
    def _settle(future: asyncio.Future[Any], answer: Any, failure: int) -> None:
        if future.done():
            return
        if failure == FAIL_REASON.SUCCESS:
            future.set_result(answer)
        else:
            future.set_exception(CoordUnavailable(f"the members could not agree now (reason {failure})"))

    def _post_change(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    def _tick(self) -> None:
        replica = self._joined()
        while not self._stop.is_set():
            try:
                replica.doTick(TICK_S)
            except Exception:
                log.exception("raft step failed; going on")
                self._stop.wait(TICK_S)
        replica.destroy()
