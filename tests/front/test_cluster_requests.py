"""A front's questions to other boxes and to the leader about its requests, and the effects of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from support.waiting import until

from edgemoe.cluster.control.messages import (
    ForwardedFrame,
    FrameAccepted,
    Heartbeat,
    LostRequestsReply,
    OfferWithdrawal,
    RequestGrant,
    RequestOffer,
)
from edgemoe.cluster.control.requests.parcels import RequestParcels
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.config.settings import EngineSettings
from edgemoe.errors import PeerBusy, PeerUnavailable
from edgemoe.front import cluster_requests
from edgemoe.front.cluster_requests import OFFER_ASK_S, STARTS_HERE_ASK_S, ClusterRequests
from edgemoe.front.prompt_hints import PrefixKeys
from edgemoe.front.request_events import EnginesChanged, TimePassed
from edgemoe.front.request_router import RequestRouter
from edgemoe.ipc.messages import (
    Cancel,
    FetchPrefixKV,
    LastChunkStarted,
    PrefixKVFetched,
    PrefixSignatureReply,
    PrefixSignatureRequest,
    PromptSignature,
    Submit,
    ToEngine,
    decode_to_engine,
)
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission, Request, Sampling
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

pytestmark = pytest.mark.asyncio
REQUEST = Request(id="r", prompt=tuple(range(400)), sampling=Sampling(max_tokens=50), seed=1, user="u")
CACHED, FEW, ALIKE = ExpertSignature(100, b"cached"), ExpertSignature(96, b"few"), ExpertSignature(300, b"alike")


class Members(dict[str, Any]):
    """Box d; its engine accepts requests while it is up."""

    def __init__(self) -> None:
        super().__init__(d=SimpleNamespace(beat=Heartbeat(engine="x:y:z", slots=4, capacity=10), announcement=None))

    def serving(self, model: str) -> dict[str, str]:
        return {f"{node}:{member.beat.engine}": node for node, member in self.items()}

    def standing_still(self) -> list[str]:
        return []


class Box:
    """Box p, which records its messages to d, to the leader and to its engine; d leads unless p does."""

    def __init__(self, route: Any = "pull", role: str = "both", prefix_cache: bool = True, leader: str = "d") -> None:
        self.here: list[ToEngine] = []
        self.asked: list[tuple[ForwardedFrame, ToEngine]] = []
        self.offers: list[RequestOffer] = []
        self.withdrawn: list[int] = []
        self.waited_s: list[float] = []
        self.place, self.busy, self.silent, self.grants = "boot", False, False, ""
        self.lost: tuple[tuple[str, int], ...] = ()
        self.arrives = asyncio.Event()
        self.arrives.set()
        self.engine, self.stands_still = None, False
        tracker = SimpleNamespace(current=(leader, 5))
        plane: Any = SimpleNamespace(
            leader=leader,
            state=SimpleNamespace(node="p", model="m", members=Members(), leader_tracker=tracker),
            announcement=SimpleNamespace(serves=role, leaving=False),
            channel=self,
            desk=SimpleNamespace(on_offer=self.decide, on_withdrawal=self.on_withdrawal),
            parcels=RequestParcels(self, lambda: None),  # type: ignore[arg-type]
            spawn=asyncio.ensure_future,
        )
        settings = EngineSettings(max_sequences=4, max_queue=4)
        self.router = RequestRouter(settings, self)  # type: ignore[arg-type]
        hosted: Any = ()
        self.requests = ClusterRequests(plane, route, self.router, hosted, PrefixKeys(prefix_cache))
        self.machine = self.router.machine

    # --- the engine

    def send(self, message: ToEngine) -> bool:
        self.here.append(message)
        return bool(self.place)

    # --- the channel

    def version(self, node: str) -> int:
        return PROTOCOL_VERSIONS.highest

    async def ask(self, node: str, asked: Any, frames: Sequence[bytes] = (), *, timeout_s: float) -> Answer[Any]:
        self.waited_s.append(timeout_s)
        if isinstance(asked, RequestOffer):
            return Answer(self.decide(node, asked))
        if not isinstance(asked, ForwardedFrame):
            return Answer(LostRequestsReply(self.lost))
        if self.busy:
            raise PeerBusy("there is no room")
        await self.arrives.wait()
        self.asked.append((asked, decode_to_engine(frames[0])))
        return Answer(FrameAccepted())

    def decide(self, node: str, offer: RequestOffer) -> RequestGrant:
        self.offers.append(offer)
        if self.silent:
            raise PeerUnavailable("it says nothing")
        return RequestGrant(offer.number, self.grants)

    def on_withdrawal(self, node: str, message: OfferWithdrawal) -> None:
        self.withdrawn += message.numbers

    notify_peer = on_withdrawal  # the channel's method

    def open(self, request: Request = REQUEST) -> Any:
        return self.router.open([request], 60.0)


async def settled() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def full(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills its engine, so that requests wait."""
    monkeypatch.setattr(box.requests.meter, "starts_at_once", lambda _: False)


