"""The front among other boxes' fronts: tells them of its engine, and its engine of them."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import msgspec

from edgemoe import __version__
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.coordination.coord_store import wait_event
from edgemoe.cluster.control.messages import (
    Announce,
    BoxReport,
    ControlMessage,
    ForwardedEmissions,
    ForwardedFrame,
    FrameAccepted,
    Heartbeat,
    LostRequestsQuery,
    LostRequestsReply,
    RequestGrant,
    StoreLocationRequest,
)
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.settings import Settings
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.front import cluster_status as about
from edgemoe.front.cluster_requests import ClusterRequests
from edgemoe.front.cluster_snapshots import ClusterSnapshots
from edgemoe.front.engine_tracker import EngineTracker, is_handed_over
from edgemoe.front.hosted_requests import HostedRequests, RequestNews
from edgemoe.front.peers_list import address_of, follow_list, listed
from edgemoe.front.prompt_hints import PrefixKeys
from edgemoe.front.request_events import EnginesChanged
from edgemoe.front.request_router import RequestRouter
from edgemoe.ipc.messages import (
    Cancel,
    ChannelsOpened,
    Emissions,
    ExpertActivity,
    ExpertDemandReport,
    FetchPrefixKV,
    HeldExperts,
    LastChunkStarted,
    PeerLinkMeasured,
    PeerList,
    Plan,
    PrefixKVFetched,
    PrefixSignatureReply,
    PromptSignature,
    SnapshotRequest,
    Submit,
    ToCluster,
    decode_from_engine,
    decode_to_engine,
)
from edgemoe.telemetry.probes import probe_machine
from edgemoe.types.placement import PlacementPlan
from edgemoe.types.request import Emission

LOOK_S = 1.0  # at most, between looks at what others have


class ClusterFront:
    """Made on the front's event loop. `run` until cancelled, after `leave`."""

    def __init__(self, whole: Settings, requests: RequestRouter, snapshots: ClusterSnapshots) -> None:
        """Raises ConfigError, ServiceError."""
        self.settings = settings = whole.cluster
        self._router, self._connection = requests, requests.connection
        self._engine, self._store = EngineTracker(), Path(whole.model.path).name
        self._peers = PeerList()  # as our engine was told
        self._news = asyncio.Event()  # from other boxes
        self._known: set[str] = set()  # places elsewhere, as of the last look
        self.plane = ControlPlane(
            settings,
            secrets.token_hex(8),
            load_secret(Path(settings.key_file)),
            listed(settings),
            Announce(
                release=__version__,
                role="box",
                address=address_of(settings),
                devices=tuple(device.kind for device in whole.device),
                ram_bytes=probe_machine().ram_total_bytes,
                serves=settings.role,
            ),
            local=self,
        )
        self.hosted_requests = HostedRequests(self.plane.channel, self._connection.send, self.plane.spawn)
        keys = PrefixKeys(whole.engine.prefix_cache)
        self.requests = ClusterRequests(self.plane, settings.route, requests, self.hosted_requests, keys)
        self._snapshots = snapshots
        snapshots.join(self.plane)

    def listen(self) -> None:
        """Opens the control channel. Raises PeerRefused where the address cannot be had."""
        self.plane.listen()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.plane.run())
            group.create_task(follow_list(self.settings, self.plane))
            group.create_task(self.requests.check())
            group.create_task(self.requests.run())

    async def hand_over(self) -> None:
        """Tells the others that this box is about to go, and waits until they have every expert that it has."""
        await self.plane.leave(still=True)
        while not is_handed_over(self.plane):
            await wait_event(self._news, LOOK_S)

    async def leave(self) -> None:
        """Tells the others that this box goes."""
        await self.plane.leave()

    # --- our engine -------------------------------------------------------------------------------------------

    def hear(self, boot: str, message: ToCluster) -> None:
        """Takes what our engine says of itself and its links."""
        match message:
            case ChannelsOpened():
                self._engine.listens(boot, message)
                self._peers = PeerList()
                self._tell_peers()
                if self.plane.state.plans.plan is not None:
                    self.follow_plan(self.plane.state.plans.plan)
            case HeldExperts():
                self._engine.holds = message
                self._announce()
            case PeerLinkMeasured():
                self._engine.seen[message.node] = message
            case ExpertActivity():
                self._engine.activity = message
            case ExpertDemandReport():
                self.requests.reporter.on_choosing(message)
            case LastChunkStarted() | PrefixKVFetched() | PromptSignature() | PrefixSignatureReply():
                self._pass_on(message)

    def engine_changed(self) -> None:
        """It takes requests now, or no longer; what one that has ended held is held no more."""
        if self._connection.place != self._engine.boot:
            self._engine.ended()
            self.requests.meter.forget(engine=True)
            self.hosted_requests.engine_ended()
            self._announce()
        self.plane.send_beat()

    # --- requests ---------------------------------------------------------------------------------------------

    def take(self, items: list[Emission]) -> list[Emission]:
        """Passes on what our engine emits for other boxes; returns the rest."""
        if any(one.finish for one in items):
            self.requests.reporter.on_work_changed()
        return self.hosted_requests.take(items)

    def on_grant(self, grant: RequestGrant) -> None:
        """Takes the leader's word about a request that was offered."""
        asyncio.get_running_loop().call_soon(self.requests.on_grant, grant)  # not within another request's offer

    def _host(self, question: Question[ControlMessage], submit: Submit, offer: int) -> Answer[ControlMessage]:
        self.check_room()
        self.hosted_requests.submit(question.peer, question.boot, submit)
        self.requests.meter.note(submit, (question.peer, offer) if offer else None)
        self.requests.reporter.on_work_changed()
        return Answer(FrameAccepted())

    def load(self) -> Heartbeat:
        """Returns what our beats say of how busy this box is."""
        self._router.handle(EnginesChanged())  # what was turned away everywhere is routed again
        self.requests.reporter.on_beat()
        load = self._router.machine.own_load()
        secret = self.requests.keys.secret if self.plane.leading else b""
        if load is None or self.requests.is_going:
            return Heartbeat(secret=secret)
        return Heartbeat(
            engine=load.place, requests=load.requests, slots=load.slots, capacity=load.capacity, secret=secret
        )

    def _pass_on(self, message: RequestNews) -> None:
        """Acts on what our engine says of a request, or passes it on to the front whose it is."""
        if not self.hosted_requests.tell(message):
            self.requests.on_news(message)

    def metrics(self) -> dict[str, float]:
        """Numbers for /metrics by their final names."""
        return about.metrics(self.plane, self._router.machine, self.hosted_requests, self.requests.forecast)

    def describe(self) -> dict[str, Any]:
        """Members, leader, epoch and plan, for /health."""
        return about.describe(self.plane, self._engine.seen, self._router.machine.own_load())

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        """Answers what another front has for our engine, or its engine for us. Raises PeerError, WireError."""
        if isinstance(question.message, SnapshotRequest):
            return Answer(self._snapshots.answer())
        if isinstance(question.message, StoreLocationRequest):
            return Answer(self._engine.store_at(self._store, shared=self.settings.share_experts))
        if isinstance(question.message, LostRequestsQuery):
            if question.message.engine != self._connection.place:
                raise PeerRefused("that engine is no more")
            missing = self.hosted_requests.missing(question.peer, question.boot, question.message.requests)
            return Answer(LostRequestsReply(missing))
        if len(question.tensors) != 1:
            raise PeerRefused("a message without its frame")
        if isinstance(question.message, ForwardedFrame) and question.message.model != self.plane.state.model:
            raise PeerRefused(f"another model is served here: {self.plane.state.model[:12]}")
        if isinstance(question.message, ForwardedEmissions):
            match decode_from_engine(question.tensors[0]):
                case Emissions(items=items):
                    return Answer(self.requests.on_tokens(question.peer, items))
                case LastChunkStarted() | PrefixKVFetched() | PromptSignature() as news:
                    self.requests.on_news(news, question.peer)
                    return Answer(FrameAccepted())
        else:
            match decode_to_engine(question.tensors[0]):
                case Submit() as submit:
                    assert isinstance(question.message, ForwardedFrame)
                    return self._host(question, submit, question.message.offer)
                case FetchPrefixKV() as pull:
                    self.check_room()
                    self.hosted_requests.pull(question.peer, question.boot, pull)
                    return Answer(FrameAccepted())
                case Cancel() as cancel:
                    self.hosted_requests.cancel(question.peer, question.boot, cancel.request, cancel.attempt)
                    return Answer(FrameAccepted())
        raise PeerRefused("a frame of another kind")

    def check_room(self) -> None:
        """Raises PeerBusy where our engine takes no request of another front."""
        load = self._router.machine.own_load()
        if load is None or load.requests >= load.capacity or self._router.draining:
            raise PeerBusy("there is no room for another request here")

    # --- the others -------------------------------------------------------------------------------------------

    def on_members_changed(self) -> None:
        """Acts on what has changed, or may have, about members or their engines."""
        self._news.set()
        self._tell_peers()
        boots = {member.peer.node: member.boot for member in self.plane.state.members}
        self.hosted_requests.keep(boots)
        self._engine.keep_links(boots)
        if (places := set(self.requests.others())) != self._known:
            self._known = places
            self._router.handle(EnginesChanged())

    def _announce(self) -> None:
        engine = self._engine.card(self.settings.share_experts)
        self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=engine))

    def _tell_peers(self) -> None:
        if self._engine.listening is None or not self.settings.share_experts:
            return
        peers = PeerList(keys=self.plane.state.members.keys(), engines=self.plane.state.members.engines())
        if peers != self._peers and self._connection.tell(peers):
            self._peers = peers

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        """Takes note of how another box says that it is."""
        self.requests.on_beat(node, beat)
        if beat.secret and node == self.plane.leader and beat.secret != self.requests.keys.secret:
            self.requests.keys.secret = beat.secret
            self.requests.meter.forget()

    def report(self) -> BoxReport | None:
        """Returns what the leader is told; None until our engine has said what its requests choose."""
        return self._engine.report()

    def follow_plan(self, plan: PlacementPlan) -> None:
        """Has our engine go by this plan."""
        listening = self._engine.listening
        if listening is not None and self.settings.share_experts and plan.model == listening.model.digest:
            ref = self.plane.state.plans.ref
            self._connection.tell(Plan(plan=plan, digest=ref.digest if ref is not None else ""))
