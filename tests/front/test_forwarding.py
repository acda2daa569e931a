"""Requests on other boxes' engines are answered whole, whichever box dies. Real fronts, scripted engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from support.boxes import Box, secret
from support.boxes import running as boxes_running
from support.front_kit import http_client, listed_boxes, openai_client, running
from support.waiting import until
from tokenizers import Tokenizer

from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import (
    CONTROL,
    MAX_UNWANTED,
    ChannelDescription,
    ForwardedEmissions,
    ForwardedFrame,
    FrameAccepted,
)
from edgemoe.cluster.control.requests.expert_fitting import FIRST
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.config.settings import EngineSettings, Route, Settings
from edgemoe.errors import PeerBusy, PeerRefused, PeerUnavailable
from edgemoe.front import engine_starts
from edgemoe.front import hosted_requests as hosted_module
from edgemoe.front.cluster_requests import ClusterRequests
from edgemoe.front.engine_process import LocalConnection
from edgemoe.front.hosted_requests import MAX_FETCHES, HostedRequests
from edgemoe.front.main import Front
from edgemoe.front.peers_list import listed
from edgemoe.front.prompt_hints import PrefixKeys
from edgemoe.front.request_router import RequestRouter
from edgemoe.front.supervisor import Supervisor
from edgemoe.ipc.messages import Cancel, Emissions, FetchPrefixKV, Submit, decode_from_engine, encode
from edgemoe.telemetry import metrics as names
from edgemoe.types.bounds import REQUEST_CHARS, USER_CHARS
from edgemoe.types.request import Emission, Request, Sampling

DAEMON = Path(__file__).parents[1] / "support" / "daemon_process.py"
TOKENS = 100


@pytest.fixture(autouse=True)
def slow_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_STEP_S", "0.01")


@pytest.fixture
def two(tmp_path: Path, model_dir: Path) -> tuple[Settings, Settings]:
    """Settings of two boxes that list each other."""
    a, b = listed_boxes(tmp_path, model_dir, ("a", "b"), leader="a", route="least")
    return a, b


def cluster_of(front: Front) -> Any:
    assert front.cluster is not None
    return front.cluster


def supervisor_of(front: Front) -> Supervisor:
    assert front.supervisor is not None
    return front.supervisor


def engine_pid(front: Front) -> int:
    return int(supervisor_of(front).describe()["engine"]["pid"])


@asynccontextmanager
async def both(two: tuple[Settings, Settings]) -> AsyncIterator[tuple[Front, Front]]:
    async with running(two[0]) as a, running(two[1]) as b:
        await until(lambda: len(cluster_of(a).requests.others()) == len(cluster_of(b).requests.others()) == 1)
        yield a, b


async def texts(front: Front, count: int = 4, users: int = 1) -> list[str]:
    """Streams `count` completions at once, of `users` in turn."""
    async with openai_client(front.settings) as client:

        async def one(number: int) -> str:
            user = f"user {number % users}" if users > 1 else ""
            stream = await client.completions.create(
                model="tiny", prompt=f"prompt {number}", seed=number, max_tokens=TOKENS, stream=True, user=user
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return list(await asyncio.gather(*map(one, range(count))))


async def streams_once(met: Callable[[], Any], front: Front, expected: list[str]) -> asyncio.Future[list[str]]:
    """Starts streams, and returns them while they run, once `met()` holds. Streams that end before are repeated.

    Boxes may not know each other yet, or not have reported their load since the requests before.
    """
    while True:
        streams = asyncio.ensure_future(texts(front, len(expected)))
        await until(lambda: streams.done() or met())  # noqa: B023
        if not streams.done():
            return streams
        assert await streams == expected


def has_guests(front: Front) -> Callable[[], bool]:
    """Whether other boxes' requests run there."""
    return lambda: len(cluster_of(front).hosted_requests) > 0


async def test_requests_are_spread_and_say_the_same_wherever_they_run(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b):
        at_a = await texts(a)
        assert cluster_of(b).hosted_requests.served == 2
        assert await texts(b) == at_a
        assert not len(cluster_of(a).hosted_requests)
        assert not len(cluster_of(b).hosted_requests)