async def test_a_request_goes_where_the_leader_says_by_its_offer_and_is_cancelled_there() -> None:
    box = Box()
    box.grants = "d:x:y:z"  # engine names may contain any characters
    with box.open():
        await settled()
        assert box.machine.place_of("r") == ("d:x:y:z", 1)
        ((forward, submit),) = box.asked
        assert isinstance(submit, Submit)
        assert (forward.model, forward.offer, submit.signature) == ("m", box.offers[0].number, True)
        assert box.machine.arrived() == {"d:x:y:z": [("r", 1)]}
    await settled()
    assert box.asked[1][1] == Cancel(request="r", attempt=1)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_leading_box_asks_itself_at_once(silent: bool) -> None:
    box = Box(leader="p")
    box.grants, box.silent = "p:boot", silent
    with box.open():
        assert box.machine.place_of("r") == ("boot", 1)
        assert list(box.machine.routed) == [("here", "unanswered" if silent else "granted")]
        assert box.requests.meter._taken[0][1] == ("p", box.offers[0].number) if not silent else True


async def test_a_leader_that_is_silent_has_the_request_served_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for starts_here in (True, False):
        box = Box()
        box.silent = True
        monkeypatch.setattr(box.requests.meter, "starts_at_once", lambda _: starts_here)  # noqa: B023
        with box.open():
            await settled()
            assert box.machine.place_of("r")[1] == 1
            assert box.waited_s[0] == (STARTS_HERE_ASK_S if starts_here else OFFER_ASK_S)
            assert {why for _, why in box.machine.routed} == {"unanswered"}


async def test_an_offer_has_all_that_the_leader_needs_of_a_request() -> None:
    box = Box()
    with box.open():
        await settled()
        (offer,) = box.offers
        keys = box.requests.keys
        assert (offer.prompt_tokens, offer.max_tokens, offer.model, offer.stage) == (400, 50, "m", "prefill")
        assert (offer.user, offer.prefix) == (keys.name("u"), keys.prefix(REQUEST))
        assert offer.principal == keys.name(REQUEST.identity.principal)


