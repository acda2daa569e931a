"""Requests that wait for the leader's word wait for no other's, and for none that has forgotten them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from support.waiting import until

from edgemoe.cluster.control.messages import OfferWithdrawal, RequestGrant, RequestOffer
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import PeerUnavailable
from edgemoe.front.request_log import RequestLog
from edgemoe.front.requests import offered_requests
from edgemoe.front.requests.offered_requests import HERE_S, OfferedRequests
from edgemoe.front.requests.open_offers import RouteChoice
from edgemoe.front.requests.prefix_keys import PrefixKeys
from edgemoe.front.requests.prefix_questions import MOST_ASKED
from edgemoe.ipc.messages import PrefixSignatureReply, PrefixSignatureRequest, PromptSignature, Submit, ToEngine
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request, Sampling

pytestmark = pytest.mark.asyncio
REQUEST = Request(id="r", prompt=tuple(range(40)), sampling=Sampling(max_tokens=50), seed=1)
AT_ONCE = RouteChoice("a:1", "at once")
WAITS, NO_LEADER = RouteChoice("", "waits", waits=True), RouteChoice("", "no leader")


class Front:
    """Box a, and what it says to box b, which leads and has no room yet, and to its engine."""

    def __init__(
        self, route: Any = "pull", knows: bool = True, silent: bool = False, prefix_cache: bool = True
    ) -> None:
        self.offered: list[RequestOffer] = []
        self.asked: list[PrefixSignatureRequest] = []
        self.is_up, self.is_free, self.had = True, False, list[Request]()
        self.taken_back: list[int] = []
        plane: Any = SimpleNamespace(
            leader="b",
            state=SimpleNamespace(node="a", model="m", leader_tracker=SimpleNamespace(current=("b", 5))),
            channel=self,
        )
        keys = PrefixKeys(prefix_cache)
        meter: Any = SimpleNamespace(
            starts_at_once=lambda _request: self.is_free,
            knows=lambda _prefix: knows,
            begins_like=lambda prefix: any(keys.prefix(had)[:8] == prefix[:8] for had in self.had),
        )
        self.silent = silent
        self.plane, self.choices = plane, list[RouteChoice]()
        self.log = RequestLog(8, self.submit, lambda *_: None)
        self.offers = OfferedRequests(plane, route, self.log, meter, keys, asyncio.ensure_future, self.tell_here)

    def tell_here(self, message: ToEngine) -> bool:
        assert isinstance(message, PrefixSignatureRequest)
        if self.is_up:
            self.asked.append(message)
        return self.is_up

    def submit(self, message: Submit) -> str:
        self.choices.append(self.offers.choose(message, "a:1" if self.is_up else ""))
        return self.choices[-1].place

    async def ask(self, node: str, offer: RequestOffer, timeout_s: float) -> Answer[Any]:
        assert node == "b"
        self.offered.append(offer)
        if self.silent:
            self.waited_s = timeout_s
            raise PeerUnavailable("it says nothing")
        return Answer(RequestGrant(offer.number))

    def tell(self, node: str, message: OfferWithdrawal) -> None:
        self.taken_back += message.numbers

    async def settled(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_request_waits_for_a_leader_only_while_that_leads_in_the_same_epoch() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        front.log.replay()
        assert front.choices == [WAITS, WAITS]
        front.plane.state.leader_tracker.current = "b", 7
        front.log.replay()
        assert front.choices[2:] == [NO_LEADER]
        assert len(front.offered) == 1


async def test_a_request_waits_for_a_leader_for_so_long_and_takes_its_offer_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offered_requests, "WAIT_S", 0.0)
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        for _ in range(2):
            front.log.replay()
        assert front.choices[1:] == [RouteChoice("", "too long")] * 2
        assert set(front.taken_back) == {front.offered[0].number}


async def test_the_word_of_an_epoch_that_is_over_is_not_followed() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        (offer,) = front.offered
        front.plane.state.leader_tracker.current = "b", 7
        front.offers.hear(RequestGrant(offer.number, "x:1"))
        assert (front.log.place_of("r"), front.taken_back) == (("", 0), [offer.number])


async def test_the_leaders_word_is_followed_at_once() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        front.offers.hear(RequestGrant(front.offered[0].number, "x:1"))
        assert front.log.place_of("r") == ("x:1", 1)


LONG = Request(id="l", prompt=tuple(range(400)), sampling=Sampling(max_tokens=50), seed=1, user="u")
CACHED, FEW, ALIKE = ExpertSignature(100, b"cached"), ExpertSignature(96, b"few"), ExpertSignature(300, b"alike")


async def test_a_waiting_requests_offer_has_what_the_cached_part_of_its_prompt_chose() -> None:
    front = Front()
    front.had.append(structs.replace(LONG, prompt=tuple(range(64))))
    with front.log.open([LONG], 60.0):
        await front.settled()
        assert (front.choices, front.offered) == ([WAITS], [])
        assert front.asked == [PrefixSignatureRequest(request="l", prompt=LONG.prompt)]
        for _ in range(2):
            front.offers.learn(PrefixSignatureReply(request="l", signature=CACHED))
            await front.settled()
        assert [offer.signature for offer in front.offered] == [CACHED]
        assert front.offers.forecast == {"cached": 1, "alike": 0}
        front.offers.hear(RequestGrant(front.offered[0].number, "x:1"))
        assert front.log.place_of("l") == ("x:1", 1)


@pytest.mark.parametrize("found", [FEW, None])
async def test_where_little_of_it_is_cached_or_the_answer_is_late_an_alike_prompt_says_more(found: Any) -> None:
    front = Front()
    front.had.append(LONG)
    with front.log.open([LONG], 60.0):
        front.offers.learn(PromptSignature(request="l", attempt=1, signature=ALIKE))
    with front.log.open([structs.replace(LONG, id="m")], 60.0):
        if found is not None:
            front.offers.learn(PrefixSignatureReply(request="m", signature=found))
        await until(lambda: front.offered)
        front.offers.learn(PrefixSignatureReply(request="m", signature=CACHED))
        await front.settled()
        assert [offer.signature for offer in front.offered] == [ALIKE]
        assert front.offers.forecast == {"cached": 0, "alike": 1}


async def test_where_our_engine_keeps_no_prompts_none_is_offered_by_its_keys_but_what_an_alike_one_chose() -> None:
    for keeps in (True, False):
        front = Front(prefix_cache=keeps)
        with front.log.open([LONG], 60.0):
            front.offers.learn(PromptSignature(request="l", attempt=1, signature=ALIKE))
        with front.log.open([structs.replace(LONG, id="m")], 60.0):
            await front.settled()
            (_, offer) = front.offered
            assert (bool(offer.prefix), offer.signature) == (keeps, ALIKE)


async def test_little_is_better_than_nothing() -> None:
    front = Front()
    front.had.append(LONG)
    with front.log.open([LONG], 60.0):
        front.offers.learn(PrefixSignatureReply(request="l", signature=FEW))
        await front.settled()
        assert [offer.signature for offer in front.offered] == [FEW]


async def test_no_request_is_held_for_a_question_that_would_be_of_no_use() -> None:
    """A new prompt's, one that could start at once, one while no engine is there, one where nobody reads signatures."""
    for what in ("new", "free", "down", "gimbal"):
        front = Front({"free": "eldr", "gimbal": "gimbal"}.get(what, "pull"))
        front.had += [] if what == "new" else [LONG]
        front.is_free, front.is_up = what == "free", what != "down"
        if what == "free":
            with front.log.open([LONG], 60.0):
                front.offers.learn(PromptSignature(request="l", attempt=1, signature=ALIKE))
        with front.log.open([structs.replace(LONG, id="m")], 60.0):
            await front.settled()
            assert (len(front.offered), front.asked) == (1, []), what


