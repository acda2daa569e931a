"""Connects this front with other boxes: its engine's state goes to them, and theirs to its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgemoe import __version__
from edgemoe.api.resources import ListedModel
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.coordination.coord_store import wait_event
from edgemoe.cluster.control.messages import (
    Announce,
    BoxReport,
    ControlMessage,
    ForwardedEmissions,
    ForwardedFrame,
    ForwardedHttp,
    FrameAccepted,
    Heartbeat,
    HttpPartQuery,
    HttpWithdrawal,
    LostRequestsQuery,
    LostRequestsReply,
    MemberChange,
    RequestGrant,
    StoreLocationRequest,
)
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import load_secret, make_secret
from edgemoe.config.settings import Settings
from edgemoe.durable import replace_file
from edgemoe.errors import MembersRefused, PeerBusy, PeerError, PeerRefused
from edgemoe.front import cluster_status as about
from edgemoe.front.cluster_requests import ClusterRequests
from edgemoe.front.cluster_snapshots import ClusterSnapshots
from edgemoe.front.distant_models import DistantModels, further_model
from edgemoe.front.engine_tracker import LocalEngine, is_handed_over
from edgemoe.front.hosted_http import HostedHttp
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
    PeerCutOff,
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
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.probes import probe_machine
from edgemoe.types.bounds import MAX_NODES
from edgemoe.types.placement import PlacementPlan
from edgemoe.types.request import Emission

log = logging.getLogger(__name__)
LOOK_S = 1.0  # at most, between checks whether the others hold all experts
READ_S = 2.0  # that other boxes have at the end to read the answers to their requests


class ClusterFront:
    """This box as a member of the cluster. `leave` before `run` is cancelled."""

    def __init__(self, whole: Settings, requests: RequestRouter, snapshots: ClusterSnapshots) -> None:
        """Raises ConfigError for contradicting settings, ServiceError for files that cannot be written."""
        self.settings = settings = whole.cluster
        self._router, self._connection = requests, requests.connection
        self._engine, self._store = LocalEngine(), Path(whole.model.path).name
        self._peers = PeerList()  # as last sent to the engine
        self._news = asyncio.Event()  # from other boxes
        self._known: set[str] = set()  # engines of other boxes, at the last change
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
                may_leave=settings.may_leave,
            ),
            local=self,
        )
        self.hosted_requests = HostedRequests(self.plane.channel, self._connection.send, self.plane.spawn)
        self.hosted_http, self.distant = HostedHttp(self.plane.spawn), DistantModels(self.plane)
        keys = PrefixKeys(whole.engine.prefix_cache)
        self.requests = ClusterRequests(self.plane, settings.route, requests, self.hosted_requests, keys)
        self._snapshots = snapshots
        snapshots.join(self.plane)

    def listen(self) -> None:
        """Opens the control channel. Raises PeerRefused if the address is taken."""
        self.plane.listen()

    async def run(self) -> None:
        """Runs the control plane and the checks of forwarded requests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.plane.run())
            group.create_task(follow_list(self.settings, self.plane))
            group.create_task(self.requests.check())
            group.create_task(self.requests.run())
            group.create_task(self.hosted_http.run())

    async def leave_experts(self) -> None:
        """Announces that this box will leave, and waits until the others hold all its experts."""
        await self.plane.leave(still=True)
        await self.hand_over()

    async def hand_over(self) -> None:
        """Waits until the others hold all this box's experts."""
        while not is_handed_over(self.plane):
            await wait_event(self._news, LOOK_S)

    async def leave(self) -> None:
        """Announces that this box leaves, once others have read its answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self.hosted_http.until_read()
        await self.plane.leave()

    # --- our engine -------------------------------------------------------------------------------------------

    def on_engine_message(self, boot: str, message: ToCluster) -> None:
        """Acts on the engine's messages about itself, its links and its requests."""
        match message:
            case ChannelsOpened():
                self._engine.on_channels_opened(boot, message)
                self._peers = PeerList()
                self._tell_peers()
                if self.plane.state.plans.plan is not None:
                    self.follow_plan(self.plane.state.plans.plan)
            case HeldExperts():
                self._engine.holds = message
                self._announce()
            case PeerLinkMeasured():
                self._engine.seen[message.node] = message
            case PeerCutOff():
                self.plane.distrust(message.node, message.why)
            case ExpertActivity():
                self._engine.activity = message
            case ExpertDemandReport():
                self.requests.reporter.on_choosing(message)
            case LastChunkStarted() | PrefixKVFetched() | PromptSignature() | PrefixSignatureReply():
                self._pass_on(message)

    def on_engine_changed(self) -> None:
        """Announces that the engine takes requests now, or has ended and holds nothing any more."""
        if self._connection.boot != self._engine.boot:
            self._engine.on_engine_ended()
            self.requests.meter.forget(engine=True)
            self.hosted_requests.on_engine_ended()
            self._announce()
        self.plane.send_beat()

    # --- requests ---------------------------------------------------------------------------------------------

    def pass_on_emissions(self, items: list[Emission]) -> list[Emission]:
        """Passes on the engine's emissions for other boxes; returns this front's."""
        if any(one.finish for one in items):
            self.requests.reporter.on_work_changed()
        return self.hosted_requests.pass_on_emissions(items)

    def on_grant(self, grant: RequestGrant) -> None:
        """Follows the leader's decision on an offered request, soon."""
        asyncio.get_running_loop().call_soon(self.requests.on_grant, grant)  # not within another request's offer

    def _host(self, question: Question[ControlMessage], submit: Submit, offer: int) -> Answer[ControlMessage]:
        self.check_room()
        self.hosted_requests.submit(question.peer, question.boot, submit)
        self.requests.meter.note(submit, (question.peer, offer) if offer else None)
        self.requests.reporter.on_work_changed()
        return Answer(FrameAccepted())

    def load(self) -> Heartbeat:
        """Returns the load that this box's heartbeats carry."""
        self._router.handle(EnginesChanged())  # routes requests again that all engines rejected
        self.requests.reporter.on_beat()
        step_s = self.requests.look_at_pace()
        load = self._router.machine.own_load()
        secret = self.requests.keys.secret if self.plane.leading else b""
        if load is None or self.requests.is_going:
            return Heartbeat(secret=secret)
        return Heartbeat(
            engine=load.place,
            requests=load.requests,
            slots=load.slots,
            capacity=load.capacity,
            secret=secret,
            still=self._connection.stands_still,
            step_s=step_s,
        )

    def _pass_on(self, message: RequestNews) -> None:
        """Passes news of a request to the front that owns it, this one or another."""
        if not self.hosted_requests.pass_on_news(message):
            self.requests.on_news(message)

    def metrics(self) -> dict[str, float]:
        """Returns the cluster's metrics by their final names."""
        own = {names.FORWARDED_HTTP: self.distant.forwarded, names.HOSTED_HTTP: self.hosted_http.served}
        return own | about.metrics(self.plane, self._router.machine, self.hosted_requests, self.requests.forecast)

    def describe(self) -> dict[str, Any]:
        """Returns members, leader, epoch and plan, for /health."""
        found = about.describe(self.plane, self._engine.seen, self._router.machine.own_load())
        engine = self._router.connection.engine
        stats = engine.stats.values if engine is not None else {}
        return found | {"stages": about.list_stages(self.settings.stages, found["members"], stats)}

    async def list_members(self) -> dict[str, Any]:
        """Returns the boxes of the cluster, with their votes."""
        try:
            voting = (await self.plane.changes.command(MemberChange("voting"))).said.split()
        except PeerError as error:
            log.debug("no voter says who votes", extra={"why": str(error)})
            voting = None
        return about.list_members(self.plane, voting)

    async def change_members(self, verb: str, node: str, *, dead: bool, hours: float) -> str:
        """Returns a message about the change, or the token of an invitation. Raises MembersRefused."""
        try:
            if verb == "recover":
                return await self.plane.changes.recover()
            if verb == "replace-key":
                return await self._replace_key(Path(self.settings.key_file))
            change = msgspec.convert({"verb": verb, "node": node, "dead": dead}, MemberChange)
            if change.verb == "invite":
                return await self.plane.changes.invite(node, hours)
            return (await self.plane.changes.command(change)).said
        except (PeerError, msgspec.ValidationError, OSError) as error:
            raise MembersRefused(str(error)) from error

    async def _replace_key(self, file: Path) -> str:
        """Gives this box another key, which it uses after a restart. Raises PeerError, OSError."""
        if not os.access(file.parent, os.W_OK):
            raise PeerRefused(f"{file} cannot be replaced there: give the key another place (cluster.key_file)")
        made = make_secret()
        said = await self.plane.changes.replace_key(made.public.decode())
        replace_file(file, made.secret + b"\n")
        return f"the new key is in {file}: restart this box to use it. {said[:1].upper()}{said[1:]}"

    def serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage]:
        """Answers another front's question or forwarded frame. Raises PeerError, WireError."""
        if isinstance(question.message, SnapshotRequest):
            return Answer(self._snapshots.own_snapshot())
        if isinstance(question.message, StoreLocationRequest):
            return Answer(self._engine.store_at(self._store, shared=self.settings.share_experts))
        if isinstance(question.message, LostRequestsQuery):
            if question.message.engine != self._connection.place:
                raise PeerRefused("that engine is no more")
            missing = self.hosted_requests.find_missing(question.peer, question.boot, question.message.requests)
            return Answer(LostRequestsReply(missing))
        if isinstance(question.message, HttpWithdrawal):
            self.hosted_http.withdraw(question.peer, question.boot, question.message.number)
            return Answer(FrameAccepted())
        if len(question.tensors) != 1:
            raise PeerRefused("a message without its frame")
        if isinstance(question.message, ForwardedHttp):
            self.hosted_http.begin(question.peer, question.boot, question.message, bytes(question.tensors[0]))
            return Answer(FrameAccepted())
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
                case FetchPrefixKV() as fetch:
                    self.check_room()
                    self.hosted_requests.fetch(question.peer, question.boot, fetch)
                    return Answer(FrameAccepted())
                case Cancel() as cancel:
                    self.hosted_requests.cancel(question.peer, question.boot, cancel.request, cancel.attempt)
                    return Answer(FrameAccepted())
        raise PeerRefused("a frame of another kind")

    async def next_part(self, question: Question[ControlMessage], asked: HttpPartQuery) -> Answer[ControlMessage]:
        """Waits for the next part of the answer to a forwarded HTTP request. Raises PeerRefused."""
        return await self.hosted_http.next_part(question.peer, question.boot, asked)

    def check_room(self) -> None:
        """Raises PeerBusy if this box has no room for another front's request."""
        load = self._router.machine.own_load()
        if load is None or load.requests >= load.capacity or self._router.draining:
            raise PeerBusy("there is no room for another request here")

    # --- the others -------------------------------------------------------------------------------------------

    def on_members_changed(self) -> None:
        """Tells the engine and the requests of members that came, went or changed their engine."""
        self._news.set()
        self._tell_peers()
        boots = {member.peer.node: member.boot for member in self.plane.state.members}
        self.hosted_requests.keep_fronts(boots)
        self._engine.keep_links(boots)
        if (places := set(self.requests.others())) != self._known:
            self._known = places
            self._router.handle(EnginesChanged())

    def _announce(self) -> None:
        engine = self._engine.description(self.settings.share_experts)
        self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, engine=engine))

    def announce_models(self, models: Sequence[ListedModel]) -> None:
        """Announces the models that this box serves beside the cluster's."""
        further = tuple(further_model(model) for model in models[:MAX_NODES])
        names = tuple(model.name for model in further)
        self.plane.set_announcement(msgspec.structs.replace(self.plane.announcement, models=names, further=further))

    def _tell_peers(self) -> None:
        if self._engine.listening is None or not self.settings.share_experts:
            return
        state = self.plane.state
        peers = PeerList(
            keys=state.members.keys(),
            engines=state.members.engines(),
            suspected=state.suspected(),
            trusted=state.members.trusted(),
        )
        if peers != self._peers and self._connection.send_control(peers):
            self._peers = peers

    def on_beat(self, node: str, beat: Heartbeat) -> None:
        """Updates another box's load, and the leader's secret."""
        self.requests.on_beat(node, beat)
        if beat.secret and node == self.plane.leader and beat.secret != self.requests.keys.secret:
            self.requests.keys.secret = beat.secret
            self.requests.meter.forget()

    def report(self) -> BoxReport | None:
        """Returns the report to the leader; None before the engine's first ExpertActivity."""
        return self._engine.report()

    def follow_plan(self, plan: PlacementPlan) -> None:
        """Sends a placement plan to the engine."""
        listening = self._engine.listening
        if listening is not None and self.settings.share_experts and plan.model == listening.model.digest:
            ref = self.plane.state.plans.ref
            self._connection.send_control(Plan(plan=plan, digest=ref.digest if ref is not None else ""))
