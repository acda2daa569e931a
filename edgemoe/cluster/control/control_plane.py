"""The control plane of one box: beats, announcements, the leader's plan and requests, over the control channel.

`control_state` decides, this module does the I/O. Without a leader every box goes on with the last plan.
See docs/design/membership.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from edgemoe.cluster.control.admission import AllowKeys, ConnectPeer, DisconnectPeer, RevokeKeys
from edgemoe.cluster.control.announcer import Announcer, Reporter
from edgemoe.cluster.control.control_state import (
    Action,
    AnnouncementChanged,
    CheckPlan,
    ConnectionLost,
    ConnectionOpened,
    ControlState,
    DeliverBeat,
    Event,
    MessageReceived,
    PeerFoundIncompatible,
    PeersListChanged,
    PublishMembers,
    RefuseMessage,
    TimerFired,
)
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.raft_transport import RaftChannel
from edgemoe.cluster.control.coordination.store import since_boot
from edgemoe.cluster.control.coordination.store_factory import make_store
from edgemoe.cluster.control.leader import Leader
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import (
    CONTROL,
    Announce,
    Beat,
    Check,
    ControlMessage,
    EngineUse,
    FetchParcel,
    FindStore,
    Forward,
    GetPlan,
    Parcel,
    PlanIs,
    RaftPayload,
    Reach,
    Report,
    RequestGrant,
    RequestOffer,
    Tokens,
    Welcome,
    Withdrawal,
)
from edgemoe.cluster.control.plan_store import PlanExchange, PlanStore
from edgemoe.cluster.control.planning.solver import PlanSolver
from edgemoe.cluster.control.port_probe import PortProber
from edgemoe.cluster.control.requests.desk import RequestDesk
from edgemoe.cluster.control.requests.parcels import Parcels
from edgemoe.cluster.control.requests.policies import make_queue
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import make_folder
from edgemoe.errors import ConfigError, PeerRefused
from edgemoe.ipc.messages import Show
from edgemoe.ticking import until_tick
from edgemoe.types.placement import PlacementPlan


class LocalServices(Protocol):
    """Stands for this box's engine and its requests."""

    def load(self) -> Beat:
        """Returns how busy it is; a beat's other fields are filled in later."""

    def report(self) -> Report | None:
        """Returns what the leader is told every ten seconds; None while there is no engine."""

    def on_members_changed(self) -> None:
        """Members or their engines have changed."""

    def on_beat(self, node: str, beat: Beat) -> None:
        """Takes note of how another box says that it is."""

    def follow_plan(self, plan: PlacementPlan) -> None:
        """Goes by this plan from now on."""

    def on_grant(self, grant: RequestGrant) -> None:
        """Hears from the leader which engine takes a request that was offered. May be called while offering one."""

    def check_room(self) -> None:
        """Raises PeerBusy where our engine takes no request of another front."""

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        """Answers a Forward, Tokens, Check, Show or FindStore, and refuses others. Raises PeerError, WireError."""


