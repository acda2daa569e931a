"""The membership of other boxes: the table of transitions, random orders of events, and the questions asked of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.examples import examples
from support.planes import card

from edgemoe.cluster.control.admission import AllowKeys, ConnectPeer, DisconnectPeer, KeptWords, RevokeKeys
from edgemoe.cluster.control.control_state import (
    AnnouncementAnswered,
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
    TimerFired,
)
from edgemoe.cluster.control.coordination.coord_store import PlanRef
from edgemoe.cluster.control.coordination.epoch_fence import MAX_LEAP, EpochFence
from edgemoe.cluster.control.distrust import DistrustedBoxes
from edgemoe.cluster.control.etcd_run import KeptRuns
from edgemoe.cluster.control.leader import LeaderTasks
from edgemoe.cluster.control.membership import (
    CANNOT_TAKE_PART,
    DEAD_S,
    PRESENT,
    TRANSITIONS,
    BoxState,
    ClusterMembers,
    MembershipTrigger,
)
from edgemoe.cluster.control.messages import Accusation, Announce, BoxReport, Heartbeat, Welcome
from edgemoe.cluster.control.plan_store import PlanStore
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.roster import KeptRoster
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PeerUnavailable

# --- the table ---------------------------------------------------------------------------------------------------

LET_IN = [state for state in BoxState if state is not BoxState.UNKNOWN]


def standing(state: BoxState) -> str:
    """Whether a box that is let in has announced itself, and can take part."""
    if state is BoxState.UNKNOWN:
        return "not let in"
    if state in CANNOT_TAKE_PART:
        return "refused"
    return "new" if state in (BoxState.EXPECTED, BoxState.JOINING) else "accepted"


@pytest.mark.parametrize("state", LET_IN)
def test_presence_and_standing_change_apart_and_each_state_is_one_pair_of_them(state: BoxState) -> None:
    after = TRANSITIONS[state]
    present = state in PRESENT
    came_or_went = MembershipTrigger.DISAPPEARED if present else MembershipTrigger.APPEARED
    assert set(after) == {
        came_or_went,
        MembershipTrigger.ACCEPTED,
        MembershipTrigger.REJECTED,
        MembershipTrigger.STRUCK,
    }
    assert ((after[came_or_went] in PRESENT), standing(after[came_or_went])) == (not present, standing(state))
    assert ((after[MembershipTrigger.ACCEPTED] in PRESENT), standing(after[MembershipTrigger.ACCEPTED])) == (
        present,
        "accepted",
    )
    assert ((after[MembershipTrigger.REJECTED] in PRESENT), standing(after[MembershipTrigger.REJECTED])) == (
        present,
        "refused",
    )
    assert after[MembershipTrigger.STRUCK] is BoxState.UNKNOWN


def test_a_box_is_let_in_as_one_that_is_neither_present_nor_announced() -> None:
    assert TRANSITIONS[BoxState.UNKNOWN] == {MembershipTrigger.ADMITTED: BoxState.EXPECTED}
    assert set(TRANSITIONS) == set(BoxState)


# --- random orders of events -------------------------------------------------------------------------------------

OTHERS = st.sampled_from(["b", "c", "d"])
BOOTS = st.sampled_from("xy")
KEYS = {node: node * 40 for node in "abcd"}
SETTINGS = ClusterSettings(node="a", coordination="raft", listen="127.0.0.1:1")
VOTERS = {node: Peer(node, f"127.0.0.1:{n + 1}", KEYS[node], vouches=True) for n, node in enumerate("abc")}
GUEST = Peer("d", "127.0.0.1:9", KEYS["d"], voter=False)
WORDS = "raft: a b c"


@dataclass
class Expected:
    """The history of a box since it was let in, as far as its state depends on it."""

    up: bool = False
    beat_s: float = float("-inf")
    present: bool = False
    left_s: float = 0.0  # since when it has not been present
    boot: str = ""
    engine: str = ""  # of its last beat
    announced_boot: str | None = None
    model: str = ""  # announced
    vouches: bool = False  # for box d
    refused: bool = False
    report: BoxReport | None = None
    acknowledged: int = 0
    answering: str = ""

    @property
    def state(self) -> BoxState:
        if self.refused:
            return BoxState.REFUSED if self.present else BoxState.REFUSED_ABSENT
        if self.announced_boot is None:
            return BoxState.JOINING if self.present else BoxState.EXPECTED
        return BoxState.MEMBER if self.present else BoxState.ABSENT


class AnyOrder(RuleBasedStateMachine):
    """Box a, with messages of b, c and perhaps d in any order; `expected` keeps their histories apart from it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.synced = mock.patch("os.fsync")
        self.synced.start()
        folder = Path(self.folder.name)
        self.now_s = 100.0
        self.allowed: dict[str, tuple[str, ...]] = {}
        self.connected: dict[str, str] = {}
        self.expected: dict[str, Expected] = {}
        self.listed = set(VOTERS)
        self.fence = EpochFence(folder / "epoch")
        own = Announce("1", "box", "127.0.0.1:1", engine=card("engine-a"))
        self.lying: set[str] = set()  # keys of boxes whose answers this box found wrong
        self.state = ControlState(SETTINGS, VOTERS, own, PlanStore(folder / "plan"), self.fence, lambda: self.now_s)
        self.perform(self.state.start())
        self.published = self.visible()

    def teardown(self) -> None:
        self.synced.stop()
        self.folder.cleanup()

    def visible(self) -> object:
        """Returns the members as this box's services see them."""
        return self.state.members.keys(), self.state.members.engines()

    def vouched_for(self) -> bool:
        """Whether box d is let in: it stands on this box's list, or on that of a listed box, present or not."""
        vouchers = [box for node, box in self.expected.items() if node in self.listed and box.vouches]
        return "d" in self.listed or bool(vouchers)

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AllowKeys(node, keys):
                    self.expected.setdefault(node, Expected(left_s=self.now_s))
                    self.expected[node].refused |= not self.lying.isdisjoint(keys)
                    self.allowed[node] = keys
                case RevokeKeys(node):
                    del self.allowed[node], self.expected[node]
                case ConnectPeer(peer):
                    self.connected[peer.node] = peer.address
                case DisconnectPeer(node):
                    self.connected.pop(node, None)
                case PublishMembers():
                    self.published = self.visible()
        assert not any(isinstance(instruction, RefuseMessage) for instruction in instructions[:-1])

    def do(self, event: Event) -> list[Instruction]:
        highest = self.fence.highest
        instructions = self.state.handle(event)
        self.perform(instructions)
        assert self.fence.highest >= highest
        return instructions

    def update_presence(self) -> set[str]:
        """Returns the boxes that have disappeared since the last update."""
        gone = set()
        for node, box in self.expected.items():
            present = box.up and self.now_s - box.beat_s < DEAD_S
            if box.present and not present:
                box.left_s = self.now_s
                gone.add(node)
            box.present = present
        return gone

    def receive(self, node: str, boot: str, message: Heartbeat | Announce | BoxReport | None) -> list[Instruction]:
        box = self.expected[node]
        if box.boot != boot:
            box.boot, box.acknowledged = boot, 0
        return self.do(MessageReceived(node, boot, message))

    def is_second(self, node: str, boot: str, message: Heartbeat | Announce | BoxReport | None = None) -> bool:
        """Whether another incarnation answers our connection: then the message changes nothing."""
        box = self.expected[node]
        if not box.up or box.answering in ("", boot):
            return False
        (refused,) = self.do(MessageReceived(node, boot, message))
        assert isinstance(refused, RefuseMessage)
        return True

    # --- events -----------------------------------------------------------------------------------------------

    @initialize(guest=st.booleans(), alive=st.booleans(), announced=st.integers(0, 2))
    def begin(self, guest: bool, alive: bool, announced: int) -> None:
        """Begins with boxes that are only let in, or also alive, announced once or twice, or both."""
        self.another_list_is_read(guest, turned=False, without="")
        for node in list(self.expected) if alive else ():
            self.a_connection_opens(node)
            self.a_box_beats(node, "x", leading=0, unmet=False)
        for node in list(self.expected) * announced:
            self.a_box_announces_itself(node, "x", "m", vouches=False, fits=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 7200.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        gone = self.update_presence()
        self.do(TimerFired())
        assert self.state.leader_tracker.leader not in gone
        assert ("d" in self.expected) == self.vouched_for()

    @rule(node=OTHERS)
    def a_connection_opens(self, node: str) -> None:
        instructions = self.do(ConnectionOpened(node))
        if node in self.expected:
            box = self.expected[node]
            box.up, box.acknowledged, box.answering = True, 0, ""
            assert CheckPlan() in instructions

    @rule(node=OTHERS)
    def a_connection_breaks(self, node: str) -> None:
        gone = set()
        if node in self.expected:
            self.expected[node].up, self.expected[node].answering = False, ""
            gone = self.update_presence()
        self.do(ConnectionLost(node))
        assert self.state.leader_tracker.leader not in gone

    @rule(node=OTHERS, boot=BOOTS, leading=st.integers(0, 6), unmet=st.booleans(), serves=st.booleans())
    def a_box_beats(self, node: str, boot: str, leading: int, unmet: bool, serves: bool = True) -> None:
        if (box := self.expected.get(node)) is None:
            return  # the plane refuses its messages
        before, highest = self.state.leader_tracker.leader, self.fence.highest
        beat = Heartbeat(leading=leading, seen=leading, engine=f"engine-{node}" if serves else "", unmet=unmet)
        if self.is_second(node, boot, beat):
            return
        box.beat_s = self.now_s
        if not box.present:
            self.update_presence()
        instructions = self.receive(node, boot, beat)
        assert DeliverBeat(node, beat) in instructions
        assert PublishMembers() in instructions or box.engine == beat.engine
        box.engine = beat.engine
        if unmet:
            box.acknowledged = 0
        assert node != "d" or self.fence.highest == highest  # a box that may not lead ends no leadership
        may_follow = node != "d" and box.announced_boot == boot and not box.refused and 0 < leading >= highest
        if node in self.expected:
            assert (self.state.leader_tracker.leader == node) == may_follow
        if before != self.state.leader_tracker.leader:
            assert self.state.leader_tracker.leader in ("", node)

    @rule(node=OTHERS, boot=BOOTS)
    def a_box_names_an_impossible_epoch(self, node: str, boot: str) -> None:
        if (box := self.expected.get(node)) is None or self.is_second(node, boot, Heartbeat(seen=2 * MAX_LEAP)):
            return
        box.beat_s = self.now_s
        if not box.present:
            self.update_presence()
        believed = node != "d" and box.announced_boot == boot and not box.refused
        box.refused |= believed
        self.receive(node, boot, Heartbeat(seen=2 * MAX_LEAP, engine=box.engine))
        assert self.state.leader_tracker.leader != node

    @rule(
        node=OTHERS,
        boot=BOOTS,
        model=st.sampled_from("mmn"),
        vouches=st.booleans(),
        fits=st.sampled_from([True, True, False]),
    )
    def a_box_announces_itself(self, node: str, boot: str, model: str, vouches: bool, fits: bool) -> None:
        if (box := self.expected.get(node)) is None or self.is_second(node, boot, Announce("1", "box", "")):
            return
        words = WORDS if fits else "single: b"
        listed = (*VOTERS.values(), GUEST) if vouches else ()
        engine = card(f"engine-{node}", model=model * 32)
        lies = not self.lying.isdisjoint(self.allowed[node])
        box.announced_boot, box.refused = boot, lies or not fits or model == "n"
        box.model, box.vouches = model, vouches
        announce = Announce("1", "box", "127.0.0.1:9", engine=engine, agreement=words, listed=listed)
        instructions = self.receive(node, boot, announce)
        assert isinstance(instructions[-1], RefuseMessage) == box.refused
        assert ("d" in self.expected) == self.vouched_for()

    @rule(node=OTHERS, boot=BOOTS, tokens=st.integers(1, 9))
    def a_box_reports(self, node: str, boot: str, tokens: int) -> None:
        if (box := self.expected.get(node)) is not None and not self.is_second(node, boot):
            box.report = BoxReport("m" * 32, float(tokens), b"")
            assert self.receive(node, boot, box.report) == []

    @rule(node=OTHERS, boot=BOOTS)
    def a_box_asks_for_something(self, node: str, boot: str) -> None:
        if node in self.expected and not self.is_second(node, boot):
            assert self.receive(node, boot, None) == []

    @rule(node=OTHERS, behind=st.integers(0, 1), refusal=st.sampled_from(["", "no"]), boot=st.sampled_from(["", "x"]))
    def a_box_answers_our_announcement(self, node: str, behind: int, refusal: str, boot: str = "") -> None:
        serial = self.state.serial - behind
        if (box := self.expected.get(node)) is not None:
            box.acknowledged = serial
            box.answering = boot or box.answering
            box.refused |= refusal != ""
        self.do(AnnouncementAnswered(node, serial, refusal, Welcome(boot)))

    @rule(node=OTHERS, prefers=st.booleans())
    def a_box_may_follow_another_of_our_name(self, node: str, prefers: bool) -> None:
        if (box := self.expected.get(node)) is not None:
            box.acknowledged = box.acknowledged if prefers else self.state.serial
            answer = Welcome(prefers="127.0.0.1:7" if prefers else "")
            self.do(AnnouncementAnswered(node, self.state.serial, welcome=answer))
            assert self.state.members[node].prefers == answer.prefers
            assert self.state.incarnations.is_copy >= prefers

    @rule(node=OTHERS)
    def a_box_speaks_another_protocol(self, node: str) -> None:
        if node in self.expected:
            self.expected[node].refused = True
        self.do(PeerFoundIncompatible(node, "another protocol"))

    @rule(node=OTHERS)
    def this_box_finds_answers_wrong(self, node: str) -> None:
        if node in self.expected:
            self.lying |= set(self.allowed[node])
            self.expected[node].refused = True
        self.do(PeerFoundLying(node, "sums differ"))
        assert {each.key for each in self.state.announcement.accuses} == self.lying

    @rule(guest=st.booleans(), turned=st.booleans(), without=st.sampled_from(["", "c"]))
    def another_list_is_read(self, guest: bool, turned: bool, without: str) -> None:
        peers = {node: peer for node, peer in VOTERS.items() if node != without}
        if turned:
            peers["b"] = msgspec.structs.replace(peers["b"], new_key="z" * 40)
        peers |= {"d": GUEST} if guest else {}
        self.listed = set(peers)
        self.do(PeersListChanged(peers))
        assert set(self.expected) - {"d"} == self.listed - {"a", "d"}
        assert ("d" in self.expected) == self.vouched_for()

    @rule(room=st.integers(0, 3))
    def this_box_announces_another_engine(self, room: int) -> None:
        serial, engine = self.state.serial, card("engine-a", room=room)
        changes = engine != self.state.announcement.engine
        self.do(AnnouncementChanged(msgspec.structs.replace(self.state.announcement, engine=engine)))
        assert (self.state.serial > serial) == changes

    # --- invariants -------------------------------------------------------------------------------------------

    @invariant()
    def each_box_is_in_the_state_of_its_history(self) -> None:
        assert {member.peer.node: member.state for member in self.state.members} == {
            node: box.state for node, box in self.expected.items()
        }

    @invariant()
    def the_reason_of_a_refusal_is_known_as_long_as_it_lasts(self) -> None:
        assert all((member.refusal != "") == (not member.can_take_part) for member in self.state.members)

    @invariant()
    def boxes_that_can_take_part_are_listed_for_calls_and_alive_ones_for_requests(self) -> None:
        members, able = self.state.members, {node: box for node, box in self.expected.items() if not box.refused}
        announced = {node: box for node, box in able.items() if box.announced_boot is not None}
        assert members.keys() == {node: self.allowed[node] for node in able}
        assert {each.node: each.heard for each in members.engines()} == {n: box.present for n, box in announced.items()}
        alive = {n: box for n, box in announced.items() if box.up and self.now_s - box.beat_s < DEAD_S}
        serving = {f"{n}:{box.engine}": n for n, box in alive.items() if box.engine and box.model == "m"}
        assert members.serving("m" * 32) == serving

    @invariant()
    def the_last_report_and_acknowledgement_are_kept(self) -> None:
        for member in self.state.members:
            box = self.expected[member.peer.node]
            assert (member.report, member.acknowledged) == (box.report, box.acknowledged)
        late = {node for node, box in self.expected.items() if box.up and box.acknowledged != self.state.serial}
        assert {member.peer.node for member in self.state.unacknowledged()} == late

    @invariant()
    def members_are_let_in_and_no_other_box(self) -> None:
        assert self.allowed == {member.peer.node: member.peer.keys for member in self.state.members}
        assert self.connected.keys() <= self.allowed.keys()

    @invariant()
    def a_box_counts_as_absent_from_when_it_disappeared(self) -> None:
        for node, box in self.expected.items():
            assert self.state.absent_s(node) == (0.0 if box.present else self.now_s - box.left_s)

    @invariant()
    def only_a_member_is_followed(self) -> None:
        leader = self.state.leader_tracker.leader
        assert leader in ("", "a") or leader in self.state.members

    @invariant()
    def services_know_of_every_change(self) -> None:
        assert self.published == self.visible()


def test_in_any_order_of_events_each_box_is_in_the_state_of_its_history() -> None:
    many = hypothesis.settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
    hypothesis.stateful.run_state_machine_as_test(AnyOrder, settings=many)


def come(boxes: AnyOrder) -> None:
    boxes.a_connection_opens("b")
    boxes.a_box_beats("b", "x", leading=0, unmet=False)


def announce(boxes: AnyOrder, fits: bool = True, model: str = "m") -> None:
    boxes.a_box_announces_itself("b", "x", model, vouches=False, fits=fits)


BEGINNINGS: dict[BoxState, list[Callable[[AnyOrder], None]]] = {
    BoxState.EXPECTED: [],
    BoxState.JOINING: [come],
    BoxState.ABSENT: [announce],
    BoxState.MEMBER: [come, announce],
    BoxState.REFUSED: [come, lambda boxes: announce(boxes, fits=False)],
    BoxState.REFUSED_ABSENT: [lambda boxes: announce(boxes, fits=False)],
}
CAUSES: list[tuple[MembershipTrigger, Callable[[AnyOrder], None]]] = [
    (MembershipTrigger.APPEARED, come),
    (MembershipTrigger.DISAPPEARED, lambda boxes: boxes.a_connection_breaks("b")),
    (MembershipTrigger.DISAPPEARED, lambda boxes: boxes.time_passes(2 * DEAD_S)),
    (MembershipTrigger.ACCEPTED, announce),
    (MembershipTrigger.REJECTED, lambda boxes: announce(boxes, fits=False)),
    (MembershipTrigger.REJECTED, lambda boxes: announce(boxes, model="n")),
    (MembershipTrigger.REJECTED, lambda boxes: boxes.a_box_speaks_another_protocol("b")),
    (MembershipTrigger.REJECTED, lambda boxes: boxes.a_box_answers_our_announcement("b", behind=0, refusal="no")),
    (MembershipTrigger.STRUCK, lambda boxes: boxes.do(PeersListChanged({"a": VOTERS["a"], "c": VOTERS["c"]}))),
]


@pytest.mark.parametrize("state", BEGINNINGS)
@pytest.mark.parametrize(("trigger", "cause"), CAUSES, ids=[f"{trigger}-{n}" for n, (trigger, _) in enumerate(CAUSES)])
def test_each_row_of_the_table_is_taken_for_each_of_its_causes(
    state: BoxState, trigger: MembershipTrigger, cause: Callable[[AnyOrder], None]
) -> None:
    if trigger not in TRANSITIONS[state]:
        return  # it is present already, or not
    boxes = AnyOrder()
    try:
        for event in BEGINNINGS[state]:
            event(boxes)
        assert boxes.state.members["b"].state is state
        member = boxes.state.members["b"]
        cause(boxes)
        assert member.state is TRANSITIONS[state][trigger]
        assert ("b" in boxes.state.members) == (member.state is not BoxState.UNKNOWN)
        boxes.services_know_of_every_change()
        boxes.members_are_let_in_and_no_other_box()
    finally:
        boxes.teardown()


@pytest.mark.parametrize(
    "lost",
    [
        lambda boxes: boxes.a_box_beats("b", "x", leading=0, unmet=True),
        lambda boxes: boxes.a_box_beats("b", "y", leading=0, unmet=False),
        lambda boxes: boxes.a_connection_opens("b"),
        lambda boxes: boxes.this_box_announces_another_engine(3),
    ],
    ids=["says so", "restarted", "reconnected", "it changed"],
)
def test_a_box_that_lacks_our_announcement_is_sent_it_again(lost: Callable[[AnyOrder], None]) -> None:
    boxes = AnyOrder()
    try:
        come(boxes)
        assert [member.peer.node for member in boxes.state.unacknowledged()] == ["b"]
        boxes.a_box_answers_our_announcement("b", behind=0, refusal="")
        assert not boxes.state.unacknowledged()
        lost(boxes)
        assert [member.peer.node for member in boxes.state.unacknowledged()] == ["b"]
    finally:
        boxes.teardown()


@pytest.mark.parametrize(
    "cause",
    [cause for trigger, cause in CAUSES if trigger in (MembershipTrigger.DISAPPEARED, MembershipTrigger.STRUCK)],
    ids=["its connection breaks", "it is silent", "it is struck"],
)
def test_a_leader_that_disappears_or_is_struck_is_followed_no_longer(cause: Callable[[AnyOrder], None]) -> None:
    boxes = AnyOrder()
    try:
        come(boxes)
        announce(boxes)
        boxes.a_box_beats("b", "x", leading=1, unmet=False)
        assert boxes.state.leader_tracker.current == ("b", 1)
        cause(boxes)
        assert boxes.state.leader_tracker.leader == ""
    finally:
        boxes.teardown()


# --- questions ---------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_silence_that_ends_before_anybody_noted_it_is_told_to_no_engine() -> None:
    clock = Clock()
    members = ClusterMembers(clock)
    members.admit(Peer("a", "127.0.0.1:1", "key"))
    member = members["a"]
    member.announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    member.up, member.heard_s = True, clock.now_s
    assert members.update_presence() == ["a"]
    told = members.engines()
    assert told[0].heard
    clock.now_s += 2 * DEAD_S  # and something else has the list made now
    assert members.engines() == told
    member.heard_s = clock.now_s
    assert members.update_presence() == []  # so nobody makes it again
    assert members.engines() == told


def test_a_silence_that_was_noted_is_told() -> None:
    clock = Clock()
    members = ClusterMembers(clock)
    members.admit(Peer("a", "127.0.0.1:1", "key"))
    members["a"].announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine-a"))
    members["a"].up, members["a"].heard_s = True, clock.now_s
    assert members.update_presence() == ["a"]
    clock.now_s += 2 * DEAD_S
    assert members.update_presence() == ["a"]
    assert not members.engines()[0].heard
    members["a"].heard_s = clock.now_s
    assert members.update_presence() == ["a"]
    assert members.engines()[0].heard


def boxes(*nodes: str, beat: Heartbeat) -> ClusterMembers:
    """Makes boxes that are alive, with an engine, and with this beat."""
    members = ClusterMembers(lambda: 0.0)
    for node in nodes:
        members.admit(Peer(node, "127.0.0.1:1", "key"))
        members[node].up, members[node].heard_s, members[node].beat = True, 0.0, beat
        members[node].announcement = Announce(release="1", role="box", address="127.0.0.1:1", engine=card("engine"))
    return members


def test_an_engine_that_calls_itself_by_anothers_name_is_one_more_and_takes_nothing_from_it() -> None:
    found = boxes("a", "b", beat=Heartbeat(engine="engine")).serving("m" * 32)
    assert found == {"a:engine": "a", "b:engine": "b"}


async def test_boxes_that_come_while_a_plan_is_looked_for_end_nothing() -> None:
    members, asked = boxes("a", "b", beat=Heartbeat(plan_digest="digest")), list[str]()

    async def fetch(node: str, _digest: str) -> None:
        asked.append(node)
        await asyncio.sleep(0)
        members.admit(Peer(f"{node}-new", "127.0.0.1:1", "key"))
        raise PeerUnavailable("it has died")

    leader = object.__new__(LeaderTasks)
    leader._proposed = None
    leader._state, leader._exchange = SimpleNamespace(members=members), SimpleNamespace(fetch=fetch)  # type: ignore
    assert await leader._find_plan(PlanRef(1, "digest")) is None
    assert asked == ["a", "b"]


@pytest.mark.parametrize("joins", [False, True])
def test_a_box_that_starts_again_lets_in_what_a_box_that_is_gone_vouched_for(tmp_path: Path, joins: bool) -> None:
    """Its own list names only that box."""
    settings = msgspec.structs.replace(SETTINGS, join="b,127.0.0.1:2,KEY" if joins else "")
    own, listed = Announce("1", "box", "127.0.0.1:1"), {"b": VOTERS["b"]}
    fence = EpochFence(tmp_path / "epoch")

    def started() -> ControlState:
        memory = BoxMemory(KeptWords(tmp_path / "boxes"), list("abc"), DistrustedBoxes(), KeptRoster(), KeptRuns())
        made = ControlState(settings, listed, own, PlanStore(tmp_path / "plan"), fence, Clock(), memory)
        made.start()
        return made

    state = started()
    said = Announce("1", "box", "", agreement=state.announcement.agreement or WORDS, listed=(*VOTERS.values(), GUEST))
    state.handle(MessageReceived("b", "x", said))
    assert {member.peer.node for member in state.members} == ({"b", "c", "d"} if joins else {"b", "d"})
    again = started()
    assert [member.peer for member in again.members] == [member.peer for member in state.members]
    if joins:  # it adopts the rules of a box that its seed vouched for
        again.handle(MessageReceived("c", "x", Announce("1", "box", "", agreement=WORDS)))
        again.handle(MessageReceived("c", "x", Heartbeat(leading=3, seen=3)))
        assert again.leader_tracker.leader == "c"
    again.handle(PeersListChanged({}))
    assert not list(again.members)
    assert KeptWords(tmp_path / "boxes").words == {}


def test_a_box_that_is_listed_with_another_key_has_vouched_for_nobody(tmp_path: Path) -> None:
    listed = {"b": VOTERS["b"]}
    own, fence = Announce("1", "box", "127.0.0.1:1"), EpochFence(tmp_path / "epoch")
    state = ControlState(SETTINGS, listed, own, PlanStore(tmp_path / "plan"), fence, Clock())
    state.start()
    state.handle(MessageReceived("b", "x", Announce("1", "box", "", agreement=WORDS, listed=(GUEST,))))
    assert "d" in state.members
    state.handle(PeersListChanged({"b": msgspec.structs.replace(VOTERS["b"], key="z" * 40)}))
    assert [member.peer.node for member in state.members] == ["b"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"b": [{"node": 1}]}', b'{"b": 3}'])
def test_boxes_learnt_from_others_that_cannot_be_read_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "boxes").write_bytes(data)
    assert KeptWords(tmp_path / "boxes").words == {}


@pytest.mark.parametrize("order", ["leader first", "cuts first"])
def test_a_leader_s_cuts_count_whether_it_or_they_are_known_first(tmp_path: Path, order: str) -> None:
    own, fence = Announce("1", "box", "127.0.0.1:1"), EpochFence(tmp_path / "epoch")
    state = ControlState(SETTINGS, VOTERS, own, PlanStore(tmp_path / "plan"), fence, Clock())
    state.start()
    announced = Announce("1", "box", "", agreement=WORDS)
    cuts = msgspec.structs.replace(announced, cuts=(Accusation("c", KEYS["c"], "sums differ"),))
    leads = Heartbeat(leading=3, seen=3)
    for message in (announced, leads, cuts) if order == "leader first" else (cuts, leads):
        state.handle(MessageReceived("b", "x", message))
    assert "said by the leader, b" in state.members["c"].refusal
