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
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

import msgspec

from edgemoe.cluster.control.coordination.choice import make_store
from edgemoe.cluster.control.coordination.clock import since_boot
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.coordination.fingerprint import Agreement
from edgemoe.cluster.control.coordination.raft_channel import RaftChannel
from edgemoe.cluster.control.leader import Leader
from edgemoe.cluster.control.members import BEAT_S, Member, Members
from edgemoe.cluster.control.membership import let_in, same_box, with_addresses
from edgemoe.cluster.control.plan_store import PlanStore, read_plan
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
    Tokens,
    Welcome,
)
from edgemoe.cluster.rpc.keys import Peer, Secret, check_peer
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.cluster.rpc.transport import Answer, ChannelSettings, Question, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, CoordError, EpochLeap, PeerError, PeerRefused, StaleEpoch
from edgemoe.types.placement import PlacementPlan

log = logging.getLogger(__name__)
ASK_S = 2.0
RETRY_S = 0.5
VOUCHED_S = 3600.0  # for which the word of a box that is gone still lets others in


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
        self._agreement = Agreement(settings, peers)
        self.announce = msgspec.structs.replace(announce, agreement=self._agreement.said)
        self.model = announce.engine.model if announce.engine else ""  # digest; of the last engine, where there is none
        self.load: Callable[[], Beat] = Beat  # how busy this box is; a beat's other fields are filled in here
        self.leader = ""  # whom this box obeys
        self._obeyed = 0  # in which epoch it obeyed last
        self._serial = 1  # of the announcement
        self._news = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self.stale = 0  # leaders of an epoch that is over, not obeyed
        self.unentitled = 0  # beats of boxes that lead though they may not, not obeyed
        self.on_change: Callable[[], None] = lambda: None  # members or their engines
        self.on_beat: Callable[[str, Beat], None] = lambda _node, _beat: None
        self.on_plan: Callable[[PlacementPlan], None] = lambda _: None
        self.on_request: Callable[[Question[ControlMessage]], Answer[ControlMessage]] = _refuse
        self._say = SparingLog(log)
        self._listed = dict(peers)
        self._lapsed: frozenset[str] = frozenset()
        self._transport = Transport(self.node, boot, secret, AllowList({}))
        self.channel: Channel[ControlMessage] = Channel(
            self._transport, "control", CONTROL, self._serve, ChannelSettings(heartbeat_s=0.5)
        )
        self._link = RaftChannel(self.channel, [name for name in peers if name != settings.node])
        self._leader: Leader | None = None
        try:
            store = make_store(settings, peers, self.fence, self._link, clock)
        except ConfigError:
            self.channel.close()
            self._transport.close()
            raise
        if store is not None:
            self._leader = Leader(settings, store, self, electable=announce.role == "box")
        self.channel.on_up, self.channel.on_down, self.channel.on_foreign = self._up, self._down, self._refuse
        self._let_in()

    # --- what the front calls ---------------------------------------------------------------------------------

    def listen(self) -> None:
        """Opens the channel. Raises PeerRefused where the address cannot be had."""
        host, _, port = self.settings.listen.rpartition(":")
        self.channel.bind(host.strip("[]"), int(port))

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for work in (self._transport.run(), self.channel.run(), self._beat_on(), self._tell(), self._follow()):
                    self._group.create_task(work)
                if self._leader is not None:
                    self._group.create_task(self._leader.run())
        finally:
            if self._leader is not None:
                await self._leader.close()
            self._transport.close()

    def list(self, peers: Mapping[str, Peer]) -> None:
        """From now on these are the boxes that are listed; who is no longer let in is cut off at once."""
        self._listed = dict(peers)
        self._let_in()
        self.on_change()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task that lives as long as `run`, at most."""
        assert self._group is not None
        return self._group.create_task(work)

    def say(self, announce: Announce) -> None:
        """From now on the box is this."""
        if announce != self.announce:
            self.announce = announce
            self.model = announce.engine.model if announce.engine else self.model
            self._serial += 1
            self._news.set()

    async def leave(self, still: bool = False) -> None:
        """Gives leadership back and tells everybody that this box goes; `still` while its engine still serves them."""
        engine = self.announce.engine if still else None
        self.say(msgspec.structs.replace(self.announce, leaving=True, engine=engine))
        if self._leader is not None:
            await self._leader.resign()
        told = [self._introduce(member) for member in self.members if self.members.is_alive(member.peer.node)]
        await asyncio.gather(*told)

    @property
    def leading(self) -> int:
        """The epoch in which this box leads; 0 while it does not."""
        return self._leader.epoch if self._leader is not None else 0

    @property
    def trouble(self) -> str:
        """Why there is no new plan, as far as this box leads."""
        return self._leader.trouble if self._leader is not None else ""

    @property
    def agreed(self) -> tuple[int, str] | None:
        """Entries of the embedded agreement that were applied here, and their state's digest; None without one."""
        return self._leader.agreed if self._leader is not None else None

    @property
    def epoch(self) -> int:
        """The highest that this box has seen."""
        return self.fence.highest

    # --- who is let in ----------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        self._lapsed = self._lapsed_vouchers()
        vouched = [
            (m.peer.node, m.card.listed) for m in self.members if m.card is not None and m.peer.node not in self._lapsed
        ]
        wanted = let_in(self.node, self._listed, vouched, joining=bool(self.settings.join))
        for node in [m.peer.node for m in self.members if not same_box(wanted.get(m.peer.node), m.peer)]:
            self._say(logging.INFO, "box is no longer listed as it was", node)
            self._transport.allowed.revoke(node)
            self.channel.disconnect(node)
            self.members.remove(node)
            self.leader = "" if self.leader == node else self.leader
        for node, peer in wanted.items():
            if node not in self.members:
                self.members.add(peer)
            elif self.members[node].peer == peer:
                continue
            member = self.members[node]
            member.peer = peer
            self._transport.allowed.allow(node, *peer.keys)
            if address := peer.address or (member.card.address if member.card else ""):
                self.channel.connect(msgspec.structs.replace(peer, address=address))
        said = {m.peer.node: m.card.address for m in self.members if m.card is not None}
        self.say(msgspec.structs.replace(self.announce, listed=with_addresses(self._listed, said)))

    def _lapsed_vouchers(self) -> frozenset[str]:
        """Who has been gone for so long that its word for others counts no more; who joined by it keeps to it."""
        if self.settings.join:
            return frozenset()
        members = self.members
        return frozenset(m.peer.node for m in members if m.card and members.absent_s(m.peer.node) > VOUCHED_S)

    # --- hearing ----------------------------------------------------------------------------------------------

    async def _serve(self, question: Question[ControlMessage]) -> Answer[ControlMessage] | None:
        if question.peer not in self.members:
            raise PeerRefused(f"{question.peer} is no longer listed by {self.node}")
        member, message = self.members[question.peer], question.message
        if member.boot != question.boot:
            member.boot, member.told = question.boot, 0
        match message:
            case RaftPayload():
                self._link.deliver(question.peer, message)
            case Beat():
                self._hear_beat(member, message)
            case Announce():
                self._meet(member, message)
                return Answer(Welcome())
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
            member.told = 0
        if member.gone_s != float("inf"):
            self._watch()
        if self._obeys(member, before):
            if (node, beat.leading) != (self.leader, self._obeyed):
                log.info("leader", extra={"node": node, "epoch": beat.leading})
            self.leader, self._obeyed = node, beat.leading
        elif self.leader == node:
            self.leader = ""

    def _obeys(self, member: Member, before: Beat) -> bool:
        """Whether that box leads, by its beat, and may."""
        node, beat = member.peer.node, member.beat
        if member.refused or member.card is None or member.card_boot != member.boot:
            return False
        try:
            if beat.seen > self.fence.highest:
                self.fence.admit(beat.seen)
            if not beat.leading:
                return False
            if not self._agreement.lets_lead(node, member.card.agreement):
                self.unentitled += 1
                raise PeerRefused(f"{node} is none of those that may lead")
            self.fence.admit(beat.leading)
            return True
        except EpochLeap as error:
            self._refuse(node, str(error))
        except (CoordError, PeerRefused) as error:
            self.stale += isinstance(error, StaleEpoch)
            if before.leading != beat.leading:
                self._say(logging.WARNING, "a leader is not obeyed", node, why=str(error))
        return False

    def _meet(self, member: Member, card: Announce) -> None:
        """Takes note of what a box says of itself.

        Raises PeerRefused for one that serves another model, ConfigError for an address that cannot be one.
        """
        theirs = card.engine.model if card.engine else ""
        was_card, was = member.card, member.refused
        if not member.peer.address and card.address != (was_card.address if was_card else ""):
            with_address = msgspec.structs.replace(member.peer, address=card.address)
            check_peer(with_address, f"what {member.peer.node} says of itself")
            self.channel.connect(with_address)
        member.card, member.card_boot, member.refused = card, member.boot, ""
        if member.peer.node in self._listed:
            self._agreement.follow(card.agreement)
        if card.listed != (was_card.listed if was_card else ()) or not member.peer.address:
            self._let_in()
        member.refused = self._agreement.objection(member.peer.node, card.agreement)
        if not member.refused and self.model and theirs and self.model != theirs:
            member.refused = (
                f"{member.peer.node} (release {card.release}) serves model {theirs[:12]}, {self.node} (release "
                f"{self.announce.release}) {self.model[:12]}; serve the same packed store on both"
            )
        if member.refused and was != member.refused:
            self._say(logging.ERROR, "a box cannot take part", member.peer.node, why=member.refused)
        self._changed()
        if member.refused:
            raise PeerRefused(member.refused)

    def _up(self, node: str) -> None:
        member = self.members[node]
        member.up, member.told = True, 0
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
        if self._lapsed_vouchers() != self._lapsed:
            self._let_in()
        for node in self.members.watch():
            alive = self.members.is_alive(node)
            self._say(logging.INFO, "box is here" if alive else "box is gone", node)
            if not alive and self.leader == node:
                self.leader = ""
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
        beat = msgspec.structs.replace(
            self.load(),
            leading=leading,
            seen=self.fence.highest,
            plan_version=ref.version if ref else 0,
            plan_digest=ref.digest if ref else "",
        )
        for member in self.members:
            self.channel.tell(member.peer.node, msgspec.structs.replace(beat, unmet=member.card is None))

    async def _tell(self) -> None:
        """Announces this box to whoever has not heard the latest."""
        while True:
            late = [m for m in self.members if m.up and m.told != self._serial]
            if late:
                await asyncio.gather(*(self._introduce(member) for member in late))
            await asyncio.sleep(RETRY_S if any(m.up and m.told != self._serial for m in self.members) else BEAT_S / 4)

    async def _introduce(self, member: Member) -> None:
        serial = self._serial
        try:
            await self.channel.ask(member.peer.node, self.announce, timeout_s=ASK_S)
        except PeerRefused as error:
            if member.refused != str(error):
                self._say(logging.ERROR, "a box refuses us", member.peer.node, why=str(error))
            member.refused = str(error)
            member.told = serial
        except PeerError as error:
            log.debug("announcement not delivered", extra={"peer": member.peer.node, "why": str(error)})
        else:
            member.told = serial

    # --- following --------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Fetches the plan that the leader names, whenever it is not the one held."""
        while True:
            await self._wait_news(BEAT_S)
            leader = self.leader
            if leader not in self.members:
                continue
            named = self.members[leader].beat
            held = self.plans.ref.digest if self.plans.ref else ""
            if not named.plan_digest or named.plan_digest == held:
                continue
            try:
                plan, data = await self.fetch(leader, named.plan_digest)
                self.adopt(plan, named.leading, data)
            except PeerError as error:
                self._say(logging.WARNING, "the leader's plan cannot be had", leader, why=str(error))
                await asyncio.sleep(RETRY_S)

    async def fetch(self, node: str, digest: str) -> tuple[PlacementPlan, bytes]:
        """The plan of that digest from that box, and the bytes that it is of. Raises PeerError."""
        answer = await self.channel.ask(node, GetPlan(digest), timeout_s=ASK_S)
        if not isinstance(answer.message, PlanIs) or len(answer.tensors) != 1:
            raise PeerRefused(f"{node} answered with something else than a plan")
        data = bytes(answer.tensors[0])
        return read_plan(data, digest), data

    def adopt(self, plan: PlacementPlan, epoch: int, data: bytes = b"") -> None:
        """Goes by the plan of a leader of this epoch; `data` is what it was read from, where it was received.

        Raises PeerRefused for a plan of a later epoch, one of a deposed leader, and one older than what is held.
        """
        if not plan.epoch <= epoch or epoch < self.fence.highest:
            raise PeerRefused(
                f"plan {plan.version} of epoch {plan.epoch} came in epoch {epoch}; the highest seen is "
                f"{self.fence.highest}"
            )
        if self.plans.is_newer_than(plan):
            raise PeerRefused(f"plan {plan.version} of epoch {plan.epoch} is older than the one held")
        self.plans.adopt(plan, data)
        assert self.plans.ref is not None
        told = {"version": plan.version, "epoch": plan.epoch, "digest": self.plans.ref.digest, "leading": epoch}
        log.info("plan", extra=told | {"nodes": ",".join(plan.nodes)})
        self.on_plan(plan)

    async def _wait_news(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        self._news.clear()


def _refuse(question: Question[ControlMessage]) -> Answer[ControlMessage]:
    raise PeerRefused("no requests are served here")