class NoServices:
    """What runs on a witness."""

    def load(self) -> Beat:
        return Beat()

    def report(self) -> Report | None:
        return None

    def on_members_changed(self) -> None:
        return None

    def on_beat(self, node: str, beat: Beat) -> None:
        return None

    def follow_plan(self, plan: PlacementPlan) -> None:
        return None

    def on_grant(self, grant: RequestGrant) -> None:
        return None

    def check_room(self) -> None:
        raise PeerRefused("no requests are served here")

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        raise PeerRefused("no requests are served here")


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
        local: LocalServices | None = None,
    ) -> None:
        """`peers` are all boxes that are listed, this one perhaps among them. Raises ConfigError, ServiceError."""
        directory = Path(settings.state_dir)
        make_folder(directory, 0o700)
        plans = PlanStore(directory / "plan")
        fence = EpochFence(directory / "epoch", plans.plan.epoch if plans.plan else 0)
        self.state = ControlState(settings, peers, announce, plans, fence, clock)
        self._settings, self._local, self._news = settings, local or NoServices(), asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._transport = Transport(settings.node, boot, secret, AllowList({}))
        self.channel: Channel[ControlMessage] = Channel(
            self._transport, "control", CONTROL, self._serve, ChannelSettings(heartbeat_s=0.5, aside=True)
        )
        self.exchange = PlanExchange(plans, fence, self.channel, self._local.follow_plan)
        self._announcer = Announcer(self.state, self.channel, self._handle)
        self._reporter = Reporter(self.state, self.channel, self._local.report)
        self.port_prober, self.parcels = (
            PortProber(self.state, self.channel),
            Parcels(self.channel, self._local.check_room),
        )
        self._link = RaftChannel(self.channel, [name for name in peers if name != settings.node])
        self._solver = PlanSolver(settings)
        queue, fitting = make_queue(settings, self._solver.fit, clock)
        self.desk = RequestDesk(self.state, self.channel, queue, lambda: self.leading, self._local.on_grant, fitting)
        self._leader: Leader | None = None
        try:
            if (store := make_store(settings, peers, fence, self._link, clock)) is not None:
                self._leader = Leader(
                    settings,
                    store,
                    self.state,
                    self.exchange,
                    self._solver,
                    beat=self.beat,
                    report=self._local.report,
                )
        except ConfigError:
            self.channel.close()
            self._transport.close()
            raise
        self.channel.on_up, self.channel.on_down, self.channel.on_foreign = self._up, self._down, self._foreign
        self._perform(self.state.begin())

    # --- what the front calls ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """Opens the channel. Raises PeerRefused where the address cannot be had."""
        host, _, port = self._settings.listen.rpartition(":")
        self.channel.bind(host.strip("[]"), int(port))

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                tells = [
                    self._announcer.run,
                    self._announcer.reannounce,
                    self._reporter.run,
                    self._beat_on,
                    self.desk.run,
                ]
                leads = [self._leader.run] if self._leader is not None else []
                for run in [self._transport.run, self.channel.run, *tells, *leads]:
                    self._group.create_task(run())
                self._group.create_task(self.exchange.run(self._news, self._leader_beat))
        finally:
            await self._solver.close()
            if self._leader is not None:
                await self._leader.close()
            self._transport.close()

    def set_peers(self, peers: Mapping[str, Peer]) -> None:
        """From now on these are the boxes that are listed; who is no longer let in is cut off at once."""
        self._handle(PeersListChanged(peers))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Spawns a task that lives as long as `run`, at most. An unexpected exception ends that task alone."""
        assert self._group is not None
        task = self._group.create_task(self.channel.mishaps.contain(self.state.node, work))
        task.add_done_callback(lambda _: work.close())  # where it was cancelled before its first step
        return task

    def set_announcement(self, announce: Announce) -> None:
        """Takes this for what the box is from now on."""
        self._handle(AnnouncementChanged(announce))

    async def leave(self, still: bool = False) -> None:
        """Gives leadership back and tells everybody that this box goes; `still` while its engine still serves them."""
        engine = self.announcement.engine if still else None
        self.set_announcement(msgspec.structs.replace(self.announcement, leaving=True, engine=engine))
        if self._leader is not None:
            await self._leader.resign()
        await asyncio.gather(*map(self._announcer.announce_to, self.state.members.alive()))

    @property
    def announcement(self) -> Announce:
        """Returns what this box says of itself."""
        return self.state.card

    @property
    def leader(self) -> str:
        """Returns whom this box obeys, itself perhaps; "" while there is nobody."""
        return self.state.leader_tracker.leader

    @property
    def leading(self) -> int:
        """Returns the epoch in which this box leads; 0 while it does not."""
        return self._leader.epoch if self._leader is not None else 0

    @property
    def blocker(self) -> str:
        """Returns why there is no new plan, as far as this box leads."""
        return self._leader.blocker if self._leader is not None else ""

    @property
    def agreed(self) -> tuple[int, str] | None:
        """Entries of the embedded agreement that were applied here, and their state's digest; None without one."""
        return self._leader.agreed if self._leader is not None else None

    # --- hearing ----------------------------------------------------------------------------------------------

    async def _serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage] | None:
        if question.peer not in self.state.members:
            raise PeerRefused(f"{question.peer} is no longer listed by {self.state.node}")
        message = question.message
        if isinstance(message, FindStore | Welcome):  # of a command beside that box's daemon, not of the daemon
            return self._local.serve(question)
        if isinstance(message, FetchParcel):
            return self.parcels.serve(question.peer, message)
        told = message if isinstance(message, Beat | Announce | Report) else None
        self._handle(MessageReceived(question.peer, question.boot, told))
        match message:
            case RaftPayload():
                self._link.deliver(question.peer, message)
            case RequestOffer():
                return Answer(self.desk.ask(question.peer, message))
            case EngineUse():
                self.desk.hear(question.peer, message)
            case Withdrawal():
                self.desk.withdraw(question.peer, message)
            case RequestGrant() if question.peer == self.leader:
                self._local.on_grant(message)
            case Beat() | Report() | RequestGrant():
                return None
            case Announce():
                return Answer(Welcome())
            case GetPlan(digest=digest):
                return Answer(PlanIs(), [memoryview(self.state.plans.bytes_of(digest))])
            case Reach():
                return Answer(await self.port_prober.answer(question.peer))
            case Forward(parcel=Parcel() as parcel):
                return self._local.serve(await self.parcels.fetch(question, parcel))
            case Forward() | Tokens() | Check() | Show():
                return self._local.serve(question)
            case _:
                raise PeerRefused("not a question")
        return None

    def _up(self, node: str) -> None:
        self._handle(ConnectionOpened(node))
        self._link.up(node)

    def _down(self, node: str) -> None:
        self._link.down(node)
        self._handle(ConnectionLost(node))

    def _foreign(self, node: str, why: str) -> None:
        self._handle(PeerFoundIncompatible(node, why))

    def _handle(self, event: Event) -> None:
        self._perform(self.state.handle(event))
        self._announcer.look()

    def _perform(self, actions: Sequence[Action]) -> None:
        """Raises PeerRefused where one of them is to refuse."""
        for action in actions:
            match action:
                case AllowKeys(node, keys):
                    self._transport.allowed.allow(node, *keys)
                case RevokeKeys(node):
                    self._transport.allowed.revoke(node)
                case ConnectPeer(peer):
                    self.channel.connect(peer)
                case DisconnectPeer(node):
                    self.channel.disconnect(node)
                case DeliverBeat(node, beat):
                    self._local.on_beat(node, beat)
                case CheckPlan():
                    self._news.set()
                case PublishMembers():
                    self._news.set()
                    self._local.on_members_changed()
                    self.desk.look()
                case RefuseMessage(why):
                    raise PeerRefused(why)

    # --- saying -----------------------------------------------------------------------------------------------

    async def _beat_on(self) -> None:
        while True:
            with self.channel.mishaps.contained(self.state.node):
                self._handle(TimerFired())
                self.desk.look()
                self.beat()
            await asyncio.sleep(until_tick(BEAT_S))

    def beat(self) -> None:
        """Tells everybody how this box is."""
        ref = self.state.plans.ref if self._leader is None or not self.leading or self._leader.settled else None
        self._announcer.beat(self._local.load(), self.leading, self.state.fence.highest, ref)

    def _leader_beat(self) -> tuple[str, Beat] | None:
        leader, members = self.leader, self.state.members
        return (leader, members[leader].beat) if leader in members else None
