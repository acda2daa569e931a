"""Requests of a single box: only the current attempt's next token gets through, and fatal requests are found."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from edgemoe.config.settings import EngineSettings
from edgemoe.errors import DeadlineExceeded, EngineCrashed, InvalidRequest, QueueFull, RequestError, RequestQuarantined
from edgemoe.front.request_attempts import DEATHS, FRUITLESS_ATTEMPTS, FURTHER_TOKENS
from edgemoe.front.request_events import EnginesChanged, SubmitRefused, TimePassed, TokensEmitted
from edgemoe.front.request_router import ClientSubmission, RequestRouter
from edgemoe.front.request_state import PATIENCE_S
from edgemoe.ipc.messages import Cancel, Submit, ToEngine
from edgemoe.types.request import Emission, Request, Sampling


class FakeEngine:
    """Records the router's messages to this box's engine; `up` says whether there is an engine at all."""

    def __init__(self, slots: int = 2, capacity: int = 4) -> None:
        self.up, self.boot = True, 1
        self.sent: list[ToEngine] = []
        self.now = 100.0
        settings = EngineSettings(max_sequences=slots, max_queue=capacity - slots)
        self.router = RequestRouter(settings, self, lambda: self.now)  # type: ignore[arg-type]
        self.machine = self.router.machine

    @property
    def place(self) -> str:
        return f"boot{self.boot}" if self.up else ""

    def send(self, message: ToEngine) -> bool:
        if self.up:
            self.sent.append(message)
        return self.up

    def attempts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(sent.attempt, sent.emitted) for sent in self.sent if isinstance(sent, Submit)]

    def emit(self, *items: Emission) -> None:
        self.router.handle(TokensEmitted("", items))

    def dies(self) -> None:
        """Replaces the engine by another one."""
        self.boot += 1
        self.router.handle(EnginesChanged())

    def goes_down(self) -> None:
        self.up = False
        self.router.handle(EnginesChanged())

    def comes_up(self) -> None:
        self.up, self.boot = True, self.boot + 1
        self.router.handle(EnginesChanged())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.router.handle(TimePassed())


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.router.check_integrity()


def request(name: str = "r") -> Request:
    return Request(id=name, prompt=tuple(name.encode()), sampling=Sampling(max_tokens=100), seed=1)


def long(name: str) -> Request:
    return msgspec.structs.replace(request(name), sampling=Sampling(max_tokens=2000))


def token(index: int, attempt: int = 1, name: str = "r", finish: str = "") -> Emission:
    return Emission(request=name, attempt=attempt, index=index, token=1000 + index, finish=finish)


async def drain(ticket: ClientSubmission) -> list[int]:
    """Returns all tokens of a submission, once it has ended."""
    return [item.token async for items in ticket for item in items if item.token is not None]


async def test_tokens_pass_in_order_and_the_end_ends_the_iteration(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10) as ticket:
        engine.emit(token(0), token(1), token(2, finish="stop"))
        assert await drain(ticket) == [1000, 1001, 1002]
    assert not any(isinstance(sent, Cancel) for sent in engine.sent)


async def test_a_resubmission_carries_emitted_tokens_and_drops_late_ones(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10) as ticket:
        engine.emit(token(0), token(1))
        engine.dies()
        assert engine.attempts() == [(1, ()), (2, (1000, 1001))]
        engine.emit(token(2, attempt=1), token(0, attempt=2), token(2, attempt=2, finish="length"))
        assert await drain(ticket) == [1000, 1001, 1002]
    assert engine.machine.stale == 2


async def test_a_gap_is_never_delivered_but_asked_for_again(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10):
        engine.emit(token(0), token(2))
        assert engine.sent[1:] == [Cancel(request="r", attempt=1), engine.sent[2]]
        assert engine.attempts()[-1] == (2, (1000,))


async def test_requests_accepted_without_an_engine_are_submitted_to_the_next(engine: FakeEngine) -> None:
    engine.up = False
    with engine.router.open([request()], 10):
        assert engine.sent == []
        engine.comes_up()
        assert engine.attempts() == [(1, ())]
        assert engine.machine.resubmitted == 0


async def test_leaving_the_block_cancels_running_requests(engine: FakeEngine) -> None:
    with engine.router.open([request("a"), request("b")], 10):
        engine.emit(token(0, name="a", finish="stop"))
    assert engine.sent[2:] == [Cancel(request="b", attempt=1)]
    assert len(engine.router) == 0


async def test_cancelling_one_of_several_leaves_the_others(engine: FakeEngine) -> None:
    with engine.router.open([request("a"), request("b")], 10) as ticket:
        ticket.cancel("a")
        engine.emit(token(0, name="a"), token(0, name="b", finish="stop"))
        assert await drain(ticket) == [1000]


async def test_a_full_router_says_when_to_come_back(engine: FakeEngine) -> None:
    with engine.router.open([request(str(n)) for n in range(4)], 10):
        with pytest.raises(QueueFull) as full, engine.router.open([request("x")], 10):
            pass
        assert full.value.retry_after_s >= 1
    with pytest.raises(InvalidRequest), engine.router.open([request(str(n)) for n in range(5)], 10):
        pass


def opened(router: RequestRouter, stack: ExitStack, principal: str, users: int, n: int = 1) -> int:
    """Counts the choices that are accepted from `users` of the principal in turn, `n` at once."""
    for number in range(1000):
        user = f"{principal}/{number % users}"
        some = [
            msgspec.structs.replace(request(f"{principal} {number} {at}"), user=user, principal=principal)
            for at in range(n)
        ]
        try:
            stack.enter_context(router.open(some, 10))
        except QueueFull:
            return number * n
    raise AssertionError("never full")


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("users", [24, 1000])
async def test_no_principal_takes_all_the_room_with_any_number_of_users(users: int, n: int) -> None:
    router = FakeEngine(50, 100).router
    with ExitStack() as stack:
        taken = opened(router, stack, "greedy", users, n)
        assert 80 - n < taken <= 80
        assert opened(router, stack, "second", 1) >= 15
        assert opened(router, stack, "third", 1) >= 1
        router.check_integrity()


async def test_one_request_is_no_way_around_the_share_of_a_principal() -> None:
    router = FakeEngine(50, 100).router
    some = [msgspec.structs.replace(request(str(at)), user="p", principal="p") for at in range(90)]
    with pytest.raises(InvalidRequest, match="one user may ever have"), router.open(some, 10):
        pass


async def test_no_user_takes_all_that_its_principal_has() -> None:
    router = FakeEngine(50, 100).router
    with ExitStack() as stack:
        assert opened(router, stack, "one", 1) == router.machine.capacity_per_user == 76
        other = msgspec.structs.replace(request("other"), user="one/other", principal="one")
        stack.enter_context(router.open([other], 10))
        router.check_integrity()


async def test_a_request_that_fells_every_engine_is_found_and_given_up(engine: FakeEngine) -> None:
    """`bad` kills each engine that runs it before any token; the other requests must live."""
    router = engine.router
    with (
        router.open([request("good")], 10) as good,
        router.open([request("bad"), request("fine")], 10) as other,
    ):
        for _ in range(6):
            running = {sent.request.id for sent in engine.sent if isinstance(sent, Submit)}
            if "bad" not in running:  # this engine is not at fault: each of the other requests gets a token
                for name in ("good", "fine"):
                    if (live := engine.machine._live[name]).attempts.fruitless:
                        done = len(live.emitted)
                        engine.emit(*[token(done + n, live.attempt, name) for n in range(FURTHER_TOKENS + 1)])
            engine.sent.clear()
            engine.dies()
            router.check_integrity()
        with pytest.raises(EngineCrashed, match="in a row"):
            await drain(other)
        assert good.live == {"good"}
        assert other.live == {"fine"}


async def test_a_request_that_fells_engines_at_one_of_its_tokens_is_given_up(engine: FakeEngine) -> None:
    """Each attempt emits one token more of a dying engine's results, and the other request advances."""
    router = engine.router
    with router.open([request("bad")], 10) as bad, router.open([request("good")], 10) as good:
        engine.emit(*[token(n, 1, name) for n in range(36) for name in ("bad", "good")])
        for _ in range(6):
            engine.dies()
            router.check_integrity()
            felled = "bad" in engine.machine._live and engine.machine.place_of("bad")[0] != ""
            for name, count in (("bad", 1), ("good", 2 if felled else FURTHER_TOKENS + 1)):
                if (live := engine.machine._live.get(name)) is not None and live.place:
                    done = len(live.emitted)
                    engine.emit(*[token(done + n, live.attempt, name) for n in range(count)])
        with pytest.raises(EngineCrashed, match="in a row"):
            await drain(bad)
        assert good.live == {"good"}
        assert engine.machine.blamed == 1


