"""Expert clusters follow the requests' choices and the set of engines, with as few changes as possible."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest

from edgemoe.cluster.control.messages import LoadReport, RequestOffer
from edgemoe.cluster.control.planning.fitting_child import fit
from edgemoe.cluster.control.planning.planning_questions import MAX_REQUESTS, ClusterAnswer, ClusterQuestion
from edgemoe.cluster.control.requests.expert_fitting import (
    FIRST,
    GONE_S,
    MOST_BYTES,
    REFIT_S,
    SETTLE_S,
    ExpertFitting,
)
from edgemoe.cluster.control.requests.offer_queue import (
    EngineReported,
    GrantOffer,
    LeadershipChanged,
    OfferQueue,
    RequestOffered,
    ServingEngines,
)
from edgemoe.cluster.control.requests.request_desk import make_queue
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import PlanningFailed
from edgemoe.policy.routing.signatures import ModelSizes, shares_of
from edgemoe.types.arrays import IntArray
from edgemoe.types.expert_signatures import EndedRequest, ExpertSignature

pytestmark = pytest.mark.asyncio
LAYERS, EXPERTS, TOP_K, SLOTS = 2, 12, 2, 4
SIZES = ModelSizes(LAYERS, EXPERTS)
Kind = Literal["low", "mid", "high"]
CHOSEN: dict[Kind, int] = {"low": 0, "mid": 4, "high": 8}  # the first of the four experts that a kind's tokens choose
RNG = np.random.default_rng(3)


def chosen(kind: Kind, tokens: int) -> ExpertSignature:
    counts: IntArray = np.zeros((LAYERS, EXPERTS), np.int64)
    for layer in range(LAYERS):
        counts[layer, CHOSEN[kind] : CHOSEN[kind] + 4] = RNG.multinomial(tokens * TOP_K, [0.4, 0.3, 0.2, 0.1])
    return ExpertSignature(*shares_of(counts, TOP_K))


def ended(*kinds: Kind, times: int = 1) -> list[EndedRequest]:
    return [EndedRequest(chosen(kind, 120), chosen(kind, 60)) for _ in range(times) for kind in kinds]


class Leader:
    """A leader's queue with a clock of its own, its clusters fitted in place."""

    def __init__(self) -> None:
        self.now_s, self.number = 100.0, 0
        self.asked: list[ClusterQuestion] = []
        self.broken, self.sizes = False, SIZES
        made = make_queue(ClusterSettings(route="eldr"), self.fit, lambda: self.now_s)
        assert made[1] is not None
        self.queue: OfferQueue = made[0]
        self.fitting: ExpertFitting = made[1]
        self.queue.handle(LeadershipChanged(1))
        self.serve("a", "b")

    async def fit(self, asked: ClusterQuestion) -> ClusterAnswer:
        self.asked.append(asked)
        if self.broken:
            raise PlanningFailed("the solver's process failed")
        return fit(asked)

    def serve(self, *nodes: str, boot: str = "1", **more: int) -> None:
        """Reports these boxes' engines as serving and idle."""
        places = frozenset(f"{node}:{boot}" for node in nodes)
        self.queue.handle(ServingEngines(frozenset(nodes), places, self.sizes, places))
        for node in nodes:
            fixed = {"engine": boot, "slots": SLOTS, "capacity": 100, "blocks": 1000, "free_blocks": 1000}
            self.queue.handle(EngineReported(node, msgspec.convert({"type": "EngineUse", **fixed, **more}, LoadReport)))

    def grants(self, kind: Kind | None, stage: Literal["prefill", "decode"] = "prefill") -> tuple[str, str]:
        """Returns the engine that gets a request of this kind, and the reason; then withdraws the request."""
        self.number += 1
        signature = chosen(kind, 100) if kind is not None else None
        asked = RequestOffer(self.number, "m", 10, 10, remaining_ms=1e4, signature=signature, stage=stage)
        if stage == "decode":
            found = self.queue.decoder("a", asked), ""
        else:
            (grant,) = self.queue.handle(RequestOffered("a", asked))
            assert isinstance(grant, GrantOffer)
            found = grant.place, grant.why
        self.now_s += 6.0  # a dispatch counts as load until it is confirmed or this time has passed
        self.serve(*sorted({view.place.split(":")[0] for view in self.queue.writing()}), boot=found[0].split(":")[1])
        return found

    async def looks(self, after_s: float = 0.0) -> int:
        """Returns how often clusters have been fitted."""
        self.now_s += after_s
        await self.fitting.refit_if_due()
        return self.fitting.fits

    def engines(self) -> dict[Kind, str]:
        """Returns the box that the locality band chooses for each kind."""
        return {kind: self.grants(kind)[0].split(":")[0] for kind in CHOSEN}


