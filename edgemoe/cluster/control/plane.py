"""One box among the others, on the control channel: it says how it is, hears the others, follows the leader or leads.

    every beat   Beat to all; who has not been heard for DEAD_S is dead; a broken connection says so at once
    on change    Announce to all, until each has taken note of it; again to who has none of it, by its beats
    a follower   obeys a leader whose epoch is not below the highest it has ever seen (`fence`): fetches the plan that
                 the leader names, checks its digest, keeps it on disk and hands it on
    the leader   (`leading`) makes plans and has them agreed; it names the plan in its beats

Without a leader everybody goes on with the last plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import msgspec

from edgemoe.cluster.control.admission import Admission
from edgemoe.cluster.control.announcer import Announcer
from edgemoe.cluster.control.coordination.choice import make_store
from edgemoe.cluster.control.coordination.clock import since_boot
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.fingerprint import Agreement
from edgemoe.cluster.control.coordination.raft_channel import RaftChannel
from edgemoe.cluster.control.leader import Leader
from edgemoe.cluster.control.members import BEAT_S, Member, Members
from edgemoe.cluster.control.obedience import Obedience
from edgemoe.cluster.control.plan_exchange import PlanExchange
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.control.reporter import Reporter
from edgemoe.cluster.rpc.auth import AllowList
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.control_messages import (
    CONTROL,
    Announce,
    Beat,
    Check,
    ControlMessage,
    Forward,
    GetPlan,
    PlanIs,
    RaftPayload,
    Report,
    Tokens,
    Welcome,
)
from edgemoe.cluster.rpc.keys import Peer, Secret
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.cluster.rpc.transport import Answer, ChannelSettings, Question, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, PeerRefused

log = logging.getLogger(__name__)


class ControlPlane:
    """Made on the front's event loop; `run` until cancelled, after `leave`."""

    def __init__(
        self,
        settings: ClusterSettings,
        boot: str,
        secret: Secret,
        peers: Mapping[str, Peer],
        announce: Announce,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        """`peers` are all boxes that are listed, this one perhaps among them. Raises ConfigError, ServiceError."""
        directory = Path(settings.state_dir)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.settings, self.node = settings, settings.node
        self.plans = PlanStore(directory / "plan")
        self.fence = EpochFence(directory / "epoch", self.plans.plan.epoch if self.plans.plan else 0)
        self.clock, self.members = clock, Members(clock)
        agreement = Agreement(settings, peers)
        self.obedience = Obedience(self.fence, agreement, self._refuse)
        self.load: Callable[[], Beat] = Beat  # how busy this box is; a beat's other fields are filled in here
        self._news = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.on_change: Callable[[], None] = lambda: None  # members or their engines
        self.on_beat: Callable[[str, Beat], None] = lambda _node, _beat: None
        self.on_request: Callable[[Question[ControlMessage]], Answer[ControlMessage]] = _refuse
        self._say = SparingLog(log)
        self._transport = Transport(self.node, boot, secret, AllowList({}))
        self.channel: Channel[ControlMessage] = Channel(
            self._transport, "control", CONTROL, self._serve, ChannelSettings(heartbeat_s=0.5)
        )
        self.exchange = PlanExchange(self.plans, self.fence, self.channel)
        announce = msgspec.structs.replace(announce, agreement=agreement.words)
        self.announcer = Announcer(announce, self.members, self.channel)
        self.reporter = Reporter(self.members, self.obedience, self.channel)
        self._admission = Admission(settings, peers, agreement, self.members, self.channel, self._transport.allowed)
        self._link = RaftChannel(self.channel, [name for name in peers if name != settings.node])
        self._leader: Leader | None = None
        try:
            if (store := make_store(settings, peers, self.fence, self._link, clock)) is not None:
                self._leader = Leader(settings, store, self, electable=announce.role == "box")
        except ConfigError:
            self.channel.close()
            self._transport.close()
            raise
        self.channel.on_up, self.channel.on_down, self.channel.on_foreign = self._up, self._down, self._refuse
        self._let_in()

    # --- what the front calls ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """Opens the channel. Raises PeerRefused where the address cannot be had."""
        host, _, port = self.settings.listen.rpartition(":")
        self.channel.bind(host.strip("[]"), int(port))

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                tells = [self.announcer.run, self.reporter.run, self._beat_on]
                leads = [self._leader.run] if self._leader is not None else []
                for run in [self._transport.run, self.channel.run, *tells, *leads]:
                    self._group.create_task(run())
                self._group.create_task(self.exchange.run(self._news, self._leader_beat))
        finally:
            if self._leader is not None:
                await self._leader.close()
            self._transport.close()

    def list(self, peers: Mapping[str, Peer]) -> None:
        """From now on these are the boxes that are listed; who is no longer let in is cut off at once."""
        self._admission.listed = dict(peers)
        self._let_in()
        self.on_change()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Spawns a task that lives as long as `run`, at most."""
        assert self._group is not None
        return self._group.create_task(work)

    def say(self, announce: Announce) -> None:
        """Takes this for what the box is from now on."""
        if announce != self.announce:
            self.announcer.change(announce)
            self._news.set()

    async def leave(self, still: bool = False) -> None:
        """Gives leadership back and tells everybody that this box goes; `still` while its engine still serves them."""
        engine = self.announce.engine if still else None
        self.say(msgspec.structs.replace(self.announce, leaving=True, engine=engine))
        if self._leader is not None:
            await self._leader.resign()
        alive = (member for member in self.members if self.members.is_alive(member.peer.node))
        await asyncio.gather(*map(self.announcer.introduce, alive))

    @property
    def announce(self) -> Announce:
        """Returns what this box says of itself."""
        return self.announcer.card

    @property
    def leader(self) -> str:
        """Returns whom this box obeys, itself perhaps; "" while there is nobody."""
        return self.obedience.leader

    @property
    def leading(self) -> int:
        """Returns the epoch in which this box leads; 0 while it does not."""
        return self._leader.epoch if self._leader is not None else 0

    @property
    def trouble(self) -> str:
        """Returns why there is no new plan, as far as this box leads."""
        return self._leader.trouble if self._leader is not None else ""

    @property
    def agreed(self) -> tuple[int, str] | None:
        """Entries of the embedded agreement that were applied here, and their state's digest; None without one."""
        return self._leader.agreed if self._leader is not None else None

    @property
    def epoch(self) -> int:
        """Returns the highest that this box has seen."""
        return self.fence.highest

    # --- who is let in ----------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        for node in self._admission.renew():
            self.obedience.leave(node)
        self.say(msgspec.structs.replace(self.announce, listed=self._admission.announced_list()))

    # --- hearing ----------------------------------------------------------------------------------------------

    async def _serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage] | None:
        if question.peer not in self.members:
            raise PeerRefused(f"{question.peer} is no longer listed by {self.node}")
        member, message = self.members[question.peer], question.message
        if member.boot != question.boot:
            member.boot, member.acknowledged = question.boot, 0
        match message:
            case RaftPayload():
                self._link.deliver(question.peer, message)
            case Beat():
                self._hear_beat(member, message)
            case Announce():
                self._meet(member, message)
                return Answer(Welcome())
            case Report():
                member.report = message
            case GetPlan():
                return Answer(PlanIs(), [memoryview(self.plans.bytes_of(message.digest))])
            case Forward() | Tokens() | Check():
                return self.on_request(question)
            case _:
                raise PeerRefused("not a question")
        return None

    def _hear_beat(self, member: Member, beat: Beat) -> None:
        node, before = member.peer.node, member.beat
        member.heard_s, member.beat = self.clock(), beat
        self.on_beat(node, beat)
        if beat.leading != before.leading or beat.plan_digest != before.plan_digest:
            self._news.set()
        if beat.engine != before.engine:
            self.on_change()
        if beat.unmet:
            member.acknowledged = 0
        if not member.noted:
            self._watch()
        self.obedience.hear(member, before)

    def _meet(self, member: Member, card: Announce) -> None:
        """Takes note of what a box says of itself.

        Raises PeerRefused for one that serves another model, ConfigError for an address that cannot be one.
        """
        was = member.refused
        if self._admission.meet(member, card):
            self._let_in()
        member.refused = self._admission.objection(member.peer.node, card, self.announcer)
        if member.refused and was != member.refused:
            self._say(logging.ERROR, "a box cannot take part", member.peer.node, why=member.refused)
        self._changed()
        if member.refused:
            raise PeerRefused(member.refused)

    def _up(self, node: str) -> None:
        member = self.members[node]
        member.up, member.acknowledged = True, 0
        self._link.up(node)
        self._news.set()

    def _down(self, node: str) -> None:
        self.members[node].up = False
        self._link.down(node)
        self._watch()

    def _refuse(self, node: str, why: str) -> None:
        """That box's words cannot be read."""
        if node in self.members and self.members[node].refused != why:
            self.members[node].refused = why
            self._changed()

    def _watch(self) -> None:
        """Takes note of who has come and gone."""
        if self._admission.is_due():
            self._let_in()
        for node in self.members.watch():
            alive = self.members.is_alive(node)
            self._say(logging.INFO, "box is here" if alive else "box is gone", node)
            if not alive:
                self.obedience.leave(node)
            self._changed()

    def _changed(self) -> None:
        self._news.set()
        self.on_change()

    # --- saying -----------------------------------------------------------------------------------------------

    async def _beat_on(self) -> None:
        while True:
            self._watch()
            self.beat()
            await asyncio.sleep(BEAT_S)

    def beat(self) -> None:
        """Tells everybody how this box is."""
        leading = self.leading
        ref = self.plans.ref if self._leader is None or not leading or self._leader.settled else None
        self.announcer.beat(self.load(), leading, self.fence.highest, ref)

    def _leader_beat(self) -> tuple[str, Beat] | None:
        return (self.leader, self.members[self.leader].beat) if self.leader in self.members else None


def _refuse(question: Question[ControlMessage]) -> Answer[ControlMessage]:
    raise PeerRefused("no requests are served here")
