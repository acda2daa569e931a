"""The request log: only the current attempt's next index gets through, whatever arrives."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import DeadlineExceeded, EngineCrashed, InvalidRequest, QueueFull, RequestError
from edgemoe.front.request_log import PATIENCE_S, RequestLog
from edgemoe.front.requests.submission import LoggedSubmission
from edgemoe.ipc.messages import Cancel, Submit, ToEngine
from edgemoe.policy.blame import DEATHS, FRUITLESS_ATTEMPTS, FURTHER_TOKENS
from edgemoe.types.request import Emission, Request, Sampling


class FakeEngine:
    """Takes what the request log sends; `up` says whether there is an engine at all."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[ToEngine] = []
        self.now = 100.0
        self.request_log = RequestLog(4, self.submit, self.cancel, lambda: self.now)

    def submit(self, message: Submit) -> str:
        if self.up:
            self.sent.append(message)
        return "engine" if self.up else ""

    def cancel(self, place: str, message: Cancel) -> None:
        assert place == "engine"
        if self.up:
            self.sent.append(message)

    def attempts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(sent.attempt, sent.emitted) for sent in self.sent if isinstance(sent, Submit)]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.request_log.check_integrity()


def request(name: str = "r") -> Request:
    return Request(id=name, prompt=(1,), sampling=Sampling(max_tokens=100), seed=1)


def long(name: str) -> Request:
    return msgspec.structs.replace(request(name), sampling=Sampling(max_tokens=2000))


def token(index: int, attempt: int = 1, name: str = "r", finish: str = "") -> Emission:
    return Emission(request=name, attempt=attempt, index=index, token=1000 + index, finish=finish)


async def drain(ticket: LoggedSubmission) -> list[int]:
    """The tokens of a ticket, to its end."""
    return [item.token async for items in ticket for item in items if item.token is not None]


async def test_tokens_pass_in_order_and_the_end_ends_the_iteration(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10) as ticket:
        engine.request_log.take([token(0), token(1), token(2, finish="stop")])
        assert await drain(ticket) == [1000, 1001, 1002]
    assert not any(isinstance(sent, Cancel) for sent in engine.sent)


async def test_a_replay_carries_what_was_emitted_and_drops_what_comes_late(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10) as ticket:
        engine.request_log.take([token(0), token(1)])
        engine.request_log.replay()
        assert engine.attempts() == [(1, ()), (2, (1000, 1001))]
        engine.request_log.take([token(2, attempt=1), token(0, attempt=2), token(2, attempt=2, finish="length")])
        assert await drain(ticket) == [1000, 1001, 1002]
    assert engine.request_log.stale == 2


async def test_a_gap_is_never_delivered_but_asked_for_again(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10):
        engine.request_log.take([token(0), token(2)])
        assert engine.sent[1:] == [Cancel(request="r", attempt=1), engine.sent[2]]
        assert engine.attempts()[-1] == (2, (1000,))


async def test_requests_accepted_without_an_engine_are_submitted_to_the_next(engine: FakeEngine) -> None:
    engine.up = False
    with engine.request_log.open([request()], 10):
        assert engine.sent == []
        engine.up = True
        engine.request_log.replay()
        assert engine.attempts() == [(1, ())]
        assert engine.request_log.replayed == 0


async def test_leaving_the_block_cancels_what_still_runs(engine: FakeEngine) -> None:
    with engine.request_log.open([request("a"), request("b")], 10):
        engine.request_log.take([token(0, name="a", finish="stop")])
    assert engine.sent[2:] == [Cancel(request="b", attempt=1)]
    assert len(engine.request_log) == 0


async def test_cancelling_one_of_several_leaves_the_others(engine: FakeEngine) -> None:
    with engine.request_log.open([request("a"), request("b")], 10) as ticket:
        ticket.cancel("a")
        engine.request_log.take([token(0, name="a"), token(0, name="b", finish="stop")])
        assert await drain(ticket) == [1000]