def routed(one: Settings, route: str, **engine: int) -> Settings:
    """Returns settings with another routing rule, and an engine of this size."""
    return msgspec.structs.replace(
        one,
        cluster=msgspec.structs.replace(one.cluster, route=route),
        engine=msgspec.structs.replace(one.engine, **engine),
    )


@pytest.mark.parametrize(
    "route", [pytest.param(one, marks=() if one == "pull" else pytest.mark.slow) for one in get_args(Route)]
)
async def test_one_boxs_full_queue_turns_nobody_away_and_answers_are_the_same_by_every_rule(
    two: tuple[Settings, Settings], route: str
) -> None:
    small = {"max_sequences": 1, "max_queue": 1}
    async with both((routed(two[0], route, **small), routed(two[1], route))) as (a, b):
        expected = await texts(b, 10)
        assert await texts(a, 10) == expected
        assert cluster_of(b).hosted_requests.served >= 8
        requests, why = cluster_of(a).requests, {why for _, why in supervisor_of(a).requests.machine.routed}
        assert why == {"rule"} if route == "least" else "granted" in why
        if route == "pull":
            assert await texts(a, 10) == expected
            assert sum(requests.forecast.values()) > 0, "what a user's prompts chose before is known"
            leader = next(cluster_of(one) for one in (a, b) if cluster_of(one).plane.leading)
            views = leader.plane.desk.queue._dispatches.views
            await until(lambda: all(view.union is not None for view in views()))


@pytest.mark.slow
async def test_requests_go_by_expert_clusters_once_these_are_fitted_and_answers_are_the_same(
    two: tuple[Settings, Settings],
) -> None:
    """The solver's process is the real one. Each of the two users' requests choose experts of their own."""
    async with both((routed(two[0], "eldr"), routed(two[1], "eldr"))) as (a, b):
        leader = next(cluster_of(one) for one in (a, b) if cluster_of(one).plane.leading)
        fitting = leader.plane.desk.fitting
        expected = await texts(b, 10, users=2)
        while fitting.kept < FIRST:
            assert await texts(a, 10, users=2) == expected
        await until(lambda: fitting.fits, 300)
        before = supervisor_of(a).requests.machine.routed.copy()
        assert await texts(a, 10, users=2) == expected
        since = supervisor_of(a).requests.machine.routed - before
        assert {to for to, _ in since} == {"here", "elsewhere"}
        assert {why for _, why in since} <= {"nearest", "in band"}
        assert since["here", "nearest"] + since["elsewhere", "nearest"] >= 8
        assert (leader.metrics()[names.EXPERT_CLUSTERS], fitting.fits) == (2, 1)


async def test_requests_waiting_for_a_dying_leader_are_answered_all_the_same(two: tuple[Settings, Settings]) -> None:
    """The other box leads. All slots are taken when it is killed, so that requests wait with it."""
    a, b = (routed(one, "pull", max_sequences=2) for one in two)
    command = [sys.executable, str(DAEMON), msgspec.json.encode(a).decode()]
    async with running(b) as front:
        expected = await texts(front, 8)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as leader:
            try:
                log = supervisor_of(front).requests.machine
                await until(lambda: cluster_of(front).plane.leader == "a")
                (there,) = await until(cluster_of(front).requests.others)
                streams = await streams_once(lambda: log.count_offered() >= 2 and log.count_at(there), front, expected)
                leader.kill()
                assert await asyncio.wait_for(streams, 60) == expected
            finally:
                leader.kill()


async def test_a_forwarded_stream_outlives_the_engine_it_runs_on(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b):
        expected = await texts(a)
        streams = await streams_once(has_guests(b), a, expected)
        os.kill(engine_pid(b), signal.SIGKILL)
        assert await streams == expected


