"""This box's part in the agreement: its etcd member and its leadership, begun and ended as its vote comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.coordination.coord_store import CoordStore
from edgemoe.cluster.control.coordination.store_factory import is_voter, make_store
from edgemoe.cluster.control.etcd_member import EtcdMember
from edgemoe.cluster.control.leader import LeaderTasks
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings

log = logging.getLogger(__name__)


class AgreementPart:
    """Holds the part that this box has now. Lives on one event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        peers: Mapping[str, Peer],
        state: ControlState,
        make_member: Callable[[], EtcdMember],
        make_leader: Callable[[CoordStore], LeaderTasks],
        on_vote_lost: Callable[[], None],
    ) -> None:
        """Calls `on_vote_lost` once this box has no etcd member any more. Raises ConfigError for wrong settings."""
        self._settings, self._peers, self._state = settings, peers, state
        self._make_member, self._make_leader, self._on_vote_lost = make_member, make_leader, on_vote_lost
        self._changed, self._is_anew = asyncio.Event(), False
        self._begin()

    def _begin(self) -> None:
        self.kind = self._wanted()
        self.member = self._make_member() if self.kind == "member" else None
        agreed = self._state.roster is not None
        self.store = make_store(self._settings, self._peers, self._state.fence, self.member, is_agreed=agreed)
        self.leader = self._make_leader(self.store) if self.store is not None else None

    def _wanted(self) -> str:
        """Returns the part that this box should have: a member of etcd, none, or the one of its settings."""
        settings, roster = self._settings, self._state.roster
        if is_voter(settings, self._state.voters, roster):
            return "member"
        if roster is not None or settings.coordination == "raft" or settings.join:
            return "etcd" if settings.coordination == "etcd" else "none"
        return settings.coordination

    def follow_roster(self) -> None:
        """Begins another part soon, if the members say so."""
        if self._wanted() != self.kind:
            self._changed.set()

    def begin_anew(self) -> None:
        """Gives up this box's membership of etcd soon, and takes the part that the members give it."""
        self._is_anew = True
        self._changed.set()

    async def run(self) -> None:
        """Takes part until cancelled."""
        while True:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(each.run()) for each in (self.leader, self.member) if each is not None]
                await self._changed.wait()
                if self.leader is not None:
                    await self.leader.resign()
                for task in running:
                    task.cancel()
            await self.close()
            if self.member is not None and (self._is_anew or self._wanted() != "member"):
                try:
                    self.member.forget()
                except OSError as error:  # the members that the voters agreed on keep it out all the same
                    log.error("this box's membership of etcd stays on disk", extra={"why": str(error)})
            self._changed.clear()
            self._is_anew = False
            self._state.leader_tracker.unfollow(self._state.node)
            self._begin()
            if self.member is None:
                self._on_vote_lost()

    async def close(self) -> None:
        """Closes the agreement's files and connections."""
        if self.leader is not None:
            await self.leader.close()