async def test_a_full_request_log_says_when_to_come_back(engine: FakeEngine) -> None:
    with engine.request_log.open([request(str(n)) for n in range(4)], 10):
        with pytest.raises(QueueFull) as full, engine.request_log.open([request("x")], 10):
            pass
        assert full.value.retry_after_s >= 1
    with pytest.raises(InvalidRequest), engine.request_log.open([request(str(n)) for n in range(5)], 10):
        pass


def opened(request_log: RequestLog, stack: ExitStack, principal: str, users: int, n: int = 1) -> int:
    """How many choices of so many users of the principal, in turn, are accepted, `n` at once."""
    for number in range(1000):
        user = f"{principal}/{number % users}"
        some = [
            msgspec.structs.replace(request(f"{principal} {number} {at}"), user=user, principal=principal)
            for at in range(n)
        ]
        try:
            stack.enter_context(request_log.open(some, 10))
        except QueueFull:
            return number * n
    raise AssertionError("never full")


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("users", [24, 1000])
async def test_no_principal_takes_all_the_room_whatever_users_it_names(users: int, n: int) -> None:
    request_log = RequestLog(100, lambda message: "engine", lambda place, message: None)
    with ExitStack() as stack:
        taken = opened(request_log, stack, "greedy", users, n)
        assert 80 - n < taken <= 80
        assert opened(request_log, stack, "second", 1) >= 15
        assert opened(request_log, stack, "third", 1) >= 1
        request_log.check_integrity()


async def test_one_request_is_no_way_around_the_share_of_a_principal() -> None:
    request_log = RequestLog(100, lambda message: "engine", lambda place, message: None)
    some = [msgspec.structs.replace(request(str(at)), user="p", principal="p") for at in range(90)]
    with pytest.raises(InvalidRequest, match="one user may ever have"), request_log.open(some, 10):
        pass


async def test_no_user_takes_all_that_its_principal_has() -> None:
    request_log = RequestLog(100, lambda message: "engine", lambda place, message: None)
    with ExitStack() as stack:
        assert opened(request_log, stack, "one", 1) == request_log.capacity_per_user == 76
        other = msgspec.structs.replace(request("other"), user="one/other", principal="one")
        stack.enter_context(request_log.open([other], 10))
        request_log.check_integrity()


async def test_a_request_that_fells_every_engine_is_found_and_given_up(engine: FakeEngine) -> None:
    """`bad` kills whatever runs it before anybody gets a token; its neighbours must live."""
    request_log = engine.request_log
    with (
        request_log.open([request("good")], 10) as good,
        request_log.open([request("bad"), request("fine")], 10) as other,
    ):
        for _ in range(6):
            running = {sent.request.id for sent in engine.sent if isinstance(sent, Submit)}
            if "bad" not in running:  # this engine lives: each of the others says something
                for name in ("good", "fine"):
                    if (live := request_log._live[name]).attempts.fruitless:
                        done = len(live.emitted)
                        request_log.take([token(done + n, live.attempt, name) for n in range(FURTHER_TOKENS + 1)])
            engine.sent.clear()
            request_log.replay()
            request_log.check_integrity()
        with pytest.raises(EngineCrashed, match="in a row"):
            await drain(other)
        assert good.live == {"good"}
        assert other.live == {"fine"}


async def test_a_request_that_fells_engines_at_one_of_its_tokens_is_given_up(engine: FakeEngine) -> None:
    """What a dying engine had computed is handed over in part, a token more each time; its neighbour gets further."""
    request_log = engine.request_log
    with request_log.open([request("bad")], 10) as bad, request_log.open([request("good")], 10) as good:
        request_log.take([token(n, 1, name) for n in range(36) for name in ("bad", "good")])
        for _ in range(6):
            request_log.replay()
            request_log.check_integrity()
            felled = "bad" in request_log._live and request_log.place_of("bad")[0] != ""
            for name, count in (("bad", 1), ("good", 2 if felled else FURTHER_TOKENS + 1)):
                if (live := request_log._live.get(name)) is not None and live.place:
                    done = len(live.emitted)
                    request_log.take([token(done + n, live.attempt, name) for n in range(count)])
        with pytest.raises(EngineCrashed, match="in a row"):
            await drain(bad)
        assert good.live == {"good"}
        assert request_log.blamed == 1