class Deaths:
    """Engines that die one after the other, each after some tokens."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.seen = engine, 0

    def next(self, tokens: dict[str, int], fells: str = "") -> None:
        """Gives tokens to the requests that have an engine; then it dies if `fells` is among them, or is empty."""
        here = [name for name in tokens if self.engine.machine.place_of(name)[0]]
        for name in here:
            live = self.engine.machine._live[name]
            done = len(live.emitted)
            self.engine.emit(*[token(done + n, live.attempt, name) for n in range(tokens[name])])
        self.engine.pass_time(PATIENCE_S + 1.0)
        dies = not fells or fells in here
        self.seen += dies
        if dies:
            self.engine.dies()
        self.engine.router.check_integrity()


@pytest.mark.parametrize("every", [10, 25, 60])
async def test_a_request_that_fells_engines_after_some_tokens_is_given_up_and_its_neighbours_are_not(
    engine: FakeEngine, every: int
) -> None:
    names, deaths = ("first", "slow", "bad", "last"), Deaths(engine)
    with ExitStack() as stack:
        tickets = {name: stack.enter_context(engine.router.open([long(name)], 1e6)) for name in names}
        while "bad" in engine.machine._live and deaths.seen < 20:
            deaths.next({"first": every, "slow": 3, "bad": every, "last": every - 3}, fells="bad")
        assert deaths.seen == DEATHS
        with pytest.raises(EngineCrashed, match="ended while they ran"):
            await drain(tickets["bad"])
        for name in ("first", "slow", "last"):
            assert tickets[name].live == {name}
            assert engine.machine.place_of(name)[0]  # it no longer waits


async def test_a_request_outlives_the_deaths_that_others_are_blamed_for(engine: FakeEngine) -> None:
    deaths = Deaths(engine)
    with engine.router.open([long("good")], 1e6) as good:
        for number in range(8):
            bad = msgspec.structs.replace(long(f"bad-{number}"), user=f"key:{number}")  # one would be refused
            with engine.router.open([bad], 1e6):
                while f"bad-{number}" in engine.machine._live:
                    deaths.next({"good": 12, f"bad-{number}": 0}, fells=f"bad-{number}")
        assert deaths.seen <= 8 * FRUITLESS_ATTEMPTS
        assert good.live == {"good"}


async def test_a_request_that_is_given_up_is_refused_when_it_comes_again(engine: FakeEngine) -> None:
    deaths = Deaths(engine)
    mine, others = (
        msgspec.structs.replace(long("bad"), principal=principal, user=principal)
        for principal in ("key:mallory", "key:bob")
    )
    with engine.router.open([mine], 1e6):
        while "bad" in engine.machine._live:
            deaths.next({"bad": 0}, fells="bad")
    with pytest.raises(RequestQuarantined), engine.router.open([msgspec.structs.replace(mine, id="again")], 1e6):
        pass
    with engine.router.open([others], 1e6) as accepted:
        assert accepted.live == {"bad"}
    assert engine.machine.quarantine.describe() == {"requests": 1, "principals": 0}


def places(engine: FakeEngine) -> set[str]:
    """Returns the requests that have an engine."""
    return {name for name, live in engine.machine._live.items() if live.place}


async def test_suspects_continue_alone_once_the_others_have_ended_and_new_requests_wait(
    engine: FakeEngine,
) -> None:
    router = engine.router
    with ExitStack() as stack:
        tickets = {name: stack.enter_context(router.open([long(name)], 1e6)) for name in ("old", "bad", "new")}
        engine.emit(*[token(n, 1, "old") for n in range(FURTHER_TOKENS + 1)])
        engine.dies()
        assert places(engine) == {"old"}, "suspects are not submitted again beside others"
        tickets["late"] = stack.enter_context(router.open([long("late")], 1e6))
        assert places(engine) == {"old", "late"}, "nobody on trial holds up who comes"
        for name in ("old", "late"):
            engine.emit(
                *[token(len(engine.machine._live[name].emitted), engine.machine._live[name].attempt, name, "stop")]
            )
        assert places(engine) == {"bad"}, "the first suspect is alone"
        stack.enter_context(router.open([long("later")], 1e6))
        assert places(engine) == {"bad"}, "and stays alone"
        engine.dies()
        with pytest.raises(EngineCrashed, match="2 engines in a row"):
            await drain(tickets["bad"])
        router.check_integrity()
        assert places(engine) >= {"later", "new"}, "the death is explained: nobody else is a suspect"
        assert engine.machine.blamed == 1


async def test_a_suspect_beside_endless_others_is_tried_after_a_while_and_holds_them_up_for_as_long(
    engine: FakeEngine,
) -> None:
    router = engine.router
    with ExitStack() as stack:
        for name in ("old", "new"):
            stack.enter_context(router.open([long(name)], 1e6))
        engine.emit(*[token(n, 1, "old") for n in range(FURTHER_TOKENS + 1)])
        engine.dies()
        assert places(engine) == {"old"}
        engine.pass_time(PATIENCE_S)
        assert places(engine) == {"old", "new"}
        stack.enter_context(router.open([long("late")], 1e6))
        assert places(engine) == {"old", "new"}
        engine.pass_time(PATIENCE_S)
        assert places(engine) == {"old", "new", "late"}


async def test_a_request_outlives_deaths_that_come_at_no_token_in_particular(engine: FakeEngine) -> None:
    deaths = Deaths(engine)
    with engine.router.open([long("good")], 1e6) as good:
        for tokens in (30, 12, 11, 45, 20, 60, 30, 15, 10, 90):
            deaths.next({"good": tokens})
        assert good.live == {"good"}


async def test_a_skipped_token_is_no_death_of_an_engine(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10) as ticket:
        for attempt in range(1, 8):
            engine.emit(token(attempt - 1, attempt), token(attempt + 1, attempt))
        assert ticket.live == {"r"}


async def test_a_deadline_ends_a_request_with_its_error(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10) as ticket:
        engine.pass_time(9)
        engine.emit(token(0))
        engine.pass_time(9)  # a token was progress
        engine.emit(Emission(request="r", attempt=1, index=1))  # and so is this report
        engine.pass_time(9)
        assert ticket.live == {"r"}
        engine.pass_time(2)
        engine.emit(token(1))
        received = aiter(ticket)
        assert [item.index for item in await anext(received)] == [0]
        with pytest.raises(DeadlineExceeded):
            await anext(received)
    assert engine.sent[-1] == Cancel(request="r", attempt=1)


async def test_an_error_that_many_are_told_keeps_none_of_them(engine: FakeEngine) -> None:
    """A shared error would keep all frames that it has passed, and each one's prompt with them."""

    def refused() -> int:
        with pytest.raises(RequestError) as caught, engine.router.open([request()], 10):
            pass
        return len(list(traceback.walk_tb(caught.value.__traceback__)))

    async def ended(name: str) -> int:
        engine.router.closed = None
        with engine.router.open([request(name)], 10) as ticket:
            engine.router.fail_all(over)
            with pytest.raises(RequestError) as caught:
                await anext(aiter(ticket))
        return len(list(traceback.walk_tb(caught.value.__traceback__)))

    over = RequestError("over")
    engine.router.closed = over
    assert refused() == refused()
    assert await ended("a") == await ended("b")


