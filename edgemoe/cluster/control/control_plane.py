"""The control plane of one box: beats, announcements, the leader's plan and requests, over the control channel.

`control_state` decides, this module does the I/O. Without a leader every box goes on with the last plan.
See docs/design/membership.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from edgemoe.cluster.control.admission import KEPT_BOXES, AllowKeys, ConnectPeer, DisconnectPeer, KeptWords, RevokeKeys
from edgemoe.cluster.control.agreement_part import AgreementPart
from edgemoe.cluster.control.announcer import ActivityReporter, BeatSender
from edgemoe.cluster.control.control_state import (
    AnnouncementChanged,
    BoxMemory,
    CheckPlan,
    ConnectionLost,
    ConnectionOpened,
    ControlState,
    DeliverBeat,
    Event,
    Instruction,
    MessageReceived,
    PeerFoundIncompatible,
    PeerFoundLying,
    PeersListChanged,
    PublishMembers,
    RefuseMessage,
    RosterAgreed,
    TimerFired,
)
from edgemoe.cluster.control.coordination.coord_store import CoordStore, since_boot
from edgemoe.cluster.control.coordination.election_rules import KeptVoters, voters_of
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.store_factory import voters_fault
from edgemoe.cluster.control.distrust import DistrustedBoxes
from edgemoe.cluster.control.etcd_member import EtcdMember
from edgemoe.cluster.control.etcd_run import KEPT_RUNS, KeptRuns
from edgemoe.cluster.control.leader import LeaderTasks
from edgemoe.cluster.control.member_changes import MemberChanges
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import (
    CONTROL,
    Announce,
    BoxReport,
    ControlMessage,
    EtcdCard,
    EtcdJoin,
    FetchParcel,
    ForwardedEmissions,
    ForwardedFrame,
    ForwardedHttp,
    HandOver,
    Heartbeat,
    HttpPartQuery,
    HttpWithdrawal,
    JoinCluster,
    LoadReport,
    LostRequestsQuery,
    MemberChange,
    OfferWithdrawal,
    Parcel,
    PlanReply,
    PlanRequest,
    PortProbeRequest,
    RequestGrant,
    RequestOffer,
    StoreLocationRequest,
    Welcome,
)
from edgemoe.cluster.control.plan_store import PlanExchange, PlanStore
from edgemoe.cluster.control.planning.solver import PlanSolver
from edgemoe.cluster.control.port_probe import PortProber
from edgemoe.cluster.control.requests.parcels import RequestParcels
from edgemoe.cluster.control.requests.request_desk import RequestDesk, make_queue
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret
from edgemoe.cluster.rpc.roster import KEPT_ROSTER, KeptRoster, Roster
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import make_folder
from edgemoe.errors import ConfigError, PeerRefused
from edgemoe.ipc.messages import SnapshotRequest
from edgemoe.ticking import until_tick
from edgemoe.types.placement import PlacementPlan

log = logging.getLogger(__name__)
HAND_OVER_S = 15.0  # that other boxes have to fetch the experts of a box that is removed
REMOVED_S = 60.0  # within which it is removed, or stays


class LocalServices(Protocol):
    """This box's engine and requests, as the control plane drives them."""

    def load(self) -> Heartbeat:
        """Returns a beat that states the engine's load; the control plane fills in the other fields."""

    def report(self) -> BoxReport | None:
        """Returns the report for the leader; None while there is no engine."""

    def on_members_changed(self) -> None:
        """Acts on a change of members or of their engines."""

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        """Stores the load that another box states."""

    def follow_plan(self, plan: PlacementPlan) -> None:
        """Follows this plan from now on."""

    def on_grant(self, grant: RequestGrant) -> None:
        """Submits an offered request to the engine that the leader names. May be called during the offer itself."""

    async def hand_over(self) -> None:
        """Gives this box's experts to the others, and returns when they have them."""

    def check_room(self) -> None:
        """Raises PeerBusy if our engine takes no more requests of other fronts."""

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        """Answers messages about requests, snapshots and stores; refuses others. Raises PeerError, WireError."""

    async def next_part(self, question: Question[ControlMessage], asked: HttpPartQuery) -> Answer[ControlMessage]:
        """Waits for the next part of the answer to a forwarded HTTP request. Raises PeerRefused."""