async def test_what_ends_while_our_engine_is_asked_is_not_offered_and_questions_are_bounded() -> None:
    front = Front()
    front.had.append(LONG)
    front.log.capacity = 8 * MOST_ASKED
    with front.log.open([structs.replace(LONG, id=f"l{n}") for n in range(MOST_ASKED + 2)], 60.0):
        await front.settled()
        assert (len(front.asked), len(front.offered)) == (MOST_ASKED, 2)
    front.offers.learn(PrefixSignatureReply(request="l0", signature=CACHED))
    await front.settled()
    assert len(front.offered) == 2


async def test_what_our_engine_can_start_at_once_starts_there_unasked_if_it_knows_the_prompt_or_nobody_leads() -> None:
    front = Front()
    front.is_free = True
    with front.log.open([REQUEST], 60.0):
        assert front.choices == [AT_ONCE]
    front = Front(knows=False)
    front.is_free, front.plane.leader = True, ""
    with front.log.open([REQUEST], 60.0):
        assert front.choices == [AT_ONCE]


async def test_a_prompt_that_our_engine_does_not_know_goes_where_the_leader_says_or_starts_here_after_its_answer() -> (
    None
):
    front = Front(knows=False)
    front.is_free = True
    with front.log.open([REQUEST], 60.0):
        assert front.choices == [WAITS]
        await front.settled()
        assert front.choices[1:] == [RouteChoice("", "at once")], "as without a leader, which is at our engine"
        assert front.taken_back == [front.offered[0].number], "whatever it grants later"
    silent = Front(knows=False, silent=True)
    silent.is_free = True
    with silent.log.open([REQUEST], 60.0):
        await silent.settled()
        assert silent.choices == [WAITS, RouteChoice("", "unanswered")]
        assert silent.waited_s == HERE_S