async def test_a_resubmission_has_the_whole_timeout_and_carries_the_time_that_has_passed(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10):
        engine.now += 4
        engine.dies()
        times = [(sent.remaining_ms, sent.waited_ms) for sent in engine.sent if isinstance(sent, Submit)]
        assert times == [(10_000, 0), (10_000, 4_000)]


async def test_waiting_for_an_empty_router_ends_with_the_last_request(engine: FakeEngine) -> None:
    with engine.router.open([request()], 10):
        waiting = asyncio.ensure_future(engine.router.empty())
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.router.fail_all(RequestError("over"))
        await waiting


async def test_each_engine_s_requests_are_counted_wherever_they_go(engine: FakeEngine) -> None:
    count_at = engine.machine.count_at
    with engine.router.open([request("a"), request("b"), request("c")], 10) as ticket:
        assert (count_at("boot1"), count_at("")) == (3, 0)
        ticket.cancel("a")
        engine.router.handle(SubmitRefused("b", 1, "boot1"))
        assert (count_at("boot1"), count_at("")) == (1, 1), "this box's engine would refuse it again now"
        engine.router.handle(EnginesChanged())
        assert (count_at("boot1"), count_at("")) == (2, 0)
        engine.goes_down()
        assert (count_at("boot1"), count_at("")) == (0, 2)
        engine.comes_up()
        assert (count_at("boot2"), count_at("")) == (1, 1), "a request that has seen an engine die goes on alone"
        engine.emit(token(0, engine.machine._live["b"].attempt, name="b", finish="stop"))
        assert (count_at("boot2"), count_at("")) == (1, 0)
    assert (count_at("boot2"), count_at("")) == (0, 0)


async def test_a_message_that_the_engine_does_not_get_is_sent_again_at_the_next_look(engine: FakeEngine) -> None:
    sends, engine.send = engine.send, lambda message: False  # type: ignore[method-assign]
    with engine.router.open([request()], 10):
        assert engine.machine.place_of("r") == ("", 1)
        engine.send = sends  # type: ignore[method-assign]
        engine.router.handle(EnginesChanged())
        assert engine.attempts() == [(2, ())]


async def test_an_instruction_that_fails_costs_no_other_one(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.router.open([request("a"), request("b")], 10) as ticket:
        monkeypatch.setattr(ticket, "deliver", lambda _: {}["nobody has foreseen that"])
        with pytest.raises(KeyError):
            engine.emit(token(0, name="a", finish="stop"), token(0, name="b", finish="stop"))
        monkeypatch.undo()
        engine.router.handle(TimePassed())
        assert [item.request for item in ticket._items] == ["b"]
