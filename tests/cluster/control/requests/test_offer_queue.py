"""The leader's queue: in any order of events, no engine gets more than it runs, and users take turns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as chosen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.examples import examples

from edgemoe.cluster.control.messages import LoadReport, RequestOffer
from edgemoe.cluster.control.planning.planning_questions import ClusterAnswer, ClusterQuestion
from edgemoe.cluster.control.requests.offer_queue import (
    MAX_OFFERS,
    MOST_FORECAST_BYTES,
    MOST_HEADS,
    Action,
    EngineReported,
    GrantOffer,
    LeadershipChanged,
    OfferQueue,
    OfferWithdrawn,
    QueueTimePassed,
    RefuseOffer,
    RequestOffered,
    ServingEngines,
)
from edgemoe.cluster.control.requests.request_desk import make_queue
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PlanningFailed
from edgemoe.policy.routing.eldr import LocalityBand
from edgemoe.policy.routing.gimbal import GimbalThresholds
from edgemoe.policy.routing.offers import FORGET_S, OfferAssignment, RoutingTarget, WaitingRequest, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ModelSizes, absent_bytes, shares_of
from edgemoe.policy.shares import most_of
from edgemoe.types.expert_signatures import ExpertDemand, ExpertSignature

NODES = ("a", "b", "c")
SIZES = ModelSizes(1, 6)
SLOTS = 2
nodes = st.sampled_from(NODES)


def offer(
    number: int, tokens: int = 10, user: int = 0, stands_s: float = 10.0, waited_s: float = 0.0, principal: int = 0
) -> RequestOffer:
    return RequestOffer(
        number,
        "m",
        prompt_tokens=tokens,
        max_tokens=100,
        expected_tokens=50,
        user=user,
        prefix=bytes(8) + number.to_bytes(8, "little") + b"x",
        waited_ms=waited_s * 1e3,
        remaining_ms=stands_s * 1e3,
        principal=principal,
    )


def idle(node: str, **has: object) -> LoadReport:
    fixed = {"engine": f"{node}1", "slots": SLOTS, "capacity": 10, "blocks": 1000, "free_blocks": 1000}
    return msgspec.convert({"type": "EngineUse", **fixed, **has}, LoadReport)


def everybody(*gone: str) -> ServingEngines:
    here = [node for node in NODES if node not in gone]
    return ServingEngines(frozenset(here), frozenset(f"{node}:{node}1" for node in here), SIZES)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def _never(asked: ClusterQuestion) -> ClusterAnswer:
    raise PlanningFailed("no clusters are fitted in this test")


def queue_of(route: str = "pull", *gone: str) -> tuple[OfferQueue, Clock]:
    clock = Clock()
    settings = ClusterSettings(route=route)  # type: ignore[arg-type]
    queue, fitting = make_queue(settings, _never, clock)
    assert (fitting is not None) == (route == "eldr")
    queue.handle(LeadershipChanged(1))
    queue.handle(everybody(*gone))
    return queue, clock


class Cluster(RuleBasedStateMachine):
    """Fronts that offer requests, engines that run the granted ones, boxes that come and go. The model lists each
    engine's requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = queue_of()
        self.numbers = 0
        self.open: dict[tuple[str, int], float] = {}  # offers that stand, and until when
        self.at: dict[str, list[tuple[str, int]]] = {node: [] for node in NODES}  # granted, by engine
        self.new: dict[str, dict[tuple[str, int], float]] = {node: {} for node in NODES}  # on their way, since when
        self.gone: set[str] = set()
        self.known: set[str] = set()  # engines that have reported their status

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RefuseOffer):
                del self.open[action.node, action.number]
                continue
            assert self.open.pop((action.node, action.number)) >= self.clock.now_s, "it stood no more, or was granted"
            node = action.place.split(":")[0]
            assert node in self.known, "nobody knows whether that engine takes anything"
            self.at[node].append((action.node, action.number))
            self.new[node][action.node, action.number] = self.clock.now_s

    @rule(node=nodes, tokens=st.integers(1, 2000), user=st.integers(0, 3), stands_s=st.floats(0, 30))
    def offers(self, node: str, tokens: int, user: int, stands_s: float) -> None:
        self.numbers += 1
        self.open[node, self.numbers] = self.clock.now_s + stands_s
        self.act(self.queue.handle(RequestOffered(node, offer(self.numbers, tokens, user, stands_s))))

    @rule(data=st.data())
    def withdraws(self, data: st.DataObject) -> None:
        if self.open:
            node, number = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[node, number]
            self.act(self.queue.handle(OfferWithdrawn(node, (number,))))

    @rule(node=nodes, ends=st.integers(0, SLOTS), names_all=st.booleans())
    def says_how_it_is(self, node: str, ends: int, names_all: bool) -> None:
        """Ends some of the engine's requests and reports its status.

        The report names the requests that have arrived. A request on its way for longer than FORGET_S is lost.
        """
        if node in self.gone:
            return
        new = {one: sent_s for one, sent_s in self.new[node].items() if self.clock.now_s - sent_s <= FORGET_S}
        reached = list(new)[: None if names_all else 1]
        running = [one for one in self.at[node] if one not in self.new[node] or one in reached][ends:]
        self.new[node] = {one: sent_s for one, sent_s in new.items() if one not in reached}
        self.at[node] = [*running, *self.new[node]]
        self.known.add(node)
        use = idle(node, running=len(running), taken=reached, free_blocks=1000 - 10 * len(running))
        self.act(self.queue.handle(EngineReported(node, use)))

    @rule(seconds=st.floats(0, 4))
    def waits(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.act(self.queue.handle(QueueTimePassed()))
        self.open = {name: until for name, until in self.open.items() if until > self.clock.now_s}

    @rule(node=nodes)
    def comes_or_goes(self, node: str) -> None:
        self.gone ^= {node}
        self.known.discard(node)
        self.at[node], self.new[node] = [], {}
        self.open = {name: until for name, until in self.open.items() if name[0] not in self.gone}
        self.act(self.queue.handle(everybody(*self.gone)))

    @rule()
    def another_leads(self) -> None:
        self.open.clear()
        self.known.clear()
        self.new = {node: {} for node in NODES}
        self.act(self.queue.handle(LeadershipChanged(2)))

    @invariant()
    def what_stands_is_what_was_offered_and_is_still_wanted(self) -> None:
        self.queue.check_integrity()
        now_s, until = self.clock.now_s, list(self.open.values())
        assert sum(each > now_s for each in until) <= len(self.queue) <= sum(each >= now_s for each in until)

    @invariant()
    def no_engine_has_more_than_runs_at_once(self) -> None:
        assert all(len(there) <= SLOTS for there in self.at.values())


Cluster.TestCase.settings = chosen(max_examples=examples(15), stateful_step_count=30, deadline=None)
TestQueue = Cluster.TestCase


def granted(actions: list[Action]) -> list[tuple[int, str]]:
    return [(action.number, action.place) for action in actions if isinstance(action, GrantOffer)]


def test_users_take_turns_however_many_requests_one_of_them_has() -> None:
    queue, clock = queue_of("pull", "b", "c")
    for number in range(1, 6):
        queue.handle(RequestOffered("a", offer(number, user=1)))
    clock.now_s += 1
    queue.handle(RequestOffered("a", offer(9, user=2)))
    order: list[int] = []
    while len(queue):
        clock.now_s += 1
        use = idle("a", slots=1, taken=[("a", number) for number in order])
        order += [number for number, _ in granted(queue.handle(EngineReported("a", use)))]
    assert order == [1, 9, 2, 3, 4, 5]


def test_principals_take_turns_however_many_users_one_of_them_names() -> None:
    queue, clock = queue_of("pull", "b", "c")
    for number in range(1, 200):
        queue.handle(RequestOffered("a", offer(number, user=number, principal=1001, stands_s=1e3)))
    clock.now_s += 1
    for number in range(501, 504):
        queue.handle(RequestOffered("a", offer(number, user=number, principal=1002, stands_s=1e3)))
    order: list[int] = []
    while {501, 502, 503} - set(order) and len(order) < 100:
        clock.now_s += 1
        use = idle("a", slots=1, taken=[("a", number) for number in order])
        order += [number for number, _ in granted(queue.handle(EngineReported("a", use)))]
    assert len(order) <= 1 + 2 * 3, "each second turn is the other principal's"


def test_one_box_s_offers_are_bounded_and_leave_room_for_others() -> None:
    queue, _ = queue_of()
    for number in range(most_of(MAX_OFFERS)):
        assert queue.handle(RequestOffered("a", offer(number, user=number, principal=1))) == []
    assert queue.handle(RequestOffered("a", offer(9999, user=9999, principal=1))) == [RefuseOffer("a", 9999)]
    others = range(5000, 5000 + MAX_OFFERS)
    taken = [number for number in others if not queue.handle(RequestOffered("a", offer(number, user=number)))]
    assert len(taken) == MAX_OFFERS - most_of(MAX_OFFERS)
    assert queue.handle(RequestOffered("b", offer(1))) == []
    assert queue.handle(RequestOffered("stranger", offer(1))) == [RefuseOffer("stranger", 1)]


def test_an_engine_that_has_gone_gets_nothing_even_if_it_comes_back_until_it_says_how_it_is() -> None:
    queue, _ = queue_of("pull", "b", "c")
    queue.handle(EngineReported("a", idle("a")))
    queue.handle(EngineReported("a", LoadReport()))
    assert granted(queue.handle(RequestOffered("a", offer(1)))) == []
    assert granted(queue.handle(EngineReported("a", idle("a")))) == [(1, "a:a1")]


@pytest.mark.parametrize("route", ["gimbal"])
def test_a_user_s_requests_keep_their_engine_via_any_front_until_that_expires(route: str) -> None:
    queue, clock = queue_of(route)
    for node in NODES:
        queue.handle(EngineReported(node, idle(node)))
    (first,) = granted(queue.handle(RequestOffered("a", offer(1, user=7))))
    granted(queue.handle(RequestOffered("a", offer(2, user=8))))
    (again,) = granted(queue.handle(RequestOffered("b", offer(3, user=7))))
    assert again[1] == first[1]
    clock.now_s += GimbalThresholds().affinity_s + 1
    places = {granted(queue.handle(RequestOffered("c", offer(4 + n, user=7 + 10 * n))))[0][1] for n in range(3)}
    assert len(places) == 3


def test_a_request_is_pulled_by_its_own_box_or_by_that_of_its_user_for_a_while() -> None:
    def asked(number: int) -> RequestOffer:
        return msgspec.structs.replace(offer(number, tokens=100, user=7), prefix=b"")

    queue, clock = queue_of()
    for node in NODES:
        queue.handle(EngineReported(node, idle(node)))
    assert granted(queue.handle(RequestOffered("b", asked(1)))) == [(1, "b:b1")]
    queue.handle(EngineReported("b", idle("b", taken=[("b", 1)])))
    assert granted(queue.handle(RequestOffered("c", asked(2)))) == [(2, "b:b1")]
    queue.handle(EngineReported("b", idle("b", taken=[("c", 2)])))
    clock.now_s += GimbalThresholds().affinity_s + 1
    assert granted(queue.handle(RequestOffered("c", asked(3)))) == [(3, "c:c1")]


COUNTS, SMALLS = st.sampled_from([0, 1, 1 << 62]), st.sampled_from([0, 1, 1 << 24])
USES = st.builds(
    LoadReport,
    engine=st.sampled_from(["a1", "x"]),
    **dict.fromkeys(("slots", "capacity", "running", "waiting"), SMALLS),
    **dict.fromkeys(("prefill_tokens", "remaining_tokens", "blocks", "free_blocks"), COUNTS),
    tokens_per_s=st.sampled_from([0.0, 5e-324, 1.0, 1e15]),
    taken=st.sampled_from([(), (("b", 1 << 62),), (("a", 1),)]),
    prefixes=st.binary(max_size=20),
    choices=st.one_of(
        st.none(),
        st.builds(
            ExpertDemand,
            st.sampled_from([b"", bytes(6), b"\xff" * 6, bytes(7)]),
            st.sampled_from([b"", bytes(6), b"\xff" * 6]),
            st.sampled_from([(), (1e9,), (0.0, 1e9, 0.1)]),
            st.sampled_from([0.0, 1e9]),
            st.sampled_from([0.0, 1e-30, 1e9]),
        ),
    ),
)
OFFERS = st.builds(
    RequestOffer,
    COUNTS,
    st.just("m"),
    SMALLS,
    st.sampled_from([0, 1 << 31]),
    expected_tokens=st.sampled_from([0, 1 << 31]),
    user=st.sampled_from([0, (1 << 64) - 1]),
    prefix=st.binary(max_size=20),
    waited_ms=st.sampled_from([0.0, 1e9]),
    remaining_ms=st.sampled_from([0.0, 1e9]),
    signature=st.one_of(
        st.none(), st.builds(ExpertSignature, SMALLS, st.sampled_from([b"", bytes(12), b"\xff" * 12, bytes(13)]))
    ),
)
SIZED = st.sampled_from([everybody()._replace(sizes=sizes) for sizes in (SIZES, ModelSizes(2, 6), ModelSizes())])


@pytest.mark.parametrize("route", ["pull", "eldr", "gimbal"])
@given(said=st.lists(st.one_of(USES, OFFERS, SIZED), min_size=2, max_size=6))
@chosen(max_examples=examples(20), deadline=None)
def test_the_queue_survives_any_message_of_a_box(
    route: str, said: list[LoadReport | RequestOffer | ServingEngines]
) -> None:
    queue, clock = queue_of(route)
    for message in said:
        match message:
            case LoadReport():
                queue.handle(EngineReported("a", message))
            case RequestOffer():
                queue.handle(RequestOffered("a", message))
            case ServingEngines():
                queue.handle(message)
        queue.check_integrity()
    actions = queue.handle(RequestOffered("b", offer(5, user=9, stands_s=1e6)))
    for _ in range(len(said) + 1):  # the grants to other engines that this report caused are forgotten
        clock.now_s += FORGET_S + 1
        actions += queue.handle(EngineReported("b", idle("b")))
    assert any(isinstance(action, GrantOffer) and (action.node, action.number) == ("b", 5) for action in actions)


def foreseen(number: int, sizes: ModelSizes) -> RequestOffer:
    """Returns an offer of a user of its own, with a predicted expert signature."""
    signature = ExpertSignature(*shares_of(np.full(sizes, 5.0), 2))
    return msgspec.structs.replace(offer(number, user=number), signature=signature)


@pytest.mark.parametrize("route", ["pull", "eldr"])
def test_only_signatures_of_another_model_are_forgotten(route: str) -> None:
    queue, clock = queue_of(route)
    other = ModelSizes(2, 6)
    assert queue.handle(RequestOffered("a", foreseen(1, SIZES))) == []
    queue.handle(everybody()._replace(sizes=other))
    assert queue.handle(RequestOffered("a", foreseen(2, other))) == []
    found: list[Action] = []
    for _ in range(2):
        clock.now_s += 1
        found += queue.handle(EngineReported("b", msgspec.structs.replace(idle("b"), choices=choosing(0))))
    assert sorted(granted(found)) == [(1, "b:b1"), (2, "b:b1")]


def test_compared_users_and_their_signatures_are_bounded() -> None:
    compared: list[int] = []
    large = ModelSizes(64, 1024)

    class Nowhere:
        def takes(self, views: Sequence[RoutingTarget]) -> bool:
            return True

        def assign(
            self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
        ) -> list[OfferAssignment]:
            compared.append(len(offers))
            assert [one.request for one in offers[:2]] == ["a:1", "a:2"][: len(offers)], "who waits longest is always"
            return []

    clock = Clock()
    queue = OfferQueue(Nowhere, LocalityBand(fewest), clock)
    queue.handle(everybody()._replace(sizes=large))
    queue.handle(EngineReported("a", idle("a")))
    for number in range(1, MOST_HEADS + 80):
        clock.now_s += 0.01
        queue.handle(RequestOffered("a", foreseen(number, large)))
        queue.check_integrity()
    assert max(compared) == MOST_HEADS
    assert MOST_FORECAST_BYTES <= queue.foreseen_bytes < MOST_FORECAST_BYTES + (1 << 20)


def test_a_prompt_whose_beginning_an_engine_has_goes_there() -> None:
    queue, _ = queue_of()
    long = msgspec.structs.replace(offer(1, 600), prefix=b"".join(n.to_bytes(8, "little") for n in range(1, 10)))
    for node in NODES:
        queue.handle(EngineReported(node, idle(node, prefixes=long.prefix if node == "c" else b"")))
    assert granted(queue.handle(RequestOffered("a", long))) == [(1, "c:c1")]


def choosing(*experts: int, far: tuple[int, ...] = ()) -> ExpertDemand:
    """Returns an engine whose requests choose these of the six experts; it has to fetch the experts `far`."""
    chosen, places = np.zeros((1, 6), np.float32), np.zeros(6, np.uint8)
    chosen[0, list(experts)], places[list(far)] = 0.99, 3
    return ExpertDemand(absent_bytes(np.log1p(-chosen)), places.tobytes(), (0.0, 0.0, 0.1), 0.01, 0.01)


@pytest.mark.parametrize(
    ("choices", "place"),
    [
        ({"a": choosing(4, 5), "b": choosing(0, 1), "c": choosing(2, 3)}, "b:b1"),
        ({"a": choosing(far=(0, 1)), "b": choosing(far=(0, 1, 2)), "c": choosing(far=(2, 3, 4, 5))}, "c:c1"),
    ],
)
def test_a_request_goes_where_its_experts_are_loaded_anyway_or_in_place(
    choices: dict[str, ExpertDemand], place: str
) -> None:
    queue, _ = queue_of()
    for node in NODES:
        busy = idle(node, running=1, remaining_tokens=50)
        queue.handle(EngineReported(node, msgspec.structs.replace(busy, choices=choices[node])))
        queue.handle(EngineReported(node, busy))  # unchanged choices are not sent again
    signature = ExpertSignature(*shares_of(np.array([[500, 500, 0, 0, 0, 0]]), 2))
    like = msgspec.structs.replace(offer(1), signature=signature)
    assert granted(queue.handle(RequestOffered("a", like))) == [(1, place)]
    gone = queue.handle(everybody(place[0]))
    assert granted(gone) == []
    queue.handle(everybody())
    queue.handle(EngineReported(place[0], idle(place[0], running=2)))
    assert granted(queue.handle(RequestOffered("b", msgspec.structs.replace(like, number=2)))) != [(2, place)]


def test_a_prefilled_request_goes_to_the_engine_with_its_experts_and_the_next_one_counts_it() -> None:
    queue, _ = queue_of()
    queue.handle(ServingEngines(frozenset(NODES), frozenset({"a:a1"}), SIZES, frozenset({"b:b1", "c:c1"})))
    for node, here in {"a": choosing(0, 1), "b": choosing(2, 3), "c": choosing(0, 1)}.items():
        queue.handle(EngineReported(node, msgspec.structs.replace(idle(node, running=1, slots=3), choices=here)))
    signature = ExpertSignature(*shares_of(np.array([[500, 500, 0, 0, 0, 0]]), 2))
    asked = [msgspec.structs.replace(offer(n), signature=signature, stage="decode") for n in range(1, 6)]
    assert [queue.decoder("a", one) for one in asked] == ["c:c1", "c:c1", "b:b1", "b:b1", ""]
    assert queue.decoder("nobody", asked[0]) == ""
    assert len(queue) == 0
    assert granted(queue.handle(RequestOffered("b", offer(9)))) == [
        (9, "a:a1")
    ]  # new prompts go to the engine that prefills
    queue.check_integrity()


def test_reports_cost_no_comparisons_of_waiting_offers_without_room() -> None:
    compared: list[int] = []

    class Counted(PullRouting):
        def assign(
            self, offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget], now_s: float
        ) -> list[OfferAssignment]:
            compared.append(len(offers))
            return super().assign(offers, views, now_s)

    clock = Clock()
    queue = OfferQueue(lambda: Counted(PullLimits()), LocalityBand(fewest), clock)
    queue.handle(everybody())
    for node in NODES:
        queue.handle(EngineReported(node, idle(node, running=SLOTS)))
    for number in range(1, 40):
        assert queue.handle(RequestOffered("a", offer(number, 10, number))) == []
    for node in NODES:
        assert queue.handle(EngineReported(node, idle(node, running=SLOTS))) == []
    assert not compared
    found = queue.handle(EngineReported("b", idle("b", running=SLOTS - 1)))
    assert granted(found) == [(1, "b:b1")]
    assert compared == [39], "once for the slot, and not again once it is taken"