class NoServices:
    """The services of a witness, which has no engine."""

    def load(self) -> Heartbeat:
        return Heartbeat()

    def report(self) -> BoxReport | None:
        return None

    def on_members_changed(self) -> None:
        return None

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        return None

    def follow_plan(self, plan: PlacementPlan) -> None:
        return None

    def on_grant(self, grant: RequestGrant) -> None:
        return None

    async def hand_over(self) -> None:
        return None

    def check_room(self) -> None:
        raise PeerRefused("no requests are served here")

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        raise PeerRefused("no requests are served here")

    async def next_part(self, question: Question[ControlMessage], asked: HttpPartQuery) -> Answer[ControlMessage]:
        raise PeerRefused("no requests are served here")


class ControlPlane:
    """Connects one box to the others. Made on the front's event loop; call `leave` before `run` is cancelled."""

    def __init__(
        self,
        settings: ClusterSettings,
        boot: str,
        secret: Secret,
        peers: Mapping[str, Peer],
        announcement: Announce,
        clock: Callable[[], float] = since_boot,
        local: LocalServices | None = None,
    ) -> None:
        """Reads plan and epoch; `peers` is this box's list, perhaps with itself. Raises ConfigError, ServiceError."""
        directory = Path(settings.state_dir)
        make_folder(directory, 0o700)
        plans = PlanStore(directory / "plan")
        fence = EpochFence(directory / "epoch", plans.plan.epoch if plans.plan else 0)
        self._voters = KeptVoters(directory / "voters")
        voters = self._voters.names or voters_of(peers)
        distrusted = DistrustedBoxes(directory / "distrusted.json")
        self._roster = KeptRoster(directory / KEPT_ROSTER)
        runs = KeptRuns(directory / KEPT_RUNS)
        own_key = secret.public.decode()
        memory = BoxMemory(KeptWords(directory / KEPT_BOXES), voters, distrusted, self._roster, runs, own_key)
        self.state = ControlState(settings, peers, announcement, plans, fence, clock, memory)
        self._settings, self._local, self._plan_due = settings, local or NoServices(), asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._transport = Transport(settings.node, boot, secret, AllowList({}))
        self.channel: Channel[ControlMessage] = Channel(
            self._transport, "control", CONTROL, self._serve, ChannelSettings(heartbeat_s=0.5, aside=True)
        )
        self.exchange = PlanExchange(plans, fence, self.channel, self._local.follow_plan)
        self._announcer = BeatSender(self.state, self.channel, self._handle)
        self._reporter = ActivityReporter(self.state, self.channel, self._local.report)
        self.port_prober = PortProber(self.state, self.channel)
        self.parcels = RequestParcels(self.channel, self._local.check_room)
        own = _own_entry(settings.node, announcement.address, secret, peers.get(settings.node))
        self._solver = PlanSolver(settings)
        queue, fitting = make_queue(settings, self._solver.fit, clock)
        self.desk = RequestDesk(self.state, self.channel, queue, lambda: self.leading, self._local.on_grant, fitting)
        try:
            self._part = AgreementPart(
                settings,
                peers,
                self.state,
                lambda: EtcdMember(settings, self.state, self.channel, own.address, self._announce_etcd),
                self._make_leader,
                lambda: self._announce_etcd(None),
            )
        except ConfigError:
            self.channel.close()
            self._transport.close()
            raise
        self.changes = MemberChanges(
            own, self.state, self.channel, self._part, self._follow_roster, self._transport.allowed
        )
        self.channel.on_up, self.channel.on_down, self.channel.on_foreign = self._on_up, self._on_down, self._on_foreign
        self._perform(self.state.start())
        self._is_stopping = False
        self._list_fault = ""
        self._check_list(peers)

    def _make_leader(self, store: CoordStore) -> LeaderTasks:
        return LeaderTasks(
            self._settings,
            store,
            self.state,
            self.exchange,
            self._solver,
            send_beat=self.send_beat,
            make_report=self._local.report,
        )

    # --- for the front ----------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Opens the channel at `cluster.listen`. Raises PeerRefused if the address cannot be bound."""
        host, _, port = self._settings.listen.rpartition(":")
        self.channel.bind(host.strip("[]"), int(port))

    async def run(self) -> None:
        """Runs the box's part in the cluster until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                senders = [
                    self._announcer.run,
                    self._announcer.reannounce,
                    self._reporter.run,
                    self._keep_beating,
                    self.desk.run,
                ]
                part = [self._part.run, self.changes.run]
                for run in [self._transport.run, self.channel.run, *senders, *part]:
                    self._group.create_task(run())
                self._group.create_task(self.exchange.run(self._plan_due, self._leader_beat))
        finally:
            await self._solver.close()
            await self._part.close()
            self._transport.close()

    def set_peers(self, peers: Mapping[str, Peer]) -> None:
        """Replaces this box's list of peers. A box that is no longer let in is cut off at once."""
        self._handle(PeersListChanged(peers))
        self._check_list(peers)

    def _check_list(self, peers: Mapping[str, Peer]) -> None:
        """Notes the fault of the voters in the list, which keeps this box from nothing else."""
        before = self._list_fault
        if self.state.roster is not None:
            self._list_fault = ""
            return
        self._list_fault = voters_fault(self._settings, peers, self._voters.names or voters_of(peers))
        if self._list_fault and self._list_fault != before:
            log.error("the voters in the list of peers", extra={"why": self._list_fault})

    def distrust(self, node: str, why: str) -> None:
        """Cuts off a box whose answers were wrong, and makes it known to the others."""
        self._handle(PeerFoundLying(node, why))

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Spawns a task that ends with `run` at the latest. An unexpected exception ends that task alone."""
        assert self._group is not None
        task = self._group.create_task(self.channel.mishaps.contain(self.state.node, work))
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before its first step
        return task

    def set_announcement(self, announcement: Announce) -> None:
        """Announces this to the others from now on."""
        self._handle(AnnouncementChanged(announcement))

    async def leave(self, still: bool = False) -> None:
        """Resigns from leadership and announces that this box leaves; `still` if its engine serves on for now."""
        engine = self.announcement.engine if still else None
        self._is_stopping = True
        self.set_announcement(msgspec.structs.replace(self.announcement, leaving=True, engine=engine))
        if self._leader is not None:
            await self._leader.resign()
        await asyncio.gather(*map(self._announcer.announce_to, self.state.members.alive()))

    @property
    def announcement(self) -> Announce:
        """This box's announcement."""
        return self.state.announcement

    @property
    def leader(self) -> str:
        """The node that this box follows, perhaps its own; "" while there is no leader."""
        return self.state.leader_tracker.leader

    @property
    def leading(self) -> int:
        """The epoch in which this box leads; 0 while it does not."""
        return self._leader.epoch if self._leader is not None else 0

    @property
    def key(self) -> str:
        """This box's public key."""
        return self._transport.secret.public.decode()

    @property
    def blocker(self) -> str:
        """Why there is no new plan, or no vote of this box, or the fault of its list; "" if there is none."""
        if self.state.is_removed:
            return "this box has been removed from the cluster, and serves alone; invite it to let it in again"
        fault = self._roster.fault or (self._voters.fault if self.state.roster is None else "")
        return fault or (self._leader.blocker if self._leader is not None else "") or self._list_fault

    @property
    def etcd(self) -> EtcdMember | None:
        """This box's etcd member; None if it has none."""
        return self._part.member

    @property
    def _leader(self) -> LeaderTasks | None:
        return self._part.leader

    def _announce_etcd(self, card: EtcdCard | None) -> None:
        if card != self.announcement.etcd:
            self.set_announcement(msgspec.structs.replace(self.announcement, etcd=card))

    # --- receiving --------------------------------------------------------------------------------------------

    async def _serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage] | None:
        if isinstance(question.message, JoinCluster):
            return Answer(await self.changes.on_join(question.peer, question.message))
        if question.peer not in self.state.members:
            raise PeerRefused(f"{question.peer} is no longer listed by {self.state.node}")
        message = question.message
        is_presence = isinstance(message, Heartbeat | Announce | BoxReport | PortProbeRequest)
        if not is_presence and (why := self.state.refusal_to_cut(question.peer)):
            raise PeerRefused(why)
        if isinstance(
            message, StoreLocationRequest | Welcome
        ):  # from a command beside that box's daemon, not from the daemon
            return self._local.serve(question)
        if isinstance(message, FetchParcel):
            return self.parcels.serve(question.peer, message)
        of_state = message if isinstance(message, Heartbeat | Announce | BoxReport) else None
        welcome = Welcome()
        if isinstance(message, Announce):
            asker = question.peer, question.boot, question.host
            welcome = self.state.welcome(*asker, message.address, self._transport.boot)
            if welcome.prefers:
                return Answer(welcome)
        self._handle(MessageReceived(question.peer, question.boot, of_state, question.host))
        match message:
            case EtcdJoin() if self._part.member is not None:
                return Answer(await self._part.member.on_join(question.peer))
            case MemberChange():
                return Answer(await self.changes.decide(message, question.peer))
            case HandOver() if question.peer in self.state.voters:
                await self._hand_over()
                return Answer(Welcome())
            case RequestOffer():
                return Answer(self.desk.on_offer(question.peer, message))
            case LoadReport():
                self.desk.on_engine_status(question.peer, message)
            case OfferWithdrawal():
                self.desk.on_withdrawal(question.peer, message)
            case RequestGrant() if question.peer == self.leader:
                self._local.on_grant(message)
            case Heartbeat() | BoxReport() | RequestGrant():
                return None
            case Announce():
                return Answer(welcome)
            case PlanRequest(digest=digest):
                return Answer(PlanReply(), [memoryview(self.state.plans.bytes_of(digest))])
            case PortProbeRequest():
                return Answer(await self.port_prober.answer(question.peer))
            case ForwardedFrame(parcel=Parcel() as parcel) | ForwardedHttp(parcel=Parcel() as parcel):
                return self._local.serve(await self.parcels.fetch(question, parcel))
            case ForwardedFrame() | ForwardedEmissions() | LostRequestsQuery() | SnapshotRequest():
                return self._local.serve(question)
            case ForwardedHttp() | HttpWithdrawal():
                return self._local.serve(question)
            case HttpPartQuery():
                return await self._local.next_part(question, message)
            case _:
                raise PeerRefused("not a question")
        return None

    async def _hand_over(self) -> None:
        """Gives this box's experts to the others, because it will be removed; stays unless that comes about."""
        self.set_announcement(msgspec.structs.replace(self.announcement, leaving=True))
        self.spawn(self._stay_unless_removed())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                await self._local.hand_over()

    async def _stay_unless_removed(self) -> None:
        await asyncio.sleep(REMOVED_S)
        if not self._is_stopping:
            self.set_announcement(msgspec.structs.replace(self.announcement, leaving=False))

    def _follow_roster(self, roster: Roster) -> None:
        self._handle(RosterAgreed(roster))

    def _on_up(self, node: str) -> None:
        self._handle(ConnectionOpened(node))

    def _on_down(self, node: str) -> None:
        self._handle(ConnectionLost(node))

    def _on_foreign(self, node: str, why: str) -> None:
        self._handle(PeerFoundIncompatible(node, why))

    def _handle(self, event: Event) -> None:
        self._perform(self.state.handle(event))
        self._part.follow_roster()
        self._announcer.wake()

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        """Performs instructions. Raises PeerRefused for RefuseMessage."""
        for instruction in instructions:
            match instruction:
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
                    self._plan_due.set()
                case PublishMembers():
                    self._plan_due.set()
                    self._local.on_members_changed()
                    self.desk.on_time()
                case RefuseMessage(why):
                    raise PeerRefused(why)

    # --- sending ----------------------------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        while True:
            with self.channel.mishaps.contained(self.state.node):
                self._handle(TimerFired())
                self.desk.on_time()
                self._keep_voters()
                self.send_beat()
            await asyncio.sleep(until_tick(BEAT_S))

    def _keep_voters(self) -> None:
        """Keeps the voters once their agreement has begun. Raises CoordUnavailable if the disk fails."""
        is_begun = self.state.fence.highest and self.state.voters and self.state.roster is None
        if is_begun and not self._voters.names and not self._voters.fault:
            self._voters.keep(self.state.voters)

    def send_beat(self) -> None:
        """Sends a beat to all other boxes."""
        may_name = self._leader is None or not self.leading or self._leader.follows_agreed_plan
        ref = self.state.plans.ref if may_name else None
        self._announcer.send_beats(self._local.load(), self.leading, self.state.fence.highest, ref)

    def _leader_beat(self) -> tuple[str, Heartbeat] | None:
        leader, members = self.leader, self.state.members
        return (leader, members[leader].beat) if leader in members else None


def _own_entry(node: str, address: str, secret: Secret, listed: Peer | None) -> Peer:
    """Returns this box's own entry, by its key and address, and by the list's if that names it."""
    key = secret.public.decode()
    other = next((each for each in listed.keys if each != key), "") if listed is not None else ""
    return Peer(node, address or (listed.address if listed is not None else ""), key, new_key=other)
