"""The data plane part by part: the limits of a call, the peers that are refused, the cost of a plan."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.boxes import Box, running, secret
from support.waiting import until

from edgemoe.cluster.data.expert_client import ExpertClient, PeerEstimate
from edgemoe.cluster.data.expert_server import QUEUED_EXPERT_CALLS, ExpertServer
from edgemoe.cluster.data.messages import EXPERT_CALLS, ExpertCall, ExpertResult, Hello
from edgemoe.cluster.rpc.envelope import Answer, Envelope, Question
from edgemoe.errors import PeerBusy, PeerRefused
from edgemoe.telemetry import unit_time
from edgemoe.types.experts import ExpertGeometry, ServedModel
from edgemoe.types.peers import ExpertWork, PeerCosts, RemoteCall
from edgemoe.wire.protocol import PROTOCOL_VERSIONS

SIZES = ExpertGeometry(layers=2, experts=8, top_k=2, hidden=4, width=21, dtype="float32")
MODEL = ServedModel("d" * 32, SIZES)


def work(layer: int = 1, rows: int = 3, seed: int = 0) -> ExpertWork:
    """Builds the work of a call in which every row chooses experts 2 and 5."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(0, 256, (rows, 16), np.uint8)
    index = np.tile(np.arange(rows), 2)
    weights = rng.random(2 * rows).astype(np.float32)
    return ExpertWork(layer, np.array([2, 5]), np.array([0, rows, 2 * rows]), index, weights, hidden)


def frames(asked: ExpertWork) -> tuple[ExpertCall, list[memoryview]]:
    call, tensors = ExpertCall.of(asked)
    return call, [memoryview(bytes(t)) for t in tensors]


