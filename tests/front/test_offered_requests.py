"""Requests that wait for the leader's word wait for no other's, and for none that has forgotten them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from edgemoe.cluster.rpc.control_messages import RequestGrant, RequestOffer, Withdrawal
from edgemoe.cluster.rpc.engine_messages import Submit
from edgemoe.cluster.rpc.transport import Answer
from edgemoe.front.request_log import RequestLog
from edgemoe.front.requests.offered_requests import OfferedRequests, RouteChoice
from edgemoe.front.requests.prefix_keys import PrefixKeys
from edgemoe.types.request import Request, Sampling

pytestmark = pytest.mark.asyncio
REQUEST = Request(id="r", prompt=tuple(range(40)), sampling=Sampling(max_tokens=50), seed=1)
WAITS, NO_LEADER = RouteChoice("", "waits", waits=True), RouteChoice("", "no leader")


class Front:
    """Box a, whose engine is busy, and what it says to box b, which leads and has no room yet."""

    def __init__(self) -> None:
        self.offered: list[RequestOffer] = []
        self.taken_back: list[int] = []
        plane: Any = SimpleNamespace(
            leader="b",
            state=SimpleNamespace(node="a", model="m", obedience=SimpleNamespace(reign=("b", 5))),
            channel=self,
        )
        meter: Any = SimpleNamespace(starts_at_once=lambda _request: False)
        self.plane, self.choices = plane, list[RouteChoice]()
        self.log = RequestLog(8, self.submit, lambda *_: None)
        self.offers = OfferedRequests(plane, "pull", self.log, meter, PrefixKeys(), asyncio.ensure_future)

    def submit(self, message: Submit) -> str:
        self.choices.append(self.offers.choose(message, ""))
        return self.choices[-1].place

    async def ask(self, node: str, offer: RequestOffer, timeout_s: float) -> Answer[Any]:
        assert node == "b"
        self.offered.append(offer)
        return Answer(RequestGrant(offer.number))

    def tell(self, node: str, message: Withdrawal) -> None:
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
        front.plane.state.obedience.reign = "b", 7
        front.log.replay()
        assert front.choices[2:] == [NO_LEADER]
        assert len(front.offered) == 1


async def test_the_word_of_an_epoch_that_is_over_is_not_followed() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        (offer,) = front.offered
        front.plane.state.obedience.reign = "b", 7
        front.offers.hear(RequestGrant(offer.number, "x:1"))
        assert (front.log.place_of("r"), front.taken_back) == (("", 0), [offer.number])


async def test_the_leaders_word_is_followed_at_once() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        await front.settled()
        front.offers.hear(RequestGrant(front.offered[0].number, "x:1"))
        assert front.log.place_of("r") == ("x:1", 1)