async def test_each_kind_has_its_engine_once_enough_requests_have_ended() -> None:
    leader = Leader()
    leader.fitting.add_ended(ended("low", "high", times=FIRST // 2)[:-1])
    assert await leader.looks() == 0
    assert leader.grants("low")[1] == ""
    leader.fitting.add_ended(ended("high"))
    assert await leader.looks() == 1
    low, high = leader.grants("low"), leader.grants("high")
    assert {low[0], high[0]} == {"a:1", "b:1"}
    assert (low[1], high[1]) == ("nearest", "nearest")
    assert leader.grants("low", "decode")[0] == low[0], "who goes on with what is prefilled"
    assert leader.grants(None)[1] == "", "of whom nothing is known is pulled"
    assert await leader.looks(2 * REFIT_S) == 1


async def test_drift_causes_a_new_fit_and_remaining_clusters_keep_their_engine() -> None:
    leader = Leader()
    leader.fitting.add_ended(ended("low", "high", times=100))
    assert await leader.looks() == 1
    before = leader.engines()
    leader.fitting.add_ended(ended("low", "high", times=32))
    assert await leader.looks(REFIT_S) == 1, "they are as they were"
    leader.fitting.add_ended(ended("low", "mid", times=32))
    assert await leader.looks(REFIT_S) == 2
    after = leader.engines()
    assert after["low"] == before["low"]
    assert len(leader.asked[1].before) == len(leader.asked[1].requests) == 200 + 64 + 64


async def test_twice_as_many_requests_are_fitted_to_and_no_more_than_a_thousand_are_kept() -> None:
    leader = Leader()
    leader.fitting.add_ended(ended("low", "high", times=FIRST // 2))
    assert await leader.looks() == 1
    leader.fitting.add_ended(ended("low", "high", times=FIRST // 2))
    assert await leader.looks(REFIT_S / 2) == 1
    assert await leader.looks(REFIT_S / 2) == 2
    leader.fitting.add_ended(ended("low", "high", times=MAX_REQUESTS))
    assert await leader.looks(REFIT_S) == 3
    assert [len(asked.requests) for asked in leader.asked] == [FIRST, 2 * FIRST, MAX_REQUESTS]


async def test_an_engine_that_starts_again_keeps_its_cluster_and_one_that_comes_gets_one() -> None:
    leader = Leader()
    leader.fitting.add_ended(ended("low", "mid", "high", times=40))
    assert await leader.looks() == 1
    before = leader.engines()
    leader.serve("a", "b", boot="2")
    assert leader.grants("low")[1] == "", "not before it is looked where engines are"
    assert await leader.looks() == 1
    assert leader.grants("low") == (f"{before['low']}:2", "nearest")
    leader.serve("a", "b", "c", boot="2")
    assert await leader.looks() == 1
    assert leader.grants("low")[1] == "", "an engine has no cluster yet"
    assert await leader.looks(SETTLE_S) == 2
    after = leader.engines()
    assert set(after.values()) == {"a", "b", "c"}
    assert sum(after[kind] == before[kind] for kind in CHOSEN) == 2
    leader.serve("a", "b", "c", boot="2", slots=3 * SLOTS)
    assert await leader.looks(SETTLE_S) == 3, "their slots are others"
    assert leader.asked[-1].slots == (12, 12, 12)
    await leader.looks()
    leader.serve("a", "b", boot="2", slots=3 * SLOTS)
    leader.fitting.add_ended(ended("low", "mid", "high", times=200))
    assert await leader.looks(REFIT_S) == 3, "it may be back"
    gone = next(kind for kind in CHOSEN if leader.engines()[kind] != leader.engines()["low"])
    assert leader.grants(gone)[1] in ("nearest", "in band"), "those that are left go on by theirs"
    leader.serve("a", "b", boot="2", slots=3 * SLOTS)
    assert await leader.looks(GONE_S) == 4
    assert leader.asked[-1].slots == (12, 12)


async def test_a_new_leader_and_another_model_start_without_clusters() -> None:
    leader = Leader()
    leader.fitting.add_ended(ended("low", "high", times=FIRST))
    assert await leader.looks() == 1
    leader.fitting.forget()
    assert leader.grants("low")[1] == ""
    assert leader.fitting.fitted is None
    leader.fitting.add_ended(ended("low", "high", times=FIRST))
    assert await leader.looks() == 2
    leader.sizes = ModelSizes(LAYERS, EXPERTS + 1)
    leader.serve("a", "b")
    assert leader.grants("low")[1] == ""
    leader.fitting.add_ended(ended("low", "high", times=FIRST))  # of the former model
    assert await leader.looks(REFIT_S) == 2
    assert leader.fitting.fitted is None


async def test_a_failed_fit_is_repeated_after_a_while() -> None:
    leader = Leader()
    leader.broken = True
    leader.fitting.add_ended(ended("low", "high", times=FIRST))
    for wait_s in (0.0, REFIT_S / 2, REFIT_S / 2):
        await leader.looks(wait_s)
    assert (leader.fitting.fits, len(leader.asked)) == (0, 2)
    assert leader.grants("low")[1] == ""
    leader.broken = False
    assert await leader.looks(REFIT_S) == 1
    one = Leader()
    one.serve("a")
    one.fitting.add_ended(ended("low", "high", times=FIRST))
    assert await one.looks() == 0, "there is nothing to choose between"


async def test_tables_of_no_use_are_left_out_and_large_ones_bounded() -> None:
    leader = Leader()
    good = ended("low")[0]
    empty = ExpertSignature(0, good.prompt.chosen)
    short = ExpertSignature(5, b"x")
    leader.fitting.add_ended([EndedRequest(good.prompt, each) for each in (empty, short)] * FIRST)
    leader.fitting.add_ended([EndedRequest(ExpertSignature(0, b""), ExpertSignature(0, b""))] * FIRST)
    assert await leader.looks() == 0
    dark = ExpertSignature(9, bytes(2 * LAYERS * EXPERTS))
    leader.fitting.add_ended([EndedRequest(dark, dark)] * FIRST)
    assert await leader.looks() == 1, "none of them chose anything"
    assert leader.grants("low")[1] in ("nearest", "in band")
    layers = 1 << 17
    leader.sizes = ModelSizes(layers, 1)
    leader.serve("a", "b")
    large = ExpertSignature(9, bytes(2 * layers))
    leader.fitting.add_ended([EndedRequest(large, large)] * 200)
    assert leader.fitting.kept * 4 * layers <= MOST_BYTES
