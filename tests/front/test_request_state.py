"""Requests of a front end once each, with their own tokens in order, in any order of events."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from support.request_world import OWN, World, failed

from edgemoe.config.settings import Route
from edgemoe.front import request_events as events
from edgemoe.front.request_table import TRANSITIONS, RequestState
from edgemoe.types.request import Phases

DESIGN = Path(__file__).parents[2] / "docs/design/requests.md"


class AnyOrder:
    """Up to six requests on up to three boxes, and one random event after the other."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        pick = self.chance.choice
        boxes = {node: pick(get_args(Phases)) for node in "de"[: pick([0, 1, 2, 2])]}
        self.world = World(pick(get_args(Route)), boxes, slots=pick([1, 2, 4]))
        self.world.engines[OWN].role = pick(["both", *get_args(Phases)])
        self.number = 0
        self.happened: list[Any] = [(self.world.route, boxes, self.world.engines[OWN].role, self.world.slots)]
        often = {self.a_client_asks: 2, self.an_engine_emits: 4, self.something_arrives_late: 3, self.a_prompt_ends: 3}
        often |= {self.blocks_are_fetched: 4, self.the_leader_decides: 3, self.engines_are_looked_at: 2}
        seldom = [self.a_client_hangs_up, self.time_passes, self.an_engine_dies, self.a_box_is_cut_off]
        seldom += [self.another_leads, self.other_prompts_are_known, self.an_attempt_is_turned_away]
        seldom += [self.an_engine_stands_still_or_goes_on, self.a_box_tells_how_fast_it_is]
        seldom += [self.a_fetch_is_turned_away, self.attempts_are_forgotten, self.a_box_tells_its_load, self.all_fail]
        self.steps: dict[Callable[[], None], int] = often | dict.fromkeys(seldom, 1)

    def run(self) -> None:
        """Runs random events, and then lets all requests end."""
        steps, often = list(self.steps), list(self.steps.values())
        try:
            for step in self.chance.choices(steps, often, k=self.chance.choice([8, 15, 30, 60])):
                step()
            self.world.come_to_an_end()
        except AssertionError as error:
            told = "\n".join(map(str, self.happened))
            raise AssertionError(f"{error}, with the seed {self.seed} after\n{told}") from error

    def happen(self, event: events.RequestEvent) -> None:
        self.happened.append(event)
        self.world.happen(event)

    def arrive(self, event: events.RequestEvent | None) -> None:
        """Delivers an event now, later, twice, or, from another box, never."""
        when = self.chance.choice(["now", "now", "now", "later", "twice", "never"])
        if event is not None and when in ("now", "twice"):
            self.happen(event)
        if event is not None and (when in ("later", "twice") or (when == "never" and not getattr(event, "node", "x"))):
            self.world.bag.append(event)

    def live(self) -> str:
        """Returns a live request; "" if there is none."""
        return self.chance.choice(sorted(self.world.machine._live) or [""])

    def place(self) -> str:
        return self.chance.choice([engine.place for engine in self.world.engines.values()])

    def node(self) -> str:
        return self.chance.choice(list(self.world.engines))

    # --- events

    def a_client_asks(self) -> None:
        names = [f"r{self.number + n}" for n in range(self.chance.randint(1, 2))]
        if len(self.world.machine) < 6:
            self.number += len(names)
            self.happened.append(names)
            self.world.accept(*names, timeout_s=self.chance.choice([30.0, 1e6, 1e6]))

    def a_client_hangs_up(self) -> None:
        if name := self.live():
            self.happened.append(f"{name} hangs up")
            self.world.cancel(name)

    def time_passes(self) -> None:
        self.world.now_s += self.chance.choice([0.1, 1.5, 6.0, 11.0, 25.0, 70.0])
        self.happened.append(self.world.now_s)
        self.happen(events.TimePassed())

    def engines_are_looked_at(self) -> None:
        self.happen(events.EnginesChanged())

    def an_engine_dies(self) -> None:
        node, is_back = self.node(), self.chance.random() < 0.6
        self.happened.append(f"{node} dies, {is_back=}")
        self.world.die(node, is_back=is_back)
        if self.chance.random() < 0.6:
            self.happen(events.EnginesChanged())

    def a_box_is_cut_off(self) -> None:
        """Disconnects a box, or connects it again. Its engine continues its work."""
        node = self.node()
        self.happened.append(f"{node} is reached or not")
        self.world.engines[node].is_up ^= True

    def an_engine_stands_still_or_goes_on(self) -> None:
        node = self.node()
        self.world.engines[node].is_still ^= True
        self.happened.append(f"{node} stands still: {self.world.engines[node].is_still}")
        self.happen(events.TimePassed())

    def a_box_tells_how_fast_it_is(self) -> None:
        node = self.node()
        self.world.engines[node].step_s = self.chance.choice([0.0, 0.01, 1.0])
        self.happened.append(f"{node} takes {self.world.engines[node].step_s} s a step")

    def another_leads(self) -> None:
        leader = self.chance.choice(["", "lead", "other", OWN])
        self.happened.append(f"'{leader}' leads")
        self.world.lead(leader)

    def other_prompts_are_known(self) -> None:
        known = [self.chance.random() < 0.5 for _ in range(4)]
        self.world.at_once, self.world.knows, self.world.cached, self.world.alike = known
        self.happened.append(f"known prompts: {known}")

    def an_engine_emits(self) -> None:
        if name := self.live():
            place = self.world.machine.place_of(name)[0] if self.chance.random() < 0.8 else self.place()
            ends = self.chance.random() < 0.2
            self.arrive(self.world.emit(place, name, self.chance.randint(1, 12), finish=ends))

    def something_arrives_late(self) -> None:
        if bag := self.world.bag:
            at = self.chance.randrange(len(bag))
            self.happen(bag.pop(at) if self.chance.random() < 0.7 else bag[at])

    def a_prompt_ends(self) -> None:
        if name := self.live():
            self.arrive(self.world.prompt_ended(self.world.machine.place_of(name)[0], name))

    def blocks_are_fetched(self) -> None:
        if name := self.live():
            self.arrive(self.world.fetched(self.place(), name, self.chance.choice(["", "", "missing"])))

    def the_leader_decides(self) -> None:
        """Lets the leader decide, name a vanished engine, decide nothing, or not answer."""
        if offers := sorted(self.world.offers):
            number, place, how = self.chance.choice(offers), self.place(), self.chance.random()
            if how < 0.2:
                self.arrive(events.OfferUnanswered(number))
            elif how < 0.4:
                self.arrive(self.world.decide_nothing(number))
            else:
                named = place if ":" in place else f"{OWN}:{place}"
                self.arrive(self.world.decide(number, "x:gone" if how < 0.5 else named))

    def an_attempt_is_turned_away(self) -> None:
        self._lose(lambda name, attempt, place: events.SubmitRefused(name, attempt, place))

    def attempts_are_forgotten(self) -> None:
        self._lose(lambda name, attempt, place: events.RequestsForgotten(place, [(name, attempt)]))

    def _lose(self, told: Callable[[str, int, str], events.RequestEvent]) -> None:
        if name := self.live():
            place, attempt = self.world.machine.place_of(name)
            for engine in self.world.engines.values():
                if engine.place == place:
                    engine.attempts.pop((name, attempt), None)
            self.happen(told(name, attempt, place))

    def a_fetch_is_turned_away(self) -> None:
        if name := self.live():
            place, attempt = self.place(), self.world.machine.place_of(name)[1]
            for engine in self.world.engines.values():
                if engine.place == place:
                    engine.fetches.discard((name, attempt))
            self.happen(events.FetchRefused(name, attempt, place))

    def a_box_tells_its_load(self) -> None:
        if (node := self.node()) != OWN:
            self.happen(events.LoadReported(node, self.world.engines[node].place))

    def all_fail(self) -> None:
        if self.chance.random() < 0.1:
            self.happen(events.AllRequestsFailed(failed("over")))


