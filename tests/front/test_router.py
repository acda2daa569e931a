"""The front's choice of engines: what it counts, what it tells of offers, whom it avoids and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from edgemoe.cluster.control.messages import ForwardedFrame, FrameAccepted, Heartbeat, RequestGrant
from edgemoe.cluster.control.requests.parcels import Parcels
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import PeerBusy
from edgemoe.front import router as router_module
from edgemoe.front.request_log import RequestLog
from edgemoe.front.requests.open_offers import RouteChoice
from edgemoe.front.router import Router
from edgemoe.ipc.messages import (
    Cancel,
    FetchPrefixKV,
    LastChunkStarted,
    PrefixKVFetched,
    Submit,
    ToEngine,
    decode_to_engine,
)
from edgemoe.policy.route import EngineLoad
from edgemoe.types.request import Request, Sampling
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

pytestmark = pytest.mark.asyncio
REQUEST = Request(id="r", prompt=tuple(range(40)), sampling=Sampling(max_tokens=50), seed=1)


class Members:
    """Box d, whose engine decodes while it is there, and perhaps e."""

    def __init__(self) -> None:
        self.there, self.looked_at = True, 0
        self.beats = {"d": Heartbeat(engine="1", slots=4, capacity=10)}

    def serving(self, model: str) -> dict[str, str]:
        return {f"{node}:{beat.engine}": node for node, beat in self.beats.items()} if self.there else {}

    def __getitem__(self, node: str) -> Any:
        self.looked_at += 1
        return SimpleNamespace(beat=self.beats[node], announcement=SimpleNamespace(serves="decode"))


class Front:
    """Box p, which prefills. What it asks of d is written down; the leader's word is what the test says."""

    def __init__(self, role: str = "prefill") -> None:
        self.members, self.own, self.own_requests = Members(), True, 0
        self.choice = RouteChoice("", "no leader")
        self.again = RequestGrant(77, "d:1")
        self.asked: list[tuple[ForwardedFrame, ToEngine]] = []
        self.here: list[ToEngine] = []
        self.over: list[str] = []  # requests whose offers came to nothing
        self.busy = False  # d
        self.arrives = asyncio.Event()
        self.arrives.set()
        self.withdrawn: list[int] = []
        plane: Any = SimpleNamespace(
            state=SimpleNamespace(node="p", model="m", members=self.members),
            announcement=SimpleNamespace(serves=role),
            channel=self,
            parcels=Parcels(self, lambda: None),  # type: ignore[arg-type]
        )
        self.log = RequestLog(8, lambda message: self.router.submit(message), lambda *_: None)
        offers: Any = self
        self.router = Router(
            plane, offers, self.log, self.load, self.submit_here, self.tell_here, asyncio.ensure_future
        )

    # --- the channel

    def version(self, node: str) -> int:
        return PROTOCOL_VERSIONS.highest

    async def ask(self, node: str, asked: ForwardedFrame, frames: Sequence[bytes], timeout_s: float) -> Answer[Any]:
        if self.busy and node == "d":
            raise PeerBusy("there is no room")
        await self.arrives.wait()
        self.asked.append((asked, decode_to_engine(frames[0])))
        return Answer(FrameAccepted())

    # --- offers

    learns, rule = False, "local"

    def choose(self, message: Submit, own_place: str) -> RouteChoice:
        return self.choice

    def waits(self, request: str) -> bool:
        return self.choice.waits

    def use(self, request: str) -> int:
        return 5

    def failed(self, request: str) -> None:
        self.over.append(request)

    def withdraw(self, numbers: list[int]) -> None:
        self.withdrawn += numbers

    def offer_again(self, message: Submit, signature: object, then: Callable[[RequestGrant], None]) -> None:
        then(self.again)

    # --- our engine

    def load(self) -> EngineLoad | None:
        return EngineLoad("boot", True, self.own_requests, 4, 10) if self.own else None

    def submit_here(self, message: Submit, offer: int) -> str:
        self.here.append(message)
        return "boot" if self.own else ""

    def tell_here(self, message: ToEngine) -> bool:
        self.here.append(message)
        return True


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_engine_may_call_itself_what_it_will() -> None:
    front = Front("both")
    front.members.beats["d"] = Heartbeat(engine="x:y:z", slots=4, capacity=10)
    with front.log.open([REQUEST], 60.0):
        assert front.log.place_of("r") == ("boot", 1)
        assert not front.over
    front.own = False
    with front.log.open([REQUEST], 60.0):
        await settled()
        assert front.log.place_of("r") == ("d:x:y:z", 1)


async def test_what_is_handed_over_comes_by_the_offer_that_the_leader_counts_it_by() -> None:
    front = Front()
    with front.log.open([REQUEST], 60.0):
        front.router.learn(LastChunkStarted(request="r", attempt=1))
        await settled()
        front.router.learn(PrefixKVFetched(request="r", attempt=1, blocks=2), "d")
        await settled()
        (pull, pulled), (forward, moved) = front.asked
        assert (isinstance(pulled, FetchPrefixKV), pull.offer) == (True, 0)
        assert isinstance(moved, Submit)
        assert (moved.attempt, forward.offer) == (2, 77)
        assert isinstance(front.here[-1], Cancel)
        assert dict(front.router.routed) == {("here", "no leader"): 1, ("elsewhere", "handed over"): 1}


