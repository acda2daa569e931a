"""The band routes requests with known experts to near engines with a free slot, all others as usual; none starves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.routing.eldr import IN_BAND, NEAREST, BandRouting, LocalityBand
from edgemoe.policy.routing.offers import RoutingTarget, WaitingRequest, fewest
from edgemoe.policy.routing.pull import PullLimits, PullRouting
from edgemoe.policy.routing.signatures import ClusterFit, ExpertClusters
from edgemoe.types.arrays import FloatArray

LAYERS, EXPERTS = 2, 8
LOW, HIGH, BOTH = (0, 1), (6, 7), (0, 1, 6, 7)


def counts(experts: tuple[int, ...]) -> FloatArray:
    found = np.zeros((LAYERS, EXPERTS), np.float32)
    found[:, list(experts)] = 10
    return found


def clusters(*kinds: tuple[int, ...]) -> ExpertClusters:
    centroids = np.stack([counts(each).ravel() / np.linalg.norm(counts(each)) for each in kinds])
    decode = np.zeros((len(kinds), LAYERS, EXPERTS), np.float32)
    return ExpertClusters(
        np.ones((LAYERS, EXPERTS), np.float32), centroids, decode, ClusterFit(1, 0, np.ones(len(kinds), int))
    )


def band(*places: str) -> LocalityBand:
    """Builds a band of two places; requests of the first choose low experts, of the second high ones."""
    made = LocalityBand(fewest)
    made.follow(clusters(LOW, HIGH), places)
    return made


def offer(name: str, experts: tuple[int, ...] | None, arrived_s: float = 0.0) -> WaitingRequest:
    return WaitingRequest(name, 100, arrived_s, 10, 5.0, signature=None if experts is None else counts(experts))


def engine(place: str, running: int = 0, slots: int = 2) -> RoutingTarget:
    return RoutingTarget(place, slots, 100, 1000, 1000, running=running, tokens_per_s=1000.0)


some = st.lists(st.tuples(st.sampled_from([None, LOW, HIGH]), st.integers(1, 3000)), max_size=6)
engines = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@given(
    asked=some, running=engines, case=st.sampled_from(["no clusters", "no signatures", "an engine without a cluster"])
)
def test_without_known_clusters_requests_are_pulled_as_usual(
    asked: list[tuple[tuple[int, ...] | None, int]], running: list[int], case: str
) -> None:
    rule = LocalityBand(fewest) if case == "no clusters" else band("a", "b")
    offers = [
        replace(offer(str(n), None if case == "no signatures" else kind, -1.0 * n), prompt_tokens=tokens)
        for n, (kind, tokens) in enumerate(asked)
    ]
    places = "ac" if case == "an engine without a cluster" else "ab"
    views = [engine(place, count) for place, count in zip(places, running, strict=True)]
    pull = PullRouting(PullLimits())
    assert BandRouting(rule, pull).assign(offers, views, 5.0) == pull.assign(offers, views, 5.0)
    assert {rule.reason(one, views, "a") for one in offers} <= {""}


@given(asked=some, running=engines)
def test_each_request_goes_once_and_none_to_an_engine_without_a_free_slot(
    asked: list[tuple[tuple[int, ...] | None, int]], running: list[int]
) -> None:
    offers = [replace(offer(str(n), kind), prompt_tokens=tokens) for n, (kind, tokens) in enumerate(asked)]
    views = [engine(place, count) for place, count in zip("ab", running, strict=True)]
    found = BandRouting(band("a", "b"), PullRouting(PullLimits())).assign(offers, views, 5.0)
    assert len({one.request for one in found}) == len(found)
    for view in views:
        assert sum(one.place == view.place for one in found) <= max(0, view.slots - view.requests)
    free, known = sum(max(0, 2 - count) for count in running), sum(kind is not None for kind, _ in asked)
    assert len(found) >= min(free, known) - sum(kind is None for kind, _ in asked), "a slot is free and nobody takes it"


@pytest.mark.parametrize(
    ("experts", "running", "place", "why"),
    [
        (LOW, (1, 0), "a", NEAREST),  # no other is near
        (LOW, (2, 0), "b", IN_BAND),  # the nearest one with a free slot
        (BOTH, (1, 0), "b", IN_BAND),  # as near, and idle
        (BOTH, (0, 0), "a", NEAREST),
        (HIGH, (0, 1), "b", NEAREST),
    ],
)
def test_a_request_goes_to_the_least_loaded_of_the_near_ones(
    experts: tuple[int, ...], running: tuple[int, int], place: str, why: str
) -> None:
    rule, views = band("a", "b"), [engine("a", running[0]), engine("b", running[1])]
    asked = offer("r", experts)
    assert BandRouting(rule, PullRouting(PullLimits())).assign([asked], views, 0.0) == [("r", place)]
    assert rule.reason(asked, views, place) == why
    assert rule(asked, [view for view in views if view.requests < view.slots], 0.0).place == place


def test_requests_that_are_placed_together_see_each_other() -> None:
    views = [engine("a"), engine("b")]
    offers = [offer(str(n), LOW) for n in range(3)] + [offer("new", None)]
    found = dict(BandRouting(band("a", "b"), PullRouting(PullLimits())).assign(offers, views, 0.0))
    assert [found[each] for each in ("0", "1", "2", "new")] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("rare", [None, LOW])
def test_one_of_a_rare_kind_is_served_while_the_others_never_end(rare: tuple[int, ...] | None) -> None:
    routing, usual = BandRouting(band("a", "b"), PullRouting(PullLimits())), LOW if rare is None else None
    waiting = [offer("rare", rare, 0.0)] + [offer(f"first {n}", usual, -5.0) for n in range(5)]
    for now in range(20):
        waiting.append(offer(str(now), usual, float(now)))
        waiting.sort(key=lambda one: one.arrived_s)
        views = [engine("a", 1), engine("b", 2)]  # one slot is free each second
        (taken,) = routing.assign(waiting, views, float(now))
        waiting = [one for one in waiting if one.request != taken.request]
    assert "rare" not in [one.request for one in waiting]


def test_a_signature_of_another_model_is_none() -> None:
    rule = band("a", "b")
    other = replace(offer("r", LOW), signature=np.ones((1, 3), np.float32))
    assert not rule.knows(other)
    assert rule(other, [engine("a", 1), engine("b")], 0.0).place == "b"
    rule.forget()
    assert not rule.knows(offer("r", LOW))