def test_work_arrives_as_it_was_sent() -> None:
    sent = work()
    call, tensors = frames(sent)
    read = call.work(tensors, SIZES)
    for got, wanted in zip(read, sent, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_call_that_cannot_be_is_refused_and_never_computed() -> None:
    call, (hidden, index) = frames(work())
    rng = random.Random(0)
    survived = 0
    for _ in range(3000):
        numbers = bytearray(index)
        numbers[rng.randrange(len(numbers))] ^= 1 << rng.randrange(8)
        try:
            read = call.work([hidden, memoryview(bytes(numbers))], SIZES)
        except PeerRefused:
            continue
        survived += 1  # another weight, row or expert, but a possible one
        assert len(np.unique(read.experts)) == 2
        assert ((read.experts >= 0) & (read.experts < 8)).all()
        assert ((read.rows >= 0) & (read.rows < 3)).all()
        assert read.offsets.tolist() == sorted(read.offsets.tolist())
        assert np.isfinite(read.weights).all()
    assert 0 < survived < 3000
    for bad in (
        ExpertCall(9, 3, 2, 6),
        ExpertCall(1, 4, 2, 6),
        ExpertCall(1, 3, 3, 6),
        ExpertCall(1, 3, 2, 7),
        ExpertCall(1, 3, 9, 6),
    ):
        with pytest.raises(PeerRefused):
            bad.work([hidden, index], SIZES)
    with pytest.raises(PeerRefused):
        call.work([hidden], SIZES)


class Gate:
    """A host that computes when the test lets it; its result is the hidden states."""

    def __init__(self) -> None:
        self.open, self.started = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def refuses(self, asked: ExpertWork) -> str:
        return "expert 7 is not here" if 7 in asked.experts else ""

    def compute_at_once(self, asked: ExpertWork) -> None:
        return None

    def compute(self, works: Sequence[ExpertWork]) -> Sequence[Any]:
        self.started.set()
        self.open.wait(60)
        self.batches.append([asked.layer for asked in works])
        return [asked.hidden.data.cast("B") for asked in works]


def question(asked: ExpertWork, within_s: float = 10.0) -> Question[Any]:
    call, tensors = frames(asked)
    envelope = Envelope(1, False, PROTOCOL_VERSIONS, within_s * 1e3, (), (), b"")  # type: ignore[arg-type]
    return Question("peer", "boot", envelope, call, tensors, asyncio.get_running_loop().time() + within_s)


def served(server: ExpertServer, asked: Question[Any]) -> asyncio.Future[Answer[Any]]:
    """Starts to serve a call that is not answered at once, and returns its answer's task."""
    answer = server.serve(asked)
    assert not isinstance(answer, Answer)
    return asyncio.create_task(answer)


async def test_waiting_calls_of_a_layer_are_computed_together() -> None:
    host = Gate()
    server = ExpertServer(SIZES, host)
    server.start()
    first = served(server, question(work(0)))
    await asyncio.to_thread(host.started.wait, 10)
    rest = [served(server, question(work(n % 2, seed=n))) for n in range(6)]
    host.open.set()
    answers = await asyncio.gather(first, *rest)
    assert host.batches == [[0], [0, 0, 0], [1, 1, 1]]
    for n, answer in enumerate(answers[1:]):
        assert isinstance(answer.message, ExpertResult)
        assert bytes(answer.tensors[0]) == work(seed=n).hidden.tobytes()
    await asyncio.to_thread(server.close)


async def test_calls_that_would_be_late_are_refused_at_once() -> None:
    host = Gate()
    server = ExpertServer(SIZES, host)
    server.start()
    server._unit_time.measure(5.0, time.monotonic())
    with pytest.raises(PeerBusy, match="in time"):
        server.serve(question(work(), within_s=1.5))
    server._unit_time.mean_s = 1e-9
    under_way = served(server, question(work()))
    await asyncio.to_thread(host.started.wait, 10)
    too_late = question(work(), within_s=0.5)
    late = served(server, too_late)  # created before the other calls, which may take longer than its time limit
    rest = [served(server, question(work())) for _ in range(QUEUED_EXPERT_CALLS - 2)]
    assert server._pending == QUEUED_EXPERT_CALLS
    with pytest.raises(PeerBusy):
        server.serve(question(work()))
    await until(lambda: asyncio.get_running_loop().time() > too_late.deadline)
    host.open.set()
    with pytest.raises(PeerBusy, match="too late"):
        await late
    await asyncio.gather(under_way, *rest)
    assert server.shed == 3
    assert server._pending == server._bytes == 0
    await asyncio.to_thread(server.close)


async def test_a_server_that_was_slow_once_does_not_send_big_calls_away_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Gate()
    server = ExpertServer(SIZES, host)
    server.start()

    def slow(asked: ExpertWork) -> Any:
        time.sleep(0.05)
        return asked.hidden.data.cast("B")

    host.compute_at_once = slow  # type: ignore[assignment]
    server.serve(question(work()))
    with pytest.raises(PeerBusy, match="in time"):
        server.serve(question(work(rows=10_000), within_s=10))
    monkeypatch.setattr(unit_time, "FADE_S", 1e-3)  # much later
    big = served(server, question(work(rows=10_000), within_s=10))
    await asyncio.to_thread(host.started.wait, 10)
    server._unit_time.measure(0.02, time.monotonic())
    with pytest.raises(PeerBusy, match="in time"):  # no record ages during a computation
        server.serve(question(work(rows=10_000), within_s=10))
    host.open.set()
    assert isinstance((await big).message, ExpertResult)
    await asyncio.to_thread(server.close)


async def test_experts_missing_on_the_host_are_refused() -> None:
    server = ExpertServer(SIZES, Gate())
    asked = work()._replace(experts=np.array([2, 7]))
    with pytest.raises(PeerRefused, match="expert 7"):
        server.serve(question(asked))


def test_a_peer_that_stops_answering_costs_more_with_every_moment() -> None:
    peer = PeerEstimate("b", "boot", SIZES)
    peer.ram[:] = True
    experts = np.array([1, 2])
    fresh = peer.offer(1, experts, 100.0)
    peer.under_way[0] = type("Call", (), {"asked_s": 100.0})()  # type: ignore[assignment]
    old = peer.offer(1, experts, 103.0)
    assert fresh is not None
    assert old is not None
    assert fresh.open_s < 0.01
    assert old.open_s == pytest.approx(3.0)


def test_round_trip_and_rate_are_told_apart() -> None:
    peer = PeerEstimate("b", "boot", SIZES)
    for _ in range(60):
        peer.measure_way(1000, 0.002)
        peer.measure_way(1_000_000, 0.002 + 0.016)
    assert peer.latency_s == pytest.approx(0.002, rel=0.05)
    assert 1 / peer.s_per_byte == pytest.approx(62.5e6, rel=0.05)
    peer.failed(5.0)
    for _ in range(8):
        peer.measure_way(1000, 0.002)
    assert peer.latency_s < 0.02


def test_a_rate_that_looked_low_once_is_mended_by_a_few_probes() -> None:
    peer = PeerEstimate("b", "boot", SIZES)
    peer.s_per_byte = 100 / 62.5e6
    for _ in range(5):
        peer.measure_way(1_000_000, peer.latency_s + 0.016)
    assert 1 / peer.s_per_byte > 62.5e6 / 3


def offer_of(peer: PeerEstimate, now_s: float) -> PeerCosts:
    offer = peer.offer(1, np.array([1, 2]), now_s)
    assert offer is not None
    return offer


def test_a_peer_that_looked_slow_once_is_worth_a_trial_after_a_while() -> None:
    peer = PeerEstimate("b", "boot", SIZES)
    peer.ram[:] = True
    fresh = offer_of(peer, 100.0).unit_s
    for now_s in (100.0, 400.0):
        peer.answered_s = now_s
        peer.measure_work(2.0, 4.0)
        slow = offer_of(peer, now_s + 1).unit_s
        assert slow > 100 * fresh
        assert offer_of(peer, now_s + 20).unit_s < slow / 3
        assert offer_of(peer, now_s + 200).unit_s < 1.1 * fresh
    peer.answered_s = 600.0
    peer.measure_work(2.0, 2 * fresh)
    assert offer_of(peer, 600.0).unit_s < 1.1 * fresh


def test_a_peer_that_is_fast_stays_fast_while_it_is_not_asked() -> None:
    peer = PeerEstimate("b", "boot", SIZES)
    peer.ram[:] = True
    for peer.answered_s in range(100, 130):
        peer.measure_work(1.0, 1e-5)
    assert offer_of(peer, 1000.0).unit_s == offer_of(peer, 130.0).unit_s < 2e-5


class SlowReader:
    """The channel to a peer whose answers state that each call took two seconds."""

    on_up = on_down = staticmethod(lambda _node: None)

    def is_up(self, node: str) -> bool:
        return False

    def post(self, node: str, body: Any, tensors: Sequence[Any], *, timeout_s: float, done: Any) -> None:
        done(Answer(ExpertResult(2.0), [memoryview(tensors[0])]))


async def test_a_peer_s_reads_do_not_count_as_slow_computing() -> None:
    nothing = np.zeros((2, 8), np.bool_)
    calls = ExpertClient(SlowReader(), MODEL, lambda: (nothing, nothing), 5.0)  # type: ignore[arg-type]
    calls.add("b", "boot")
    peer, answers = calls.peers["b"], SimpleQueue[RemoteCall]()
    peer.disk[:] = True
    peer.ram[1, 1] = True
    before = offer_of(peer, time.monotonic())
    running = asyncio.create_task(calls.run())
    await asyncio.sleep(0)
    calls.call("b", work(), answers)  # experts 2 and 5, which are on its disk
    assert (await asyncio.to_thread(answers.get, timeout=60)).error is None
    after = offer_of(peer, time.monotonic())
    assert after.unit_s == before.unit_s
    assert before.wait_s[1] < 1e-5
    assert after.wait_s.tolist() == [0.0, pytest.approx(0.2, rel=0.3)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_peer_that_is_not_heard_is_asked_nothing_and_stays_connected() -> None:
    keys = {"a": secret(), "b": secret()}
    asked = asyncio.Event()

    async def serve(question: Question[Any]) -> Answer[Any]:
        if isinstance(question.message, Hello):
            return Answer(question.message)
        asked.set()
        await asyncio.sleep(60)
        raise AssertionError("it was waited for")

    a, b = (Box(node, keys[node], keys, serve=serve, language=EXPERT_CALLS) for node in keys)
    everything = np.ones((SIZES.layers, SIZES.experts), np.bool_)
    calls = ExpertClient(a.channel, MODEL, lambda: (everything, everything), 30.0)
    async with running(a, b):
        running_calls = asyncio.create_task(calls.run())
        calls.add("b", "boot")
        a.channel.connect(b.peer)
        await until(lambda: calls.peers["b"].reachable)
        downs: list[str] = []
        a.channel.on_down = downs.append
        answers: SimpleQueue[RemoteCall] = SimpleQueue()
        calls.call("b", work(), answers)
        await asked.wait()
        calls.heed("b", False)
        failed = await asyncio.to_thread(answers.get, True, 10)
        assert "not heard" in str(failed.error)
        assert not calls.offers(0, np.array([0]))
        assert calls.holders_away(0, 0) == ["b"]
        assert a.channel.is_up("b")
        calls.heed("b", True)
        await until(lambda: len(calls.offers(0, np.array([0]))) == 1)
        assert calls.holders_away(0, 0) == []
        assert downs == []
        running_calls.cancel()
        await asyncio.gather(running_calls, return_exceptions=True)