class Deaths:
    """Engines that die one after the other, and what each of them emits first."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.request_log, self.seen = engine, engine.request_log, 0

    def next(self, tokens: dict[str, int], fells: str = "") -> None:
        """The requests that have an engine get further; it dies where `fells` is among them, or nobody does it."""
        here = [name for name in tokens if self.request_log.place_of(name)[0]]
        for name in here:
            live = self.request_log._live[name]
            done = len(live.emitted)
            self.request_log.take([token(done + n, live.attempt, name) for n in range(tokens[name])])
        self.engine.now += PATIENCE_S + 1.0
        self.request_log.expire()
        dies = not fells or fells in here
        self.seen += dies
        self.request_log.replay(() if dies else ("engine",))
        self.request_log.check_integrity()


@pytest.mark.parametrize("every", [10, 25, 60])
async def test_a_request_that_fells_an_engine_every_so_many_tokens_is_given_up_and_its_neighbours_are_not(
    engine: FakeEngine, every: int
) -> None:
    names, deaths = ("first", "slow", "bad", "last"), Deaths(engine)
    with ExitStack() as stack:
        tickets = {name: stack.enter_context(engine.request_log.open([long(name)], 1e6)) for name in names}
        while "bad" in engine.request_log._live and deaths.seen < 20:
            deaths.next({"first": every, "slow": 3, "bad": every, "last": every - 3}, fells="bad")
        assert deaths.seen == DEATHS
        with pytest.raises(EngineCrashed, match="ended while they ran"):
            await drain(tickets["bad"])
        for name in ("first", "slow", "last"):
            assert tickets[name].live == {name}
            assert engine.request_log.place_of(name)[0]  # it waits no more


async def test_a_request_outlives_the_deaths_that_others_are_blamed_for(engine: FakeEngine) -> None:
    deaths = Deaths(engine)
    with engine.request_log.open([long("good")], 1e6) as good:
        for number in range(8):
            with engine.request_log.open([long(f"bad-{number}")], 1e6):
                while f"bad-{number}" in engine.request_log._live:
                    deaths.next({"good": 12, f"bad-{number}": 0}, fells=f"bad-{number}")
        assert deaths.seen <= 8 * FRUITLESS_ATTEMPTS
        assert good.live == {"good"}


def places(engine: FakeEngine) -> set[str]:
    """The requests that have an engine."""
    return {name for name, live in engine.request_log._live.items() if live.place}


async def test_suspects_go_on_alone_once_the_others_have_ended_and_what_comes_meanwhile_waits(
    engine: FakeEngine,
) -> None:
    request_log = engine.request_log
    with ExitStack() as stack:
        tickets = {name: stack.enter_context(request_log.open([long(name)], 1e6)) for name in ("old", "bad", "new")}
        request_log.take([token(n, 1, "old") for n in range(FURTHER_TOKENS + 1)])
        request_log.replay()
        assert places(engine) == {"old"}, "suspects are not replayed beside others"
        tickets["late"] = stack.enter_context(request_log.open([long("late")], 1e6))
        assert places(engine) == {"old", "late"}, "nobody on trial holds up who comes"
        for name in ("old", "late"):
            request_log.take(
                [token(len(request_log._live[name].emitted), request_log._live[name].attempt, name, "stop")]
            )
        assert places(engine) == {"bad"}, "the first suspect is alone"
        stack.enter_context(request_log.open([long("later")], 1e6))
        assert places(engine) == {"bad"}, "and stays alone"
        request_log.replay()
        with pytest.raises(EngineCrashed, match="2 engines in a row"):
            await drain(tickets["bad"])
        request_log.check_integrity()
        assert places(engine) >= {"later", "new"}, "the death is explained: nobody else is a suspect"
        assert request_log.blamed == 1


async def test_a_suspect_beside_endless_others_is_tried_after_a_while_and_holds_them_up_for_as_long(
    engine: FakeEngine,
) -> None:
    request_log = engine.request_log
    with ExitStack() as stack:
        for name in ("old", "new"):
            stack.enter_context(request_log.open([long(name)], 1e6))
        request_log.take([token(n, 1, "old") for n in range(FURTHER_TOKENS + 1)])
        request_log.replay()
        assert places(engine) == {"old"}
        engine.now += PATIENCE_S
        request_log.expire()
        assert places(engine) == {"old", "new"}
        stack.enter_context(request_log.open([long("late")], 1e6))
        assert places(engine) == {"old", "new"}
        engine.now += PATIENCE_S
        request_log.expire()
        assert places(engine) == {"old", "new", "late"}


async def test_a_request_outlives_deaths_that_come_at_no_token_in_particular(engine: FakeEngine) -> None:
    deaths = Deaths(engine)
    with engine.request_log.open([long("good")], 1e6) as good:
        for tokens in (30, 12, 11, 45, 20, 60, 30, 15, 10, 90):
            deaths.next({"good": tokens})
        assert good.live == {"good"}


async def test_a_skipped_token_is_no_death_of_an_engine(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10) as ticket:
        for attempt in range(1, 8):
            engine.request_log.take([token(attempt - 1, attempt), token(attempt + 1, attempt)])
        assert ticket.live == {"r"}


async def test_a_deadline_ends_a_request_with_its_error(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10) as ticket:
        engine.request_log.take([token(0)])
        engine.now += 11
        engine.request_log.expire()
        engine.request_log.take([token(1)])
        received = aiter(ticket)
        assert [item.index for item in await anext(received)] == [0]
        with pytest.raises(DeadlineExceeded):
            await anext(received)
    assert engine.sent[-1] == Cancel(request="r", attempt=1)


async def test_an_error_that_many_are_told_keeps_none_of_them(engine: FakeEngine) -> None:
    """It would keep all the frames that it has passed, and what those hold: each one's prompt."""

    def refused() -> int:
        with pytest.raises(RequestError) as caught, engine.request_log.open([request()], 10):
            pass
        return len(list(traceback.walk_tb(caught.value.__traceback__)))

    async def ended(name: str) -> int:
        engine.request_log.closed = None
        with engine.request_log.open([request(name)], 10) as ticket:
            engine.request_log.fail_all(over)
            with pytest.raises(RequestError) as caught:
                await anext(aiter(ticket))
        return len(list(traceback.walk_tb(caught.value.__traceback__)))

    over = RequestError("over")
    engine.request_log.closed = over
    assert refused() == refused()
    assert await ended("a") == await ended("b")