async def test_a_box_whose_own_engine_is_away_has_others_run_its_requests(
    two: tuple[Settings, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(two) as (a, b):
        expected = await texts(a)
        streams = await streams_once(has_guests(b), a, expected)
        monkeypatch.setattr(engine_starts, "FIRST_DELAY_S", 60.0)
        os.kill(engine_pid(a), signal.SIGKILL)
        assert await streams == expected
        assert supervisor_of(a).state == "loading"
        assert await texts(a) == expected


async def test_a_hung_up_client_s_requests_end_on_other_boxes_too(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b), http_client(a.settings) as client:
        body = {"prompt": "HANG@3", "max_tokens": 50}
        waiting = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(4)]
        await until(has_guests(b))
        for one in waiting:
            one.cancel()
        await until(lambda: not len(cluster_of(b).hosted_requests))


async def test_a_box_that_drains_gives_its_hosted_requests_back(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b):
        expected = await texts(a)
        streams = await streams_once(has_guests(b), a, expected)
        b.stop()
        assert await streams == expected


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_forwarded_stream_outlives_the_whole_box_it_runs_on(
    two: tuple[Settings, Settings], noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a reaction to the new engine, which compares with the engines before."""
    monkeypatch.setenv("SCRIPTED_STEP_S", "0.01")
    command = [sys.executable, str(DAEMON), msgspec.json.encode(two[1]).decode()]
    async with running(two[0]) as a:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as b:
            try:
                (place,) = await until(cluster_of(a).requests.others)
                expected, requests = await texts(a), supervisor_of(a).requests.machine

                def begun() -> bool:
                    """Whether requests run there that cannot have ended yet."""
                    return any(held.emitted < TOKENS // 4 for held in requests.held_at(place))

                async with http_client(two[1]) as other:

                    async def runs_there() -> bool:
                        return await hosted_requests(other) > 0 and begun()

                    streams = await streams_once(runs_there, a, expected)
                before = requests.resubmitted  # a box silent for long is left, too
                if not noticed:
                    cluster_of(a)._known = set()
                b.kill()
                assert await asyncio.wait_for(streams, 60) == expected
                assert requests.resubmitted > before
            finally:
                b.kill()


async def test_requests_waiting_for_the_leader_are_finished_when_a_box_drains(two: tuple[Settings, Settings]) -> None:
    """The leader itself stops while all slots are taken, so that it decides nothing more."""
    a, b = (routed(one, "pull", max_sequences=1) for one in two)
    async with both((a, b)) as (front, _):
        expected = await texts(front, 6)
        log = supervisor_of(front).requests.machine

        def all_in() -> bool:
            return len(log) == len(expected) and log.count_at("") >= 2 and log.count_at(engine_of(front)) > 0

        streams = await streams_once(all_in, front, expected)
        front.stop()
        assert await asyncio.wait_for(streams, 60) == expected


def engine_of(front: Front) -> str:
    return str(supervisor_of(front)._connection.place)


async def hosted_requests(client: httpx.AsyncClient) -> int:
    """Returns the number of the other box's requests that run there."""
    return int(json.loads((await client.get("/health")).text)["cluster"]["members"][0]["requests"])


def engine_with(disk: int) -> ChannelDescription:
    return ChannelDescription(
        boot="engine",
        calls_port=1,
        bulk_port=2,
        model="m",
        layers=1,
        experts=4,
        expert_bytes=1,
        budget_experts=4,
        disk=bytes([disk]),
        ram=bytes(1),
        shares=True,
    )


async def test_a_box_leaves_once_the_others_have_its_unique_experts(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b):
        a_plane, b_plane = cluster_of(a).plane, cluster_of(b).plane

        def has(plane: ControlPlane, disk: int) -> None:
            plane.set_announcement(msgspec.structs.replace(plane.announcement, engine=engine_with(disk)))

        has(a_plane, 0b0011)
        has(b_plane, 0b1110)
        await until(lambda: a_plane.state.members["b"].announcement.engine is not None)
        leaving = asyncio.ensure_future(cluster_of(a).leave_experts())
        await until(lambda: b_plane.state.members["a"].announcement.leaving)
        assert b_plane.state.members["a"].announcement.engine is not None  # its blocks can still be fetched
        assert not leaving.done()
        has(b_plane, 0b1111)
        await leaving


async def test_an_attempt_that_was_overtaken_on_the_way_is_not_run() -> None:
    sent: list[Submit | Cancel] = []
    hosted_requests = HostedRequests(None, lambda message: not sent.append(message), None)  # type: ignore[arg-type]
    request = Request(id="r", prompt=(1,), sampling=Sampling(), seed=1)
    for attempt in (2, 1):
        hosted_requests.submit("b", "boot", Submit(request=request, attempt=attempt, remaining_ms=1000.0))
    assert [message.attempt for message in sent] == [2]
    assert len(hosted_requests) == hosted_requests.served == 1
    hosted_requests.submit("b", "boot", Submit(request=request, attempt=3, remaining_ms=1000.0))
    assert isinstance(sent[-1], Cancel)
    assert sent[-1].attempt == 2  # only one of the two runs
    assert len(hosted_requests) == hosted_requests.served == 1


async def test_requests_that_another_box_has_forgotten_run_again(two: tuple[Settings, Settings]) -> None:
    async with both(two) as (a, b):
        expected = await texts(a)
        streams = await streams_once(has_guests(b), a, expected)
        cluster_of(b).hosted_requests.forget("a")
        assert await asyncio.wait_for(streams, 60) == expected


async def test_a_front_whose_address_is_written_in_another_way_keeps_its_requests_there(
    two: tuple[Settings, Settings],
) -> None:
    async with both(two) as (a, b):
        expected = await texts(a)
        streams = await streams_once(has_guests(b), a, expected)
        peers = listed(two[1].cluster)
        moved = msgspec.structs.replace(peers["a"], address=peers["a"].address.replace("127.0.0.1", "localhost"))
        cluster_of(b).plane.set_peers({**peers, "a": moved})
        assert len(cluster_of(b).hosted_requests)
        assert await asyncio.wait_for(streams, 60) == expected


async def test_tokens_whose_receipts_are_lost_are_not(
    two: tuple[Settings, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_module, "GIVEN_UP_S", 0.2)
    async with both(two) as (a, b):
        expected = await texts(a)
        channel, dropped = cluster_of(b).plane.channel, lambda: cluster_of(a).metrics()[names.FORGOTTEN]
        ask = channel.ask

        async def lossy(node: str, body: msgspec.Struct, *args: Any, **options: Any) -> Answer[Any]:
            answer = await ask(node, body, *args, **options)
            if isinstance(body, ForwardedEmissions) and not dropped():
                raise PeerUnavailable("no answer came in time")
            return answer

        monkeypatch.setattr(channel, "ask", lossy)
        assert await asyncio.wait_for(texts(a), 60) == expected
        assert dropped()


@pytest.mark.parametrize("letters", [1, 256])
async def test_a_hosted_request_fits_with_any_name_of_its_front(
    two: tuple[Settings, Settings], letters: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with both(two) as (a, b):
        channel, model, pid = cluster_of(a).plane.channel, cluster_of(a).plane.state.model, engine_pid(b)
        name = "x" * letters
        request = Request(id=name, prompt=(1, 2), sampling=Sampling(max_tokens=5000), seed=1)
        pull = FetchPrefixKV(request=name, attempt=1, node="a", prompt=(1, 2))
        for message in (Submit(request=request, remaining_ms=9e4), pull, Cancel(request=name, attempt=1)):
            answer = await channel.ask("b", ForwardedFrame(model), [encode(message)], timeout_s=5)
            assert isinstance(answer.message, FrameAccepted)
        assert not len(cluster_of(b).hosted_requests)
        assert not cluster_of(b).hosted_requests._fetches
        assert engine_pid(b) == pid
        assert await texts(b, 1)  # by the same engine
        assert "cannot read" not in caplog.text


@pytest.mark.parametrize("longer", [0, 1])
async def test_names_that_our_engine_could_not_read_are_refused_at_the_door(
    two: tuple[Settings, Settings], model_dir: Path, longer: int, caplog: pytest.LogCaptureFixture
) -> None:
    silent = tuple(Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("HANG@0").ids)
    async with both(two) as (a, b):
        channel, model = cluster_of(a).plane.channel, cluster_of(a).plane.state.model
        user = "u" * (USER_CHARS - len("a/") + longer)
        name = "x" * (REQUEST_CHARS - len("a/") + longer)
        request = Request(id=name, prompt=silent, sampling=Sampling(), seed=1, user=user)
        asked = channel.ask(
            "b", ForwardedFrame(model), [encode(Submit(request=request, remaining_ms=9e4))], timeout_s=5
        )
        with pytest.raises(PeerRefused, match="too long") if longer else nullcontext():
            assert isinstance((await asked).message, FrameAccepted)
        assert await texts(b, 1)
        assert len(cluster_of(b).hosted_requests) == 1 - longer
        assert "cannot read" not in caplog.text
        cluster_of(b).hosted_requests.forget("a")


async def test_an_emission_that_no_message_can_carry_ends_its_request_alone() -> None:
    told: list[Emission] = []

    async def serve(question: Question[Any]) -> Answer[Any]:
        message = decode_from_engine(question.tensors[0])
        assert isinstance(message, Emissions)
        told.extend(message.items)
        return Answer(FrameAccepted())

    keys = {"a": secret(), "b": secret()}
    a, b = (Box(node, keys[node], keys, serve=serve, language=CONTROL, message_bytes=2000) for node in keys)
    async with boxes_running(a, b):
        a.channel.connect(b.peer)
        await until(lambda: a.channel.is_up("b"))
        hosted_requests = HostedRequests(a.channel, lambda message: True, asyncio.ensure_future)
        for name in ("large", "small"):
            request = Request(id=name, prompt=(1,), sampling=Sampling(), seed=1)
            hosted_requests.submit("b", "boot", Submit(request=request, remaining_ms=1000.0))
        large = tuple((-1.0, ((token, -1.0),)) for token in range(1000))
        hosted_requests.pass_on_emissions([Emission(request="b/1", attempt=1, index=0, token=1, prompt_logprobs=large)])
        hosted_requests.pass_on_emissions([Emission(request="b/2", attempt=1, index=0, token=1, finish="stop")])
        await until(lambda: len(told) == 2)
    assert [(one.request, one.finish) for one in told] == [("large", "error"), ("small", "stop")]


def test_unwanted_requests_in_an_answer_are_bounded() -> None:
    router: Any = RequestRouter(EngineSettings(), LocalConnection(None))  # type: ignore[arg-type]
    requests = ClusterRequests(None, "least", router, None, PrefixKeys())  # type: ignore[arg-type]
    items = [Emission(request=f"r{n}", attempt=1, index=0, token=1) for n in range(MAX_UNWANTED + 1)]
    taken = requests.on_tokens("b", items)
    assert len(taken.unwanted) == MAX_UNWANTED
    assert CONTROL.read(msgspec.msgpack.encode(taken)) == taken


def test_one_front_s_concurrent_fetches_are_bounded_and_repeats_do_not_count() -> None:
    sent: list[FetchPrefixKV | Cancel] = []
    hosted = HostedRequests(None, lambda message: not sent.append(message), None)  # type: ignore[arg-type]

    def pull(node: str, number: int) -> None:
        about = FetchPrefixKV(request=f"r{number}", attempt=1, node="c", prompt=(1,) * 64, remaining_ms=1000.0)
        hosted.fetch(node, "boot", about)

    for _ in range(3):
        pull("b", 0)
    assert [type(message).__name__ for message in sent] == ["FetchPrefixKV", *["Cancel", "FetchPrefixKV"] * 2]
    for number in range(1, MAX_FETCHES):
        pull("b", number)
    with pytest.raises(PeerBusy):
        pull("b", MAX_FETCHES)
    assert len(hosted._fetches) == MAX_FETCHES
    pull("c", 0)
