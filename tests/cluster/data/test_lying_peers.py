"""Expert calls with peers whose messages are wrong: each costs that call, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.waiting import until
from test_data_plane import MODEL, SIZES, Gate, question, served, work

from edgemoe.cluster.data import expert_server as server
from edgemoe.cluster.data.expert_client import ExpertClient
from edgemoe.cluster.data.expert_server import ExpertServer
from edgemoe.cluster.data.messages import ExpertResult, Hello
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import MissingExpert, PeerBusy, PeerRefused, PeerUnavailable, WireError
from edgemoe.types.peers import ExpertWork, RemoteCall

Reply = Callable[[Any, Sequence[Any]], Answer[Any]]


class LyingChannel:
    """The channel to a peer that answers as the test wants it."""

    on_up = on_down = staticmethod(lambda _node: None)

    def __init__(self) -> None:
        self.reply: Reply = honest

    def is_up(self, node: str) -> bool:
        return True

    async def ask(self, node: str, body: Any, tensors: Sequence[Any], *, timeout_s: float) -> Answer[Any]:
        return self.reply(body, tensors)

    def post(self, node: str, body: Any, tensors: Sequence[Any], *, timeout_s: float, done: Any) -> None:
        done(self.reply(body, tensors))


def honest(body: Any, tensors: Sequence[Any]) -> Answer[Any]:
    if isinstance(body, Hello):
        return Answer(body)
    return Answer(ExpertResult(0.001), [memoryview(tensors[0])])


@pytest.fixture
async def calls() -> AsyncIterator[ExpertClient]:
    have = np.ones((2, 8), np.bool_)
    calls = ExpertClient(LyingChannel(), MODEL, lambda: (have, have), 5.0)  # type: ignore[arg-type]
    calls.add("b", "boot")
    running = asyncio.create_task(calls.run())
    await asyncio.sleep(0)
    yield calls
    assert not running.done(), "a lie ended the plane"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def ask(calls: ExpertClient, reply: Reply) -> RemoteCall:
    calls._channel.reply = reply  # type: ignore[attr-defined]
    answers: SimpleQueue[RemoteCall] = SimpleQueue()
    calls.call("b", work(), answers)
    return await asyncio.to_thread(answers.get, timeout=60)


def sized(*sizes: int) -> Reply:
    return lambda *_: Answer(ExpertResult(0.001), [memoryview(bytes(size)) for size in sizes])


def raising(error: Exception) -> Reply:
    def reply(*_: Any) -> Answer[Any]:
        raise error

    return reply


ROWS = work().hidden.nbytes
LIES: dict[str, Reply] = {
    "no sums": sized(),
    "too few bytes": sized(ROWS - 1),
    "too many bytes": sized(ROWS + 1),
    "a row too many": sized(ROWS + 16),
    "two tensors": sized(ROWS, ROWS),
    "a hello": lambda body, tensors: Answer(Hello.of(MODEL, np.ones((2, 8), np.bool_), np.ones((2, 8), np.bool_))),
    "its own question": lambda body, tensors: Answer(body, [memoryview(t) for t in tensors]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_is_none_is_refused_and_the_next_one_counts(calls: ExpertClient, lie: str) -> None:
    wrong = await ask(calls, LIES[lie])
    assert wrong.result is None
    assert isinstance(wrong.error, PeerRefused)
    assert "answered a call with something else" in str(wrong.error)
    right = await ask(calls, honest)
    assert right.error is None
    assert right.result == work().hidden.tobytes()
    assert not calls.peers["b"].under_way


@pytest.mark.parametrize("error", [WireError("too large to be sent"), RuntimeError("a bug")], ids=["wire", "bug"])
async def test_every_error_of_a_call_reaches_its_caller(calls: ExpertClient, error: Exception) -> None:
    assert (await ask(calls, raising(error))).error is not None
    assert (await ask(calls, honest)).error is None


@pytest.mark.parametrize(
    "lie",
    [
        sized(4),
        lambda body, _: Answer(Hello("e" * 32, 2, 8, 16, 1008, body.ram, body.disk)),
        lambda body, _: Answer(Hello("d" * 32, 2, 8, 16, 1009, body.ram, body.disk)),
        lambda body, _: Answer(Hello("d" * 32, 2, 8, 16, 1008, body.ram + b"\0", body.disk)),
    ],
    ids=["a result", "another model", "other sizes", "other bitmaps"],
)
async def test_a_peer_that_greets_wrongly_is_not_asked_until_it_greets_well(calls: ExpertClient, lie: Reply) -> None:
    peer, channel = calls.peers["b"], calls._channel
    for reply, ready in ((lie, False), (honest, True)):
        channel.reply = reply  # type: ignore[attr-defined]
        await calls._greet(peer, probe=False)
        assert peer.ready == ready
        assert bool(calls.offers(0, np.array([1]))) == ready


async def test_a_greeting_that_cannot_be_sent_is_a_failure_of_that_peer(calls: ExpertClient) -> None:
    calls._channel.reply = raising(WireError("too large to be sent"))  # type: ignore[attr-defined]
    failures = calls.peers["b"].failures
    await calls._greet(calls.peers["b"], probe=True)
    assert calls.peers["b"].failures == failures + 1


async def test_a_peer_whose_connection_broke_is_not_asked_until_it_has_greeted_again(calls: ExpertClient) -> None:
    peer = calls.peers["b"]
    peer.silent = True
    calls._channel.on_down("b")
    assert (peer.ready, peer.silent) == (False, False)
    assert not calls.offers(0, np.array([1]))
    calls._channel.on_up("b")
    while not peer.ready:
        await asyncio.sleep(0)
    assert calls.offers(0, np.array([1]))


class Picky(Gate):
    """A host on whose damaged disk expert 6 lies."""

    def compute(self, works: Sequence[ExpertWork]) -> Sequence[Any]:
        self.started.set()
        self.open.wait(60)
        self.batches.append([len(asked.hidden) for asked in works])
        if any(6 in asked.experts for asked in works):
            raise MissingExpert(1, 6, "the disk is damaged")
        return [asked.hidden.data.cast("B") for asked in works]


async def test_a_failed_call_does_not_fail_others_of_its_batch() -> None:
    host = Picky()
    serving = ExpertServer(SIZES, host)
    serving.start()
    first = served(serving, question(work(0)))
    await asyncio.to_thread(host.started.wait, 10)
    bad = work(rows=2)._replace(experts=np.array([2, 6]))
    rest = [served(serving, question(asked)) for asked in (work(rows=1), bad, work(rows=3))]
    host.open.set()
    await first
    answers = await asyncio.gather(*rest, return_exceptions=True)
    assert host.batches == [[3], [1, 2, 3], [1], [2], [3]]
    for answer, rows in ((answers[0], 1), (answers[2], 3)):
        assert isinstance(answer, Answer)
        assert bytes(answer.tensors[0]) == work(rows=rows).hidden.tobytes()
    assert isinstance(answers[1], MissingExpert)
    assert serving._pending == serving._bytes == 0
    await asyncio.to_thread(serving.close)


async def test_waiting_calls_are_bounded_in_bytes_and_batches_in_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "QUEUE_BYTES", 5 * 16)  # five rows
    monkeypatch.setattr(server, "TOGETHER_ROWS", 3)
    host = Picky()
    serving = ExpertServer(SIZES, host)
    serving.start()
    first = served(serving, question(work(0, rows=1)))
    await asyncio.to_thread(host.started.wait, 10)
    waiting = [served(serving, question(work(rows=2))) for _ in range(3)]
    with pytest.raises(PeerBusy):
        serving.serve(question(work(rows=1)))
    host.open.set()
    await asyncio.gather(first, *waiting)
    assert host.batches == [[1], [2, 2], [2]]
    await served(serving, question(work(rows=1)))
    await asyncio.to_thread(serving.close)


async def test_a_call_to_a_box_that_has_left_fails_at_once(calls: ExpertClient) -> None:
    answers = SimpleQueue[RemoteCall]()
    calls.call("gone", work(), answers)
    call = await asyncio.to_thread(answers.get, timeout=60)
    assert "gone is no member any more" in str(call.error)


async def test_a_peer_that_says_nothing_until_the_deadline_is_silent_and_as_slow_as_that(calls: ExpertClient) -> None:
    """One that fails at once is neither, and nothing is fetched from one that is."""
    peer, gone = calls.peers["b"], PeerUnavailable("it has gone")
    await until(lambda: peer.reachable)
    for calls.timeout_s, silent in ((60.0, False), (0.05, True)):
        waiting: list[Any] = []
        calls._channel.post = lambda *_, done, waiting=waiting, **__: waiting.append(done)  # type: ignore[method-assign]
        answers = SimpleQueue[RemoteCall]()
        calls.call("b", work(), answers)
        await until(lambda: waiting)  # noqa: B023
        late_s = time.monotonic() + calls.timeout_s if silent else 0.0
        await until(lambda: time.monotonic() >= late_s)  # noqa: B023
        waiting[0](gone)
        assert (await asyncio.to_thread(answers.get, timeout=60)).error is gone
        assert peer.silent == silent
        assert (peer.latency_s >= calls.timeout_s) == silent
        assert np.isinf(calls.fetch_s(1, np.array([2]), ())).all() == silent
    peer.silent = False
    assert np.isfinite(calls.fetch_s(1, np.array([2]), ())).all()
    assert np.isinf(calls.fetch_s(1, np.array([2]), {"b"})).all()
