"""Requests at engines that stand still or crawl: they go on elsewhere, and begin where engines are as fast as usual."""

from __future__ import annotations

import pytest
from support.request_world import OWN, World

from edgemoe.front import request_events as events
from edgemoe.front.engine_meter import STALE_S, UNUSUAL, EnginePace
from edgemoe.front.request_attempts import MOST_EVASIONS, SLOW_WINDOWS, WINDOW_S
from edgemoe.front.request_table import RequestState
from edgemoe.telemetry import metrics as names


def begun(node: str = OWN, **sampling: int) -> World:
    """Returns a world of three boxes in which request r runs at that box's engine and has a token."""
    world = World("least", {"d": "both", "e": "both"})
    world.loads = {other: 0 if other == node else 2 for other in "de"}
    world.hosted = 0 if node == OWN else 3
    world.accept("r", **sampling)
    world.hosted, world.loads = 0, {}
    for event in world.bag:
        world.happen(event)
    world.bag.clear()
    write(world, 1)
    assert at(world) == world.engines[node].place
    return world


def at(world: World) -> str:
    return world.machine.place_of("r")[0]


def write(world: World, count: int, *, finish: bool = False) -> None:
    event = world.emit(at(world), "r", count, finish=finish)
    assert event is not None
    world.happen(event)


def pass_time(world: World, seconds: float, a_second: float = 0.0) -> None:
    """Passes time in which the request gets `a_second` tokens a second."""
    due = 0.0
    for _ in range(int(4 * seconds)):
        world.now_s += 0.25
        due += a_second / 4
        if due >= 1:
            write(world, int(due))
            due -= int(due)
        world.happen(events.TimePassed())


@pytest.mark.parametrize("node", [OWN, "d"])
def test_a_request_leaves_an_engine_that_stands_still_and_its_answer_is_whole(node: str) -> None:
    world = begun(node)
    first = world.engines[node]
    first.is_still = True
    world.happen(events.TimePassed())
    assert at(world) not in ("", first.place)
    assert world.machine.evaded == {"still": 1}
    assert not first.attempts  # cancelled there
    write(world, 5)
    world.come_to_an_end()
    assert world.clients["r"].ended == "finished"


def test_an_engine_that_stands_still_gets_no_request_and_gets_them_again_later() -> None:
    world = World("pull", {"d": "both"})
    world.at_once = world.knows = True
    own = world.engines[OWN]
    own.is_still = True
    world.lead("")
    world.accept("r")
    assert at(world) == world.engines["d"].place
    own.is_still = False
    world.accept("s")
    assert world.machine.place_of("s")[0] == own.place


def test_a_request_stays_where_no_other_engine_has_room_and_at_the_last_of_several_that_stand_still() -> None:
    world = begun()
    world.loads = {"d": 8, "e": 8}
    world.engines[OWN].is_still = True
    world.happen(events.TimePassed())
    assert at(world) == world.engines[OWN].place
    world.loads = {}
    for engine in world.engines.values():
        engine.is_still = True
    world.happen(events.TimePassed())
    assert at(world) == world.engines[OWN].place
    for times in range(1, MOST_EVASIONS + 3):
        for engine in world.engines.values():
            engine.is_still = engine.place == at(world)
        world.now_s += 30.0
        world.happen(events.TimePassed())
        assert world.machine.evaded["still"] == min(times, MOST_EVASIONS)
    assert world.machine.state_of("r") is RequestState.RUNNING


def test_a_box_on_its_own_waits_for_its_engine() -> None:
    world = World("pull")
    world.accept("r")
    world.engines[OWN].is_still = True
    world.happen(events.TimePassed())
    world.accept("s")
    assert at(world) == world.machine.place_of("s")[0] == world.engines[OWN].place


@pytest.mark.parametrize("node", [OWN, "d"])
def test_a_request_leaves_an_engine_that_gives_a_tenth_of_the_tokens_that_another_would(node: str) -> None:
    world = begun(node)
    world.engines["e"].step_s = 0.03
    pass_time(world, SLOW_WINDOWS * WINDOW_S + 1, a_second=2)
    assert at(world) not in ("", world.engines[node].place)
    assert world.machine.evaded == {"slow": 1}
    world.come_to_an_end()


@pytest.mark.parametrize(
    ("a_second", "step_s", "max_tokens", "busy"),
    [
        (8.0, 0.03, 4000, False),  # not slow enough
        (2.0, 0.0, 4000, False),  # nobody says how fast it is
        (2.0, 0.1, 4000, False),  # the others are hardly faster
        (2.0, 0.03, 15, False),  # nearly done
        (2.0, 0.03, 4000, True),  # the others have no slot
    ],
)
def test_a_request_stays_unless_it_pays(a_second: float, step_s: float, max_tokens: int, busy: bool) -> None:
    world = begun(max_tokens=max_tokens)
    for node in "de":
        world.engines[node].step_s = step_s
    world.loads = dict.fromkeys("de", 2 if busy else 0)
    pass_time(world, SLOW_WINDOWS * WINDOW_S + 1, a_second)
    assert at(world) == world.engines[OWN].place
    assert not world.machine.evaded


def test_one_slow_moment_moves_nothing() -> None:
    world = begun()
    world.engines["d"].step_s = 0.03
    for _ in range(4):
        pass_time(world, WINDOW_S, a_second=1)
        pass_time(world, WINDOW_S, a_second=40)
    assert at(world) == world.engines[OWN].place


def test_a_request_that_returns_its_prompts_probabilities_stays() -> None:
    world = begun(prompt_logprobs=1)
    world.machine._live["r"].emitted.clear()
    world.engines[OWN].is_still = True
    world.happen(events.TimePassed())
    assert at(world) == world.engines[OWN].place


def test_the_pace_of_an_engine_is_its_last_steps_and_after_a_while_its_usual_ones() -> None:
    pace, steps, seconds, now_s = EnginePace(), 0.0, 0.0, 0.0

    def run(step_s: float, times: int = 1) -> None:
        nonlocal steps, seconds, now_s
        for _ in range(times):
            steps, seconds, now_s = steps + 10, seconds + 10 * step_s, now_s + 0.4
            pace.read_counters(
                {
                    names.named(names.STEPS, phase="decode"): steps,
                    names.named(names.STEP_SECONDS, phase="decode"): seconds,
                },
                now_s,
            )

    assert pace.step_s(now_s) == 0.0
    assert pace.is_usual(now_s)
    run(0.02, 50)
    assert pace.step_s(now_s) == pytest.approx(0.02)
    run(0.02 * UNUSUAL * 2, 3)
    assert not pace.is_usual(now_s)
    assert pace.step_s(now_s) == pytest.approx(0.04 * UNUSUAL)
    assert pace.is_usual(now_s + STALE_S)
    assert pace.step_s(now_s + STALE_S) < 0.03
    steps = seconds = 0.0  # another engine
    run(0.02, 2)
    assert pace.is_usual(now_s)