async def test_a_replay_carries_the_time_that_is_left_and_the_time_that_has_passed(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10):
        engine.now += 4
        engine.request_log.replay()
        times = [(sent.remaining_ms, sent.waited_ms) for sent in engine.sent if isinstance(sent, Submit)]
        assert times == [(10_000, 0), (6_000, 4_000)]


async def test_waiting_for_an_empty_request_log_ends_with_the_last_request(engine: FakeEngine) -> None:
    with engine.request_log.open([request()], 10):
        waiting = asyncio.ensure_future(engine.request_log.empty())
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.request_log.fail_all(RequestError("over"))
        await waiting


NAMES = ("r0", "r1", "r2", "r3")
OF_ONE = ("emit", "finish", "late", "skip", "repeat", "turned away", "cancel")
EVENTS = st.lists(
    st.tuples(st.sampled_from(["replay", "down", "up", "wait", *OF_ONE]), st.sampled_from(NAMES), st.integers(1, 12)),
    max_size=60,
)


class Happening:
    """What befalls four requests, of which two are one client's, and whether each gets its own tokens in order."""

    def __init__(self, tickets: ExitStack) -> None:
        self.engine = FakeEngine()
        self.log = self.engine.request_log
        self.tickets: list[LoggedSubmission] = []
        self.log._hand = self.submit
        for names in (NAMES[:2], NAMES[2:3], NAMES[3:]):
            self.tickets.append(tickets.enter_context(self.log.open([self.asked(name) for name in names], 20.0)))

    def submit(self, message: Submit) -> str:
        delivered = [
            item.token for ticket in self.tickets for item in ticket._items if item.request == message.request.id
        ]
        assert message.emitted == tuple(delivered), "an attempt goes on behind what its client has"
        return self.engine.submit(message)

    @staticmethod
    def asked(name: str) -> Request:
        return Request(id=name, prompt=(1,), sampling=Sampling(max_tokens=2000), seed=1, user=f"of {min(name, 'r1')}")

    @staticmethod
    def emission(name: str, attempt: int, index: int, finish: str = "") -> Emission:
        return Emission(request=name, attempt=attempt, index=index, token=token_of(name, index), finish=finish)

    def happen(self, event: str, name: str, count: int) -> None:
        live = self.log._live.get(name)
        match event:
            case "up" | "down":
                self.engine.up = event == "up"
            case "replay":
                self.log.replay()
            case "wait":
                self.engine.now += count / 4
                self.log.expire()
            case _ if live is None:
                pass
            case "cancel":
                self.log.cancel(name)
            case "turned away":
                self.log.turned_away(name, live.attempt)
            case _ if live.place or event == "late":
                done = len(live.emitted)
                first = {"skip": done + count, "repeat": max(0, done - count)}.get(event, done)
                attempt = live.attempt - (event == "late")
                ends = "stop" if event == "finish" else ""
                last = first + count - 1
                self.log.take(
                    self.emission(name, attempt, index, ends if index == last else "")
                    for index in range(first, last + 1)
                )
        self.check()

    def check(self) -> None:
        self.log.check_integrity()
        for ticket in self.tickets:
            for name in NAMES:
                items = [item for item in ticket._items if item.request == name]
                assert [(item.index, item.token) for item in items] == [
                    (n, token_of(name, n)) for n in range(len(items))
                ]
                assert not any(item.finish for item in items[:-1])

    def come_to_an_end(self) -> None:
        """Whoever is left is answered by engines that live from now on."""
        self.engine.up = True
        self.log.replay()
        for _ in NAMES:
            for name in NAMES:
                self.happen("finish", name, 12)
        assert not len(self.log), "somebody waits for ever"