async def test_an_offer_has_the_signature_of_the_prompt_s_cached_part(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()
    full(box, monkeypatch)
    box.requests.meter.note(Submit(request=structs.replace(REQUEST, prompt=tuple(range(64)))))
    with box.open():
        await settled()
        assert (box.here, box.offers) == ([PrefixSignatureRequest(request="r", prompt=REQUEST.prompt)], [])
        for _ in range(2):
            box.requests.on_news(PrefixSignatureReply(request="r", signature=CACHED))
        await settled()
        assert [offer.signature for offer in box.offers] == [CACHED]
        assert box.requests.forecast == {"cached": 1, "alike": 0}


@pytest.mark.parametrize("found", [FEW, None])
async def test_with_a_small_cached_part_or_a_late_answer_a_similar_prompt_s_signature_is_offered(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box()
    full(box, monkeypatch)
    with box.open(structs.replace(REQUEST, id="l")):
        box.requests.on_news(PromptSignature(request="l", attempt=1, signature=ALIKE))
        await settled()
    box.requests.meter.note(Submit(request=REQUEST))
    box.offers.clear()
    with box.open():
        if found is not None:
            box.requests.on_news(PrefixSignatureReply(request="r", signature=found))
        await until(lambda: box.offers)
        box.requests.on_news(PrefixSignatureReply(request="r", signature=CACHED))
        assert [offer.signature for offer in box.offers] == [ALIKE]
        assert box.requests.forecast["alike"] == 1


async def test_little_is_better_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()
    full(box, monkeypatch)
    box.requests.meter.note(Submit(request=REQUEST))
    with box.open():
        box.requests.on_news(PrefixSignatureReply(request="r", signature=FEW))
        await settled()
        assert [offer.signature for offer in box.offers] == [FEW]


async def test_without_a_prefix_cache_offers_have_a_similar_prompt_s_signature_and_no_keys() -> None:
    for keeps in (True, False):
        box = Box(prefix_cache=keeps)
        with box.open(structs.replace(REQUEST, id="l")):
            box.requests.on_news(PromptSignature(request="l", attempt=1, signature=ALIKE))
        with box.open():
            await settled()
            offer = box.offers[-1]
            assert (bool(offer.prefix), offer.signature) == (keeps, ALIKE)


async def test_a_box_that_turns_a_request_away_is_left_out() -> None:
    box = Box()
    box.grants, box.busy = "d:x:y:z", True
    with box.open():
        await settled()
        assert box.machine.place_of("r") == ("boot", 2)
        assert box.withdrawn == [box.offers[0].number]


async def test_a_request_moves_between_boxes_by_the_messages_of_its_engines() -> None:
    box = Box("least", role="prefill")
    with box.open():
        assert isinstance(submit := box.here[-1], Submit)
        assert submit.hand_over
        box.requests.on_news(LastChunkStarted(request="r", attempt=1))
        await settled()
        assert isinstance(box.asked[0][1], FetchPrefixKV)
        box.requests.on_news(PrefixKVFetched(request="r", attempt=1, blocks=2), "d")
        await settled()
        assert box.machine.place_of("r") == ("d:x:y:z", 2)
        assert box.here[-1] == Cancel(request="r", attempt=1)


async def test_the_leader_chooses_the_decoder_by_the_prompt_s_signature() -> None:
    box = Box(role="prefill", leader="p")
    box.grants = "p:boot"
    with box.open():
        box.grants = "d:x:y:z"
        box.requests.on_news(LastChunkStarted(request="r", attempt=1, signature=ALIKE))
        await settled()
        assert [(offer.stage, offer.signature) for offer in box.offers][1:] == [("decode", ALIKE)]
        box.requests.on_news(PrefixKVFetched(request="r", attempt=1, blocks=2), "d")
        await settled()
        assert [forward.offer for forward, _ in box.asked] == [0, box.offers[1].number]


async def test_a_fetch_that_is_turned_away_leaves_the_request_where_it_is() -> None:
    box = Box("least", role="prefill")
    box.busy = True
    with box.open():
        box.requests.on_news(LastChunkStarted(request="r", attempt=1))
        await settled()
        assert (box.machine.place_of("r"), box.machine.count_moving()) == (("boot", 1), 0)


async def test_an_answer_after_giving_up_is_cancelled() -> None:
    """A long frame: short messages may overtake it."""
    box = Box()
    box.grants, box.arrives = "d:x:y:z", asyncio.Event()
    with box.open():
        await settled()
    assert not box.asked
    box.arrives.set()
    await settled()
    assert {type(message) for _, message in box.asked} == {Submit, Cancel}
    assert isinstance(box.asked[-1][1], Cancel)


async def test_a_request_forgotten_by_another_box_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_requests, "CHECK_S", 0.01)
    box = Box()
    box.grants, box.lost = "d:x:y:z", (("r", 1), ("ended", 1))
    with box.open():
        checking = asyncio.ensure_future(box.requests.check())
        await until(lambda: box.machine.forgotten)
        checking.cancel()
        assert (box.machine.place_of("r"), box.machine.forgotten) == (("boot", 2), 1)


async def test_tokens_of_an_attempt_that_nobody_waits_for_are_named_to_the_box_that_sent_them() -> None:
    box = Box()
    box.grants = "d:x:y:z"
    with box.open() as submission:
        await settled()
        items = [Emission(request=name, attempt=1, index=0, token=7) for name in ("r", "gone")]
        over = Emission(request="over", attempt=1, index=0, token=7, finish="stop")
        assert box.requests.on_tokens("d", [*items, over]) == FrameAccepted((("gone", 1),))
        assert box.requests.on_tokens("e", items) == FrameAccepted((("r", 1), ("gone", 1)))
        assert [item.request for item in submission._items] == ["r"]


async def test_grants_without_a_place_decide_nothing() -> None:
    box = Box()
    box.router.handle(EnginesChanged())
    box.requests.on_grant(RequestGrant(7))
    box.router.handle(TimePassed())
    assert not box.withdrawn
    box.requests.on_grant(RequestGrant(7, "d:x:y:z"))
    assert box.withdrawn == [7]
