"""What a box knows of the others, against whatever these say and do: events in, actions out, no I/O but one file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import hypothesis
import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.examples import examples
from support.planes import card

from edgemoe.cluster.control.admission import AllowKeys, ConnectPeer, DisconnectPeer, RevokeKeys
from edgemoe.cluster.control.control_state import (
    AnnouncementAnswered,
    AnnouncementChanged,
    ConnectionLost,
    ConnectionOpened,
    ControlState,
    Event,
    MessageReceived,
    PeerFoundIncompatible,
    PeersListChanged,
    PublishMembers,
    RefuseMessage,
    TimerFired,
)
from edgemoe.cluster.control.coordination.epoch_fence import EpochFence
from edgemoe.cluster.control.messages import Announce, Heartbeat
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.config.settings import ClusterSettings

OTHERS = st.sampled_from(["b", "c", "d"])
BOOTS = st.sampled_from("xy")
KEYS = {node: node * 40 for node in "abcd"}
SETTINGS = ClusterSettings(node="a", coordination="raft", listen="127.0.0.1:1")
VOTERS = {node: Peer(node, f"127.0.0.1:{n + 1}", KEYS[node]) for n, node in enumerate("abc")}
GUEST = Peer("d", "127.0.0.1:9", KEYS["d"], voter=False)


class AnyWords(RuleBasedStateMachine):
    """Box a, which hears b, c and perhaps d."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.synced = mock.patch("os.fsync")
        self.synced.start()
        folder = Path(self.folder.name)
        self.now_s, self.allowed, self.connected = 100.0, {}, {}
        self.fence = EpochFence(folder / "epoch")
        own = Announce("1", "box", "127.0.0.1:1", engine=card("engine-a"))
        self.state = ControlState(SETTINGS, VOTERS, own, PlanStore(folder / "plan"), self.fence, lambda: self.now_s)
        self.told = self.seen()
        self.perform(self.state.start())
        self.told = self.seen()

    def teardown(self) -> None:
        self.synced.stop()
        self.folder.cleanup()

    def seen(self) -> object:
        """What the front goes by."""
        return self.state.members.keys(), self.state.members.engines()

    def perform(self, actions: list) -> None:  # type: ignore[type-arg]
        for action in actions:
            match action:
                case AllowKeys(node, keys):
                    self.allowed[node] = keys
                case RevokeKeys(node):
                    self.allowed.pop(node, None)
                case ConnectPeer(peer):
                    self.connected[peer.node] = peer.address
                case DisconnectPeer(node):
                    self.connected.pop(node, None)
                case PublishMembers():
                    self.told = self.seen()
        assert not any(isinstance(action, RefuseMessage) for action in actions[:-1])

    def do(self, event: Event) -> None:
        highest = self.fence.highest
        self.perform(self.state.handle(event))
        assert self.fence.highest >= highest

    def hear(self, node: str, boot: str, message: Heartbeat | Announce) -> None:
        if node in self.state.members:  # all others are refused before
            self.do(MessageReceived(node, boot, message))

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(TimerFired())

    @rule(node=OTHERS, up=st.booleans())
    def a_connection_comes_or_goes(self, node: str, up: bool) -> None:
        self.do(ConnectionOpened(node) if up else ConnectionLost(node))

    @rule(node=OTHERS, boot=BOOTS, leading=st.integers(0, 6), unmet=st.booleans())
    def a_box_beats(self, node: str, boot: str, leading: int, unmet: bool) -> None:
        before = self.state.leader_tracker.leader
        highest = self.fence.highest
        self.hear(node, boot, Heartbeat(leading=leading, seen=leading, engine=f"engine-{node}", unmet=unmet))
        assert node != "d" or self.fence.highest == highest  # who may not lead ends nobody's leadership
        if self.state.leader_tracker.leader == node and before != node:
            member = self.state.members[node]
            assert 0 < leading >= highest
            assert member.announcement is not None
            assert member.announced_boot == boot
            assert node != "d"

    @rule(
        node=OTHERS, boot=st.sampled_from("xy"), model=st.sampled_from("mn"), vouches=st.booleans(), own=st.booleans()
    )
    def a_box_announces_itself(self, node: str, boot: str, model: str, vouches: bool, own: bool) -> None:
        words = self.state.announcement.agreement if own else "single: b"
        listed = (*VOTERS.values(), GUEST) if vouches else ()
        engine = card(f"engine-{node}", model=model * 32)
        self.hear(node, boot, Announce("1", "box", "127.0.0.1:9", engine=engine, agreement=words, listed=listed))

    @rule(node=OTHERS, serial=st.integers(1, 9), refused=st.sampled_from(["", "no"]))
    def a_box_has_been_told(self, node: str, serial: int, refused: str) -> None:
        self.do(AnnouncementAnswered(node, serial, refused))

    @rule(node=OTHERS)
    def a_box_cannot_be_read(self, node: str) -> None:
        self.do(PeerFoundIncompatible(node, "another protocol"))

    @rule(guest=st.booleans(), turned=st.booleans(), without=st.sampled_from(["", "c"]))
    def another_list_is_read(self, guest: bool, turned: bool, without: str) -> None:
        peers = {node: peer for node, peer in VOTERS.items() if node != without}
        if turned:
            peers["b"] = msgspec.structs.replace(peers["b"], new_key="z" * 40)
        self.do(PeersListChanged(peers | ({"d": GUEST} if guest else {})))

    @rule(room=st.integers(0, 3))
    def this_box_is_another(self, room: int) -> None:
        serial, engine = self.state.serial, card("engine-a", room=room)
        changes = engine != self.state.announcement.engine
        self.do(AnnouncementChanged(msgspec.structs.replace(self.state.announcement, engine=engine)))
        assert (self.state.serial > serial) == changes

    @invariant()
    def who_is_a_member_is_let_in_and_nobody_else(self) -> None:
        assert self.allowed == {member.peer.node: member.peer.keys for member in self.state.members}
        assert self.connected.keys() <= self.allowed.keys()

    @invariant()
    def whom_it_obeys_is_a_member(self) -> None:
        leader = self.state.leader_tracker.leader
        assert leader in ("", "a") or leader in self.state.members

    @invariant()
    def the_front_knows_of_whatever_has_changed(self) -> None:
        assert self.told == self.seen()


def test_whatever_others_say_the_state_stays_whole() -> None:
    many = hypothesis.settings(max_examples=examples(75), stateful_step_count=30, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(AnyWords, settings=many)
