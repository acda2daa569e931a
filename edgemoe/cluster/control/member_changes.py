"""Changes the members of the cluster by the owner's commands, and follows the changes that the voters agree on.

A command is carried out at a voter: by this box if it is one, else by one that answers. The roster in etcd names boxes
and voters. A box that it names a voter becomes a member of etcd by itself (`etcd_member`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection

import msgspec

from edgemoe.cluster.control.agreement_part import AgreementPart
from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.coordination.coord_store import CoordStore
from edgemoe.cluster.control.coordination.election_rules import MAX_VOTERS
from edgemoe.cluster.control.etcd_member import EtcdMember
from edgemoe.cluster.control.membership import BEAT_S
from edgemoe.cluster.control.messages import ControlMessage, HandOver, JoinCluster, MemberChange, MemberChanged
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.invite_token import MAX_SEEDS, InviteToken, Seed, z85_bytes
from edgemoe.cluster.rpc.keys import AllowList, Peer, check_peer, make_secret
from edgemoe.cluster.rpc.roster import MAX_INVITED, Invitation, Roster
from edgemoe.errors import ConfigError, CoordError, CoordUnavailable, PeerBusy, PeerError, PeerRefused, RosterConflict
from edgemoe.ticking import until_tick
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
ASK_S = 55.0  # for a change, a box's hand-over included
HAND_OVER_S = 20.0
AGREE_S = 15.0  # for one change, an election of etcd's included
FAREWELL_S = 2.0
LIST_S = 5.0  # for the list of votes, while etcd starts again
NOTICED_S = 6.0  # within which the loss of a majority is noticed
LOST_S = 10.0  # without a majority, after which it may be given up
MAX_HOURS = 24 * 31  # that an invitation stands


class MemberChanges:
    """Carries out commands one at a time. Lives on one event loop."""

    def __init__(
        self,
        own: Peer,
        state: ControlState,
        channel: Channel[ControlMessage],
        part: AgreementPart,
        on_agreed: Callable[[Roster], None],
        allowed: AllowList,
    ) -> None:
        """Calls `on_agreed` with each roster that the voters agree on; `own` is this box's entry.

        Keys of invitations are allowed while they stand.
        """
        self._allowed, self._invited = allowed, dict[str, str]()
        self._own, self._state, self._channel, self._part, self._on_agreed = own, state, channel, part, on_agreed
        self._changing = asyncio.Lock()
        self._is_parting = False  # a removed box is told so before this one cuts it off

    # --- the agreed roster ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows the agreed roster until cancelled."""
        while True:
            await asyncio.sleep(until_tick(BEAT_S))
            self._allow_invited()
            try:
                await self._follow()
                await self._take_votes_of_cut()
            except (CoordError, PeerError) as error:
                log.debug("the members could not be agreed on", extra={"why": str(error)})

    async def _follow(self) -> None:
        store, held = self._part.store, self._state.roster
        if self._is_parting or self._state.is_removed:
            return
        agreed = store.view().roster if store is not None else held
        if agreed is not None and (held is None or (agreed.cluster == held.cluster and agreed.version > held.version)):
            self._on_agreed(agreed)
        elif held is not None and (entry := held.find(self._own.node)) and self._own.key == entry.new_key:
            await self._end_old_key()
        elif (
            held is not None and agreed != held and store is not None and self._is_leading()
        ):  # etcd is new, or an old backup of it
            await store.change_roster(agreed, held)

    async def _take_votes_of_cut(self) -> None:
        """Takes the votes of boxes that are cut off, where this box leads or follows no leader. Raises PeerError."""
        if self._state.roster is None or not (self._is_leading() or not self._state.leader_tracker.leader):
            return
        for node in self._state.cut_voters():
            change = MemberChange("unvote", node)
            if self._can_decide(change):
                said = (await self.decide(change)).said
                log.warning("a box that is cut off has lost its vote", extra={"node": node, "voters": said})

    def _allow_invited(self) -> None:
        """Admits questions from boxes with standing invitations, and from no other strangers."""
        roster, now_s = self._state.roster, time.time()
        invited = roster.invited if roster is not None and not self._state.is_removed else ()
        standing = {each.node: each.key for each in invited if each.until_s > now_s}
        for node in self._invited.keys() - standing.keys():
            if node not in self._state.members:
                self._allowed.revoke(node)
        for node, key in standing.items():
            if self._invited.get(node) != key:
                self._allowed.allow(node, key)
        self._invited = standing

    async def _end_old_key(self) -> None:
        """Makes the key with which this box has come its only one."""
        try:
            await self.command(MemberChange("key", self._own.node, key=self._own.key))
        except PeerError as error:
            log.debug("the old key is accepted for longer", extra={"why": str(error)})

    def _is_leading(self) -> bool:
        return self._part.leader is not None and self._part.leader.epoch > 0

    # --- commands ---------------------------------------------------------------------------------------------

    async def command(self, change: MemberChange) -> MemberChanged:
        """Has a change made, here or by a voter, as soon as one can. Raises PeerError with the reason."""
        if change.verb not in ("begin", "voting"):
            self._agreed()
        ends_s = time.monotonic() + (LIST_S if change.verb == "voting" else AGREE_S)
        while True:
            try:
                return await (self.decide(change) if self._can_decide(change) else self._ask_voters(change))
            except PeerRefused:
                raise
            except PeerError as error:
                if time.monotonic() > ends_s:
                    raise
                log.debug("a change of members waits for a voter", extra={"why": str(error)})
                await asyncio.sleep(BEAT_S)

    async def _ask_voters(self, change: MemberChange) -> MemberChanged:
        """Has a change made by a voter that answers. Raises PeerError."""
        members = self._state.members
        failure = PeerError("none of the voters can be reached")
        for node in self._state.voters or [self._state.leader_tracker.leader]:
            if node == change.node or node not in members or not members.is_alive(node):
                continue
            try:
                answer = (await self._channel.ask(node, change, timeout_s=ASK_S)).message
            except PeerRefused:
                raise
            except PeerError as error:
                failure = error
                continue
            assert isinstance(answer, MemberChanged)
            return answer
        if change.verb == "remove" and change.node == self._own.node and self._state.is_removed:
            return MemberChanged(f"{change.node} is removed")  # and so cut off before the answer came
        raise PeerBusy(
            f"nothing is changed: {failure}. Voters are {', '.join(self._state.voters)}, and most of them must answer"
        )

    async def invite(self, node: str, hours: float) -> str:
        """Has a box invited. Returns the token. Raises PeerError."""
        key, until_s = make_secret(), time.time() + 3600 * min(MAX_HOURS, max(0.0, hours))
        await self.command(MemberChange("invite", node, key=key.public.decode(), until_s=until_s))
        roster = self._agreed()
        ask = sorted(roster.boxes, key=lambda box: (box.node != self._own.node, not box.voter))[:MAX_SEEDS]
        seeds = tuple(Seed(box.node, box.address, box.key) for box in ask)
        return InviteToken(roster.cluster, node, z85_bytes(key.secret), until_s, seeds).text()

    async def recover(self) -> str:
        """Goes on without the lost voters, as the only voter of a new cluster. Raises PeerError."""
        state, own = self._state, self._own.node
        if state.is_removed or (state.roster is None and own not in state.voters):
            raise PeerRefused(f"{own} is no member of a cluster whose voters are agreed")
        await self._check_lost()
        held = state.roster or Roster("", 0, self._listed([own]))
        boxes = tuple(_with_vote(box, box.node == own) for box in held.boxes if self._is_here(box.node))
        roster = Roster(secrets.token_hex(8), held.version + 1, boxes, former=held.cluster)
        if fault := roster.fault():
            raise PeerRefused(fault)
        self._on_agreed(roster)
        self._part.begin_anew()
        gone = ", ".join(sorted(box.node for box in held.boxes if roster.find(box.node) is None))
        return f"{own} goes on as cluster {roster.cluster}, the only voter" + (f"; invite {gone} again" if gone else "")

    async def _check_lost(self) -> None:
        """Returns once the voters have had no majority for long. Raises PeerRefused if they have one."""
        began_s = seen_s = time.monotonic()
        while time.monotonic() < seen_s + LOST_S:
            member = self._part.member
            if self._state.leader_tracker.leader or (member is not None and member.has_agreement):
                seen_s = time.monotonic()
                if seen_s > began_s + NOTICED_S:
                    raise PeerRefused("the voters have a majority: remove boxes that are gone by `remove NODE --dead`")
            await asyncio.sleep(BEAT_S)

    async def replace_key(self, key: str) -> str:
        """Has the boxes accept another key of this box beside the present one. Raises PeerError."""
        await self.command(MemberChange("key", self._own.node, key=key))
        ends_s = time.monotonic() + AGREE_S
        while late := self._late():
            if time.monotonic() > ends_s:
                return f"{', '.join(late)} did not confirm it, and will hear of it later"
            await asyncio.sleep(BEAT_S)
        return "every box that is here accepts it"

    def _late(self) -> list[str]:
        """Returns the boxes that are here and do not follow the present roster yet."""
        present = [member for member in self._state.members.alive() if member.announcement is not None]
        followed = {member.peer.node: member.announcement.roster for member in present if member.announcement}
        return sorted(node for node, roster in followed.items() if roster != self._state.roster)

    async def decide(self, change: MemberChange, by: str = "") -> MemberChanged:
        """Makes a change as a voter, for this box or `by` another. Raises PeerError."""
        if change.verb == "key" and (by or self._own.node) != change.node:
            raise PeerRefused("a box replaces no other box's key")
        if not self._can_decide(change):
            raise PeerBusy(f"{self._own.node} has no working vote now")
        try:
            if change.verb == "voting":
                return MemberChanged(" ".join(await self._member().voting()))
            async with self._changing:
                await _persist(self._check_written)
                if change.verb == "join":
                    return MemberChanged(roster=await self._join(change))
                return MemberChanged(await self._change(change))
        except (RosterConflict, ConfigError) as error:
            raise PeerRefused(str(error)) from error
        except CoordUnavailable as error:
            raise PeerRefused(f"the voters did not agree; look at `edgemoe cluster list`: {error}") from error

    async def _change(self, change: MemberChange) -> str:
        """Makes a change. Returns a message about it. Raises PeerError, CoordError."""
        match change.verb:
            case "vote":
                return await self._vote(change.node)
            case "unvote":
                return await self._unvote(change.node)
            case "remove":
                return await self._remove(change.node, dead=change.dead)
            case "key":
                return await self._replace_key(change.node, change.key)
            case "invite":
                return await self._invite(Invitation(change.node, change.key, change.until_s))
        return await self._begin()

    def _can_decide(self, change: MemberChange) -> bool:
        member = self._part.member
        if change.verb == "begin" and self._state.roster is None and self._part.member is None:
            return self._is_leading()  # a fixed leader
        goes = change.verb in ("unvote", "remove") and change.node == self._own.node and len(self._state.voters) > 1
        return member is not None and member.has_agreement and not goes

    def _member(self) -> EtcdMember:
        """Returns the etcd member. Raises PeerBusy where this box has none."""
        if self._part.member is None:
            raise PeerBusy(f"{self._own.node} has lost its vote meanwhile")
        return self._part.member

    def _store(self) -> CoordStore:
        """Returns the agreement. Raises PeerBusy where this box has no part in it."""
        if self._part.store is None:
            raise PeerBusy(f"{self._own.node} has lost its vote meanwhile")
        return self._part.store

    async def _begin(self) -> str:
        """Writes the boxes that are let in now as the first roster."""
        if self._state.roster is not None:
            raise PeerRefused("the members of this cluster are agreed already; see `edgemoe cluster list`")
        if self._part.kind == "etcd":
            raise PeerRefused('with coordination = "etcd", boxes go by lists; with "raft" they run etcd themselves')
        members, voters = self._state.members, self._state.voters or [self._own.node]
        others = {member.peer.node: member for member in members}
        if lost := [node for node, member in others.items() if not member.address]:
            raise PeerRefused(
                f"the address of {', '.join(lost)} is not known yet: start it, or take it out of the list"
            )
        roster = Roster(secrets.token_hex(8), 1, self._listed(voters))
        if fault := roster.fault():
            raise PeerRefused(fault)
        if self._part.member is None:  # a fixed leader becomes the only voter, and writes the roster as its leader
            self._on_agreed(roster)
        else:
            await self._commit(None, roster)
        return f"{len(roster.boxes)} boxes belong to cluster {roster.cluster}; voters are {', '.join(roster.voters)}"

    def _listed(self, voters: Collection[str]) -> tuple[Peer, ...]:
        """Returns entries of this box and of the boxes that are let in by lists."""
        own = msgspec.structs.replace(self._own, voter=self._own.node in voters)
        return own, *(
            Peer(member.peer.node, member.address, member.peer.key, member.peer.node in voters, member.peer.new_key)
            for member in self._state.members
        )

    async def _vote(self, node: str) -> str:
        roster, box = self._entry(node)
        voting = await self._member().voting()
        if box.voter:
            raise PeerRefused(f"{node} {'votes' if node in voting else 'is on the way to its vote'} already")
        if late := [each for each in roster.voters if each not in voting]:
            raise PeerRefused(f"one at a time: {', '.join(late)} has not caught up yet; or take its vote back (unvote)")
        if len(roster.voters) >= MAX_VOTERS:
            raise PeerRefused(f"{MAX_VOTERS} boxes vote at most: {', '.join(roster.voters)}")
        if not self._is_here(node):
            raise PeerRefused(f"{node} does not answer: start it first")
        await self._commit(roster, roster.with_box(_with_vote(box, True)))
        return f"{node} gets its vote when its etcd has caught up"

    async def _unvote(self, node: str) -> str:
        roster, box = self._entry(node)
        if not box.voter:
            raise PeerRefused(f"{node} has no vote")
        self._check_majority(roster, node)
        await _persist(lambda: self._member().remove_member(node))
        await self._commit(roster, roster.with_box(_with_vote(box, False)))
        return f"{node} votes no more; {_voters_text(roster, node)}"

    async def _remove(self, node: str, *, dead: bool) -> str:
        if any(each.node == node for each in self._agreed().invited):
            return await self._take_back(node)
        roster, box = self._entry(node)
        here = self._is_here(node)
        if len(roster.boxes) == 1:
            raise PeerRefused(f"{node} is the last box of the cluster")
        if here and dead:
            raise PeerRefused(f"{node} answers: remove it without --dead, so that it leaves in order")
        if not here and not dead:
            raise PeerRefused(f"{node} does not answer: start it, or say --dead if it is gone for good")
        if box.voter:
            self._check_majority(roster, node)
        if here:
            await self._hand_over(node)
        if box.voter:
            await _persist(lambda: self._member().remove_member(node))
        self._is_parting = True
        try:
            await self._commit(roster, after := roster.without(node))
            await self._say_farewell(node, after)
        finally:
            self._is_parting = False
        return f"{node} is removed{f'; {_voters_text(roster, node)}' if box.voter else ''}"

    async def _replace_key(self, node: str, key: str) -> str:
        """Adds a box's next key; makes it the only one when the box has come with it."""
        roster, box = self._entry(node)
        keys = {"key": key, "new_key": ""} if key == box.new_key else {"new_key": key}
        if key != box.key:
            after = roster.with_box(msgspec.structs.replace(box, **keys))
            if fault := after.fault():
                raise PeerRefused(fault)
            await self._commit(roster, after)
        return f"{node} has another key"

    async def _take_back(self, node: str) -> str:
        roster = self._agreed()
        await self._commit(roster, roster.next(invited=tuple(each for each in roster.invited if each.node != node)))
        return f"the invitation of {node} is taken back"

    async def _invite(self, invitation: Invitation) -> str:
        roster, node = self._agreed(), invitation.node
        check_peer(Peer(node, "host:1", invitation.key), "the invitation")
        if roster.find(node) is not None:
            raise PeerRefused(f"there is a box {node} already; remove it, or take another name")
        if len(roster.boxes) >= MAX_NODES:
            raise PeerRefused(f"{MAX_NODES} boxes belong to the cluster; more are not possible")
        standing = [each for each in roster.invited if each.node != node and each.until_s > time.time()]
        if len(standing) >= MAX_INVITED:
            raise PeerRefused(f"{MAX_INVITED} invitations stand; take one back by `edgemoe cluster remove NAME`")
        await self._commit(roster, roster.next(invited=(*standing, invitation)))
        return f"{node} is invited"

    async def _join(self, change: MemberChange) -> Roster:
        """Lets an invited box in, and ends its invitation."""
        roster = self._agreed()
        invitation = next((each for each in roster.invited if each.node == change.node), None)
        if invitation is None or invitation.until_s <= time.time():
            raise PeerRefused(f"the invitation of {change.node} is used, taken back or too old; make a new one")
        box = Peer(change.node, change.address, change.key, voter=False)
        rest = tuple(each for each in roster.invited if each.node != change.node)
        after = msgspec.structs.replace(roster.with_box(box), invited=rest)
        if not box.address or after.fault():
            raise PeerRefused(after.fault() or f"{change.node} states no address; set cluster.address there")
        await self._commit(roster, after)
        return after

    async def on_join(self, node: str, asked: JoinCluster) -> MemberChanged:
        """Answers a box that asks to belong, by its invitation, or again by its own key. Raises PeerError."""
        roster = self._state.roster
        if roster is not None and (box := roster.find(node)) is not None and asked.key in box.keys:
            return MemberChanged(roster=roster)
        if node not in self._invited:
            raise PeerRefused(f"{node} is not invited")
        return await self.command(MemberChange("join", node, key=asked.key, address=asked.address))

    def _agreed(self) -> Roster:
        """Returns the roster. Raises PeerRefused without one."""
        if self._state.roster is None:
            raise PeerRefused("this cluster goes by lists of peers; `edgemoe cluster init` has the members agreed")
        return self._state.roster

    async def _check_written(self) -> None:
        """Raises CoordUnavailable while the leader has not written the members into a new etcd yet."""
        if self._state.roster is not None and self._store().view().roster is None:
            raise CoordUnavailable("nobody leads yet")

    def _entry(self, node: str) -> tuple[Roster, Peer]:
        """Returns the roster and the entry of a box. Raises PeerRefused."""
        roster = self._agreed()
        if (box := roster.find(node)) is None:
            raise PeerRefused(f"there is no box {node}; there are {', '.join(each.node for each in roster.boxes)}")
        return roster, box

    def _is_here(self, node: str) -> bool:
        members = self._state.members
        return node == self._own.node or (node in members and members.is_alive(node))

    def _check_majority(self, roster: Roster, node: str) -> None:
        """Raises PeerRefused where the other voters would have no majority among them."""
        left = [each for each in roster.voters if each != node]
        here = [each for each in left if self._is_here(each)]
        if not left:
            raise PeerRefused(f"{node} is the only voter: give another box a vote first (edgemoe cluster vote)")
        if 2 * len(here) <= len(left):
            gone = ", ".join(each for each in left if each not in here)
            raise PeerRefused(f"{node} must keep its vote: {gone} does not answer, and the others would be no majority")

    async def _commit(self, before: Roster | None, after: Roster) -> None:
        """Has the voters agree on a roster. Raises RosterConflict, CoordUnavailable."""
        await _persist(lambda: self._store().change_roster(before, after))
        if not self._is_parting:
            self._on_agreed(after)

    async def _hand_over(self, node: str) -> None:
        """Has a box give its experts to the others, as far as they have room."""
        if node == self._own.node:
            return
        try:
            await self._channel.ask(node, HandOver(), timeout_s=HAND_OVER_S)
        except PeerError as error:
            log.warning("a box is removed before its experts are elsewhere", extra={"node": node, "why": str(error)})

    async def _say_farewell(self, node: str, after: Roster) -> None:
        """Tells a removed box so, and goes by the new roster."""
        try:
            if self._is_here(node):
                announcement = self._state.announcement_with(after)
                await self._channel.ask(node, announcement, timeout_s=FAREWELL_S)
        except PeerError as error:
            log.warning("a removed box was not told", extra={"node": node, "why": str(error)})
        self._on_agreed(after)


async def _persist(change: Callable[[], Awaitable[None]]) -> None:
    """Makes a change that may be made twice, while etcd elects a leader, too. Raises CoordError."""
    ends_s = time.monotonic() + AGREE_S
    while True:
        try:
            return await change()
        except CoordUnavailable:
            if time.monotonic() > ends_s:
                raise
            await asyncio.sleep(BEAT_S)


def _with_vote(box: Peer, voter: bool) -> Peer:
    return Peer(box.node, box.address, box.key, voter, box.new_key)


def _voters_text(before: Roster, node: str) -> str:
    left = [each for each in before.voters if each != node]
    warning = ": neither may fail, so give a third box a vote" if len(left) == 2 else ""
    return f"{', '.join(left)} {'votes' if len(left) == 1 else 'vote'}{warning}"