def token_of(name: str, index: int) -> int:
    return 10_000 * int(name[1:]) + index


@given(EVENTS)
def test_no_order_of_events_repeats_skips_or_changes_a_token_or_leaves_a_request_without_end(
    events: list[tuple[str, str, int]],
) -> None:
    with ExitStack() as tickets:
        happening = Happening(tickets)
        for event in events:
            happening.happen(*event)
        happening.come_to_an_end()


async def test_each_engine_s_requests_are_counted_wherever_they_go(engine: FakeEngine) -> None:
    log = engine.request_log
    with log.open([request("a"), request("b"), request("c")], 10) as ticket:
        assert (log.count_at("engine"), log.count_at("")) == (3, 0)
        ticket.cancel("a")
        log.turned_away("b", 1)
        assert (log.count_at("engine"), log.count_at("")) == (2, 0)
        engine.up = False
        log.turned_away("b", 2)
        assert (log.count_at("engine"), log.count_at("")) == (1, 1)
        log.replay()
        log.check_integrity()
        assert (log.count_at("engine"), log.count_at("")) == (0, 2)
        engine.up = True
        log.replay()
        assert (log.count_at("engine"), log.count_at("")) == (1, 1), "which has seen an engine die goes on alone"
        log.take([token(0, log._live["b"].attempt, name="b", finish="stop")])
        assert (log.count_at("engine"), log.count_at("")) == (1, 0)
    assert (log.count_at("engine"), log.count_at("")) == (0, 0)