async def test_a_box_that_the_leader_did_not_name_decodes_by_no_offer() -> None:
    front = Front()
    front.again = RequestGrant(77, "x:9")
    with front.log.open([REQUEST], 60.0):
        front.router.learn(LastChunkStarted(request="r", attempt=1))
        await settled()
        front.router.learn(PrefixKVFetched(request="r", attempt=1, blocks=2), "d")
        await settled()
        assert [forward.offer for forward, _ in front.asked] == [0, 0]


@pytest.mark.parametrize("what", ["a request", "a prefix"])
async def test_an_engine_that_turned_something_away_is_asked_again_a_moment_later(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front()
    now_s = router_module.time.monotonic()
    monkeypatch.setattr(router_module.time, "monotonic", lambda: now_s)
    front.own, front.busy = what == "a prefix", what == "a request"
    monkeypatch.setattr(front, "choose", lambda *_: RouteChoice("" if front.own or front.over else "d:1", "a trial"))
    with front.log.open([REQUEST], 60.0):
        front.busy = True
        if what == "a prefix":
            front.router.learn(LastChunkStarted(request="r", attempt=1))
        await settled()
        assert not front.router.is_open("d:1")
        now_s += router_module.AVOID_S + 0.1
        assert front.router.is_open("d:1")


@pytest.mark.parametrize("running", [0, 4])
async def test_where_one_box_does_not_fetch_a_requests_blocks_another_one_with_a_free_slot_does(running: int) -> None:
    front = Front()
    front.members.beats["e"] = Heartbeat(engine="2", slots=4, capacity=10, requests=running)
    with front.log.open([REQUEST], 60.0):
        front.busy = True
        front.router.learn(LastChunkStarted(request="r", attempt=1))
        await settled()
        assert front.withdrawn == [77], "the leader counts on the first one no more"
        assert len(front.asked) == len(front.router.hand_overs) == (0 if running else 1)
        front.router.learn(PrefixKVFetched(request="r", attempt=1, blocks=2), "e")
        await settled()
        assert front.log.place_of("r") == (("boot", 1) if running else ("e:2", 2))


async def test_what_arrives_after_it_was_given_up_is_recalled() -> None:
    """A long frame: short messages may overtake it."""
    front = Front("both")
    front.choice = RouteChoice("d:1", "granted")
    front.arrives = asyncio.Event()
    with front.log.open([REQUEST], 60.0):
        await settled()
    assert not front.asked
    front.arrives.set()
    await settled()
    assert [type(message) for _, message in front.asked] == [Submit, Cancel]


async def test_what_no_engine_takes_is_not_counted_as_routed() -> None:
    front = Front("both")
    front.own = front.members.there = False
    with front.log.open([REQUEST], 60.0):
        front.log.replay()
        assert not front.router.routed
        front.own = True
        front.log.replay()
        assert dict(front.router.routed) == {("here", "alone"): 1}


async def test_an_engine_that_was_granted_and_has_gone_is_given_back_and_another_one_takes_the_request() -> None:
    front = Front("both")
    front.choice = RouteChoice("d:0", "granted")
    with front.log.open([REQUEST], 60.0):
        assert (front.over, front.log.place_of("r")) == (["r"], ("boot", 1))
        assert dict(front.router.routed) == {("here", "gone"): 1}


async def test_a_request_that_waits_for_the_leaders_word_has_no_engine_looked_at_for_it() -> None:
    """It is submitted again at each beat, and so are hundreds of others."""
    front = Front("both")
    front.choice = RouteChoice("", "waits", waits=True)
    with front.log.open([REQUEST], 60.0):
        front.members.looked_at = 0
        front.log.replay(["boot", *front.router.places()])
        assert (front.log.place_of("r"), front.members.looked_at) == (("", 0), 0)
        front.choice = RouteChoice("d:1", "granted")
        front.log.submit_waiting("r")
        assert front.log.place_of("r") == ("d:1", 1)


@pytest.mark.parametrize("role", ["both", "prefill"])
async def test_a_request_for_its_prompts_log_probabilities_stays_here_while_there_is_an_engine(role: str) -> None:
    front = Front(role)
    front.choice = RouteChoice("d:1", "granted")
    front.own_requests = 10
    asking = msgspec.structs.replace(REQUEST, sampling=Sampling(max_tokens=50, prompt_logprobs=0))
    with front.log.open([asking], 60.0):
        await settled()
        assert (front.log.place_of("r"), front.asked) == (("", 0), []), "ours is full"
        front.own_requests = 0
        front.log.submit_waiting("r")
        await settled()
        (submit,) = front.here
        assert isinstance(submit, Submit)
        assert (front.log.place_of("r"), submit.hand_over, front.asked) == (("boot", 1), False, [])
        front.own = False
        front.log.replay(front.router.places())
        await settled()
        assert front.log.place_of("r") == ("d:1", 2)