def run_all(seeds: range) -> None:
    """Runs the walks, and asserts that together they reach all outcomes."""
    seen = Counter[str]()
    for seed in seeds:
        order = AnyOrder(seed)
        order.run()
        machine = order.world.machine
        counts = ("stale", "gaps", "resubmitted", "blamed", "forgotten", "offered", "granted", "moved")
        seen.update({name: getattr(machine, name) for name in counts})
        seen.update(f"{before} -> {after}" for before, after in order.world.went)
    assert all(seen.values()), seen
    possible = {f"{before} -> {after}" for before, ends in TRANSITIONS.items() for after in ends}
    assert possible <= seen.keys(), f"never seen: {possible - seen.keys()}"


def test_in_any_order_of_events_each_request_ends_once_with_its_tokens_in_order() -> None:
    run_all(range(2000))


@pytest.mark.slow
def test_many_more_events_keep_one_leader() -> None:
    run_all(range(2000, 100_000))


def test_the_design_page_has_the_transitions() -> None:
    rows = re.findall(r"(?m)^\| ([A-Z]+) \| ([A-Z, ]+) \|$", DESIGN.read_text())
    table = {RequestState[start]: {RequestState[end] for end in ends.split(", ")} for start, ends in rows}
    assert table == {state: set(ends) for state, ends in TRANSITIONS.items() if ends}
