"""Assignment of waiting requests to engines: properties of every policy, Algorithm 1 case by case, the correction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.routing.eldr import BandRouting, LocalityBand
from edgemoe.policy.routing.gimbal import GimbalChooser, GimbalThresholds
from edgemoe.policy.routing.marginal_union import DecodeTimes, PromptForecast, UnionTerm
from edgemoe.policy.routing.offers import (
    FORGET_S,
    PushRouting,
    RecentDispatches,
    RoundRobin,
    RoutingPolicy,
    RoutingTarget,
    Values,
    WaitingRequest,
    cached_tokens,
    fewest,
    with_offer,
)
from edgemoe.policy.routing.pull import PullLimits, PullRouting

POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "turns": lambda: PushRouting(RoundRobin()),
    "fewest": lambda: PushRouting(fewest),
    "gimbal": lambda: PushRouting(GimbalChooser(GimbalThresholds())),
    "pull": lambda: PullRouting(PullLimits()),
    "eldr": lambda: BandRouting(LocalityBand(fewest), PullRouting(PullLimits())),
}


def offer(request: str = "r", prompt: int = 100, arrived_s: float = 0.0, user: str = "") -> WaitingRequest:
    return WaitingRequest(request, prompt, arrived_s, max_tokens=64, expected_tokens=32.0, user=user)


def engine(place: str, used: float = 0.0, prefill: int = 0, running: int = 0, waiting: int = 0) -> RoutingTarget:
    return RoutingTarget(
        place, 8, 16, 1000, round(1000 * (1 - used)), running, waiting, prefill_tokens=prefill, tokens_per_s=1000.0
    )


offers_ = st.lists(
    st.builds(
        WaitingRequest,
        st.uuids().map(str),
        st.integers(1, 40_000),
        st.floats(0.0, 100.0),
        st.integers(1, 4096),
        st.floats(0.0, 4096.0),
        st.sampled_from(["", "u", "v"]),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
    ),
    max_size=12,
    unique_by=lambda offered: offered.request,
)
engines_ = st.lists(
    st.builds(
        RoutingTarget,
        st.sampled_from("abcdef"),
        st.integers(1, 8),
        st.integers(1, 16),
        st.just(2000),
        st.integers(-100, 2000),
        st.integers(0, 8),
        st.integers(0, 16),
        st.integers(0, 5000),
        st.floats(0.0, 1e5),
        st.floats(1.0, 1e5),
        st.frozensets(st.integers(0, 3)),
    ),
    max_size=6,
    unique_by=lambda view: view.place,
)


@pytest.mark.parametrize("name", POLICIES)
@given(offers=offers_, views=engines_)
def test_every_offer_is_assigned_at_most_once_and_none_to_an_engine_that_is_full(
    name: str, offers: list[WaitingRequest], views: list[RoutingTarget]
) -> None:
    policy = POLICIES[name]()
    takes = policy.takes(views)
    given_ = policy.assign(offers, views, 100.0)
    assert takes or not given_
    assert max(Counter(request for request, _ in given_).values(), default=0) <= 1
    assert {request for request, _ in given_} <= {offered.request for offered in offers}
    took = Counter(place for _, place in given_)
    assert all(view.requests + took[view.place] <= view.capacity for view in views if took[view.place])
    assert set(took) <= {view.place for view in views}


@given(offers=offers_, views=engines_)
def test_pull_respects_an_engine_s_blocks_slots_and_step(
    offers: list[WaitingRequest], views: list[RoutingTarget]
) -> None:
    limits = PullLimits()
    there = {view.place: view for view in views}
    asked = {offered.request: offered for offered in offers}
    for request, place in PullRouting(limits).assign(offers, views, 100.0):
        view, offered = there[place], asked[request]
        cached = cached_tokens(offered, view)
        assert view.requests < view.slots
        assert view.prefill_tokens < max(limits.ahead_tokens, limits.ahead_s * view.tokens_per_s)
        reserve = limits.output_reserve * (view.remaining_tokens + offered.expected_tokens)
        needed = offered.blocks - cached // 16 + reserve / 16
        assert not view.requests or needed <= view.free_blocks
        there[place] = replace(
            view,
            waiting=view.waiting + 1,
            prefill_tokens=view.prefill_tokens + offered.prompt_tokens - cached,
            free_blocks=view.free_blocks - offered.blocks + cached // 16,
            remaining_tokens=view.remaining_tokens + offered.expected_tokens,
            prefixes=view.prefixes | set(offered.prefix),
        )


@given(prompt=st.integers(500, 4000), others=st.lists(st.integers(100, 400), min_size=10, max_size=40))
def test_a_long_prompt_is_overtaken_only_by_requests_that_come_before_its_age_outweighs_it(
    prompt: int, others: list[int]
) -> None:
    """One engine of 1,000 tokens/s, kept busy by an endless stream of short requests."""
    pull, limits = PullRouting(PullLimits()), PullLimits()
    waiting = {"long": offer("long", prompt)}
    bound_s, busy_s, now_s, last_s = prompt / 1000.0 / limits.aging, 0.0, 0.0, 0.0
    stream = iter(others * 1000)
    while "long" in waiting:
        while last_s <= now_s:  # somewhat more than the engine can do
            tokens = next(stream)
            waiting[f"{last_s}"] = offer(f"{last_s}", tokens, last_s)
            last_s += 0.9 * tokens / 1000.0
        [(request, _), *_] = pull.assign(list(waiting.values()), [engine("a")], now_s)
        assert waiting[request].arrived_s <= bound_s + 1e-6
        busy_s = waiting.pop(request).prompt_tokens / 1000.0
        now_s += busy_s


def test_an_engine_is_kept_for_an_aged_request_that_fits_nowhere_and_the_others_go_on() -> None:
    views = [engine("a", used=0.95, running=2), engine("b", used=0.9, running=1)]
    offers = [offer("large", 4000, arrived_s=0.0), offer("small", 100, arrived_s=99.0), offer("next", 100, 99.5)]
    assert PullRouting(PullLimits()).assign(offers, views, 1.0) == [("small", "b"), ("next", "a")]
    assert PullRouting(PullLimits()).assign(offers, views, 100.0) == [("small", "a"), ("next", "a")]
    assert PullRouting(PullLimits()).assign(offers, [engine("b")], 100.0)[0] == ("large", "b")


def test_an_engine_takes_no_more_ahead_than_a_step_or_a_quarter_of_a_second_whichever_is_more() -> None:
    slow = replace(engine("a", prefill=1500), tokens_per_s=5000.0)
    fast = replace(slow, tokens_per_s=7000.0)
    assert PullRouting(PullLimits()).assign([offer()], [slow], 0.0) == []
    assert PullRouting(PullLimits()).assign([offer()], [fast], 0.0) == [("r", "a")]
    assert PullRouting(PullLimits()).assign([offer()], [replace(slow, prefill_tokens=1023)], 0.0) == [("r", "a")]


def test_pull_takes_the_shortest_and_prefers_the_engine_that_has_the_prefix_until_that_is_busy() -> None:
    holder = replace(engine("b"), prefixes=frozenset([7, 8]))
    long = replace(offer("long", 900), prefix=(7, 8, 9), key_tokens=256)
    assert PullRouting(PullLimits()).assign([long, offer("short", 200)], [engine("a")], 0.0)[0].request == "short"
    assert PullRouting(PullLimits()).assign([long], [engine("a"), holder], 0.0) == [("long", "b")]
    assert PullRouting(PullLimits()).assign([long], [engine("a"), replace(holder, prefill_tokens=600)], 0.0) == [
        ("long", "a")
    ]


def test_other_costs_beyond_the_cheapest_engine_count_beside_prefill() -> None:
    def cost(offers: Sequence[WaitingRequest], views: Sequence[RoutingTarget]) -> Values:
        return np.array([[one.prompt_tokens / 100 * (view.place == "b") for one in offers] for view in views])

    offers, views = [offer("short", 100), offer("long", 900)], [engine("a"), engine("b", prefill=1)]
    assert PullRouting(PullLimits()).assign(offers, views, 0.0) == [("short", "a"), ("long", "b")]
    assert PullRouting(PullLimits(), cost).assign(offers, views, 0.0) == [("short", "a"), ("long", "a")]


@given(offers=offers_, views=engines_, waited_s=st.floats(0.0, 1e4), seed=st.integers(0, 99))
def test_incremental_costs_after_each_assignment_equal_a_full_computation(
    offers: list[WaitingRequest], views: list[RoutingTarget], waited_s: float, seed: int
) -> None:
    """Of many offers, the first to be assigned, then the first of the rest, and so on, each by a new policy object."""
    rng = np.random.default_rng(seed)
    shape = (2, 6)

    def seen(view: RoutingTarget) -> RoutingTarget:
        known = {"union": np.log1p(-0.9 * rng.random(shape)), "resident": 0.1 * rng.random(shape)}
        told = {name: table.astype(np.float32) for name, table in known.items() if rng.random() < 0.7}
        return replace(view, step_s=0.01, expert_s=0.01 * rng.random(), **told)  # type: ignore[arg-type]

    forecast = PromptForecast(2)
    chances = [forecast.chance(rng.integers(0, 50, shape).astype(np.float32)) for _ in offers]
    left = [
        replace(one, chance=each if rng.random() < 0.8 else None) for one, each in zip(offers, chances, strict=True)
    ]
    there = {view.place: seen(view) for view in views}
    limits, term = replace(PullLimits(), ahead_requests=2, affinity=0.0), UnionTerm(DecodeTimes(0.01, 0.001))
    whole = PullRouting(limits, term)
    for _ in range(2):  # state of the first round changes nothing
        found = whole.assign(left, list(there.values()), waited_s)
    for request, place in found:
        anew = PullRouting(limits, UnionTerm(DecodeTimes(0.01, 0.001)))
        assert anew.assign(left, list(there.values()), waited_s)[0] == (request, place)
        taken = next(one for one in left if one.request == request)
        there[place] = with_offer(there[place], taken)
        left.remove(taken)
    assert not PullRouting(limits, UnionTerm(DecodeTimes(0.01, 0.001))).assign(left, list(there.values()), waited_s)


def test_pull_sends_a_user_where_he_was_until_that_has_expired_or_is_busy() -> None:
    """A key covers 64 tokens. Half of that is expected to be cached beyond the keys: 32 ms."""
    pull, views = PullRouting(PullLimits(affinity_s=10.0)), [engine("a"), engine("b")]

    def asked(user: str) -> WaitingRequest:
        return replace(offer(user=user, prompt=200), key_tokens=64)

    assert pull.assign([asked("u")], views[1:], 0.0) == [("r", "b")]
    assert pull.assign([asked("u")], views, 5.0) == [("r", "b")]
    assert pull.assign([asked("v")], views, 5.0) == [("r", "a")]
    assert pull.assign([asked("u")], [views[0], replace(views[1], prefill_tokens=40)], 6.0) == [("r", "a")]
    assert pull.assign([asked("u")], views[1:], 7.0) == [("r", "b")]
    assert pull.assign([asked("u")], views, 17.5) == [("r", "a")], "expired"


def test_a_request_stays_beside_its_front_unless_another_box_has_more_to_offer() -> None:
    views = [engine("a"), engine("b"), replace(engine("c"), prefixes=frozenset([7]))]
    local = replace(offer(), home="b")
    assert PullRouting(PullLimits()).assign([local], views, 0.0) == [("r", "b")]
    assert PullRouting(PullLimits()).assign([local], [views[0], engine("b", prefill=500)], 0.0) == [("r", "a")]
    assert PullRouting(PullLimits()).assign([replace(local, prefix=(7,), key_tokens=64)], views, 0.0) == [("r", "c")]


@pytest.mark.parametrize(
    ("views", "place"),
    [
        # KV over the threshold and uneven: the engine with the least of it (lines 5 to 7)
        ([engine("a", 0.95), engine("b", 0.5, prefill=9000)], "b"),
        # over the threshold and even: load decides if it differs by more than a request (lines 9 to 13)
        ([engine("a", 0.95, prefill=4000), engine("b", 0.91)], "b"),
        # KV ample: the paper's text uses load here, too
        ([engine("a", 0.1, prefill=4000), engine("b", 0.2)], "b"),
        # at the thresholds: usage counts from them on, load only beyond
        ([engine("a", 0.9), engine("b", 0.75)], "b"),
        ([engine("a", 0.5, prefill=3000), engine("b", 0.5)], "a"),
        # over by less than the difference, and load alike: in turn
        ([engine("a", 0.95), engine("b", 0.9)], "a"),
    ],
)
def test_algorithm_1_case_by_case(views: list[RoutingTarget], place: str) -> None:
    assert PushRouting(GimbalChooser()).assign([offer()], views, 0.0) == [("r", place)]


def test_a_users_requests_stay_with_an_engine_until_it_has_expired_or_kv_is_short_anywhere() -> None:
    views = [engine("a"), engine("b")]
    policy = PushRouting(GimbalChooser(GimbalThresholds(affinity_s=10.0)))
    assert policy.assign([offer("1", user="u"), offer("2", user="v"), offer("3", user="u")], views, 0.0) == [
        ("1", "a"),
        ("2", "b"),
        ("3", "a"),
    ]
    assert policy.assign([offer("4", user="v")], views, 10.0)[0].place == "b"
    crowded = [engine("a", 0.93), engine("b", 0.92)]
    assert policy.assign([offer("5", user="v")], crowded, 10.0)[0].place == "a"
    assert policy.assign([offer("6", user="v")], views[1:], 10.0)[0].place == "b", "its engine is gone"
    assert policy.assign([offer("7", user="v")], views, 21.0)[0].place == "a", "in turn again"


def test_baselines_choose_as_their_names_say() -> None:
    views = [engine("a", running=5), engine("b", running=1, waiting=3), engine("c", running=8)]
    three = [offer(name) for name in "xyz"]
    assert [place for _, place in PushRouting(RoundRobin()).assign(three, views, 0.0)] == ["a", "b", "c"]
    assert [place for _, place in PushRouting(fewest).assign(three, views, 0.0)] == ["b", "a", "b"]


def test_a_ledger_counts_a_dispatch_until_a_report_names_it() -> None:
    dispatches = RecentDispatches()
    dispatches.on_engine_view(engine("a"))
    dispatches.on_engine_view(engine("b"))
    dispatches.dispatch(offer("1", 100), "a", 0.0)
    dispatches.dispatch(offer("2", 300), "a", 0.1)
    a, b = dispatches.views()
    assert (a.waiting, a.prefill_tokens, a.free_blocks) == (2, 400, 1000 - 7 - 19)
    assert b.requests == 0
    dispatches.on_engine_view(replace(engine("a", prefill=90, running=1), taken=frozenset("1"), reported_s=0.5))
    assert [(view.requests, view.prefill_tokens) for view in dispatches.views()] == [(2, 390), (0, 0)]
    assert dispatches.views()[0] is dispatches.views()[0], "nothing has changed"
    dispatches.withdraw("2")
    assert dispatches.views()[0].requests == 1
    dispatches.dispatch(offer("3"), "b", 1.0)
    dispatches.on_engine_view(replace(engine("b"), reported_s=1.0 + FORGET_S + 0.1))
    assert dispatches.views()[1].requests == 0, "lost on the way"
    dispatches.forget("a")
    assert [view.place for view in dispatches.views()] == ["b"]
