"""The engine driven by rules in any order: requests arrive, run, are paused, cancelled and late, and all of them
end.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from support.engine_kit import Drive, prompt

from edgemoe.engine.fairness import MAX_USERS

BLOCKS = 12  # so few that sequences are paused
SEQUENCES, QUEUE = 3, 4
MOST_PROMPT, MOST_ANSWER = 90, 30
STEPS_EACH = 60  # steps in which the longest request ends, if it is alone
LATE_S = 2.0
USERS = ("", "anna", "bert", "carl")
REQUESTS = st.tuples(  # lengths of prompt and answer, first tokens of the prompt, user, time left
    st.integers(1, MOST_PROMPT),
    st.integers(1, MOST_ANSWER),
    st.integers(0, 2),
    st.sampled_from(USERS),
    st.sampled_from([LATE_S, 1e6, 1e6]),
)


class Served(RuleBasedStateMachine):
    """Records the requests, and checks the engine's emissions against them after each rule."""

    @initialize(
        preemption=st.sampled_from(["park", "recompute"]),
        scheduler=st.sampled_from(["sjf", "fcfs"]),
        prefix_cache=st.booleans(),
    )
    def begin(self, **chosen: Any) -> None:
        self.drive = Drive(blocks=BLOCKS, step_tokens=24, max_sequences=SEQUENCES, max_queue=QUEUE, **chosen)
        self.count = 0
        self.asked: dict[str, tuple[int, float]] = {}  # requests that have not ended -> attempt, deadline
        self.cancelled: set[str] = set()
        self.ended: set[str] = set()
        self.next_index: dict[tuple[str, int], int] = {}
        self.most: dict[str, int] = {}
        self.draining = False
        self.read = 0

    # --- rules

    @rule(wanted=st.lists(REQUESTS, min_size=1, max_size=SEQUENCES + 1))
    def submit(self, wanted: list[tuple[int, int, int, str, float]]) -> None:
        """Submits requests; prompts of one family begin alike."""
        for length, answer, family, user, seconds in wanted:
            self.count += 1
            name = f"r{self.count}"
            self.drive.submit(prompt(length, family), name, user=user, max_tokens=answer, remaining_s=seconds)
            self.asked[name] = (1, self.drive.now_s + seconds)
            self.most[name] = answer
            self._arrive()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        """Submits a request again, as a front that knows fewer of its tokens, or more."""
        name = data.draw(st.sampled_from(sorted(self.asked)))
        attempt, deadline_s = self.asked[name]
        emitted = prompt(data.draw(st.integers(0, self.most[name] - 1)), 9)
        seconds = deadline_s - self.drive.now_s
        self.drive.submit(
            prompt(20, 1), name, emitted=emitted, attempt=attempt + 1, max_tokens=self.most[name], remaining_s=seconds
        )
        self.asked[name] = (attempt + 1, deadline_s)
        self.next_index[name, attempt + 1] = len(emitted)
        self._arrive()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), stale=st.booleans())
    def cancel(self, data: st.DataObject, stale: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        attempt, _ = self.asked[name]
        self.drive.engine.loop.cancel(name, attempt - stale)
        if not stale:
            del self.asked[name]
            self.cancelled.add(name)
        self._arrive()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.drive.step()  # checks the engine's integrity
            self._check_emissions()

    @rule()
    def time_passes(self) -> None:
        self.drive.now_s += LATE_S

    @precondition(lambda self: self.count > 20)
    @rule()
    def drain(self) -> None:
        self.drive.engine.loop.drain()
        self.draining = True

    # --- invariants

    @invariant()
    def memory_is_bounded(self) -> None:
        scheduler, blocks = self.drive.engine.scheduler, self.drive.engine.blocks
        assert len(scheduler.running) <= SEQUENCES
        assert len(scheduler.running) + len(scheduler.waiting) <= QUEUE + SEQUENCES
        assert 0 <= blocks.free <= BLOCKS
        assert len(scheduler.fairness.principals) <= len(USERS) < MAX_USERS

    def teardown(self) -> None:
        """Lets all requests end within a bound of steps, and checks that no memory is held afterwards."""
        if not hasattr(self, "drive"):
            return
        for _ in range(STEPS_EACH * (SEQUENCES + QUEUE)):
            if not self.drive.step() and self.drive.engine.scheduler.idle:
                break
            self._check_emissions()
        self._check_emissions()
        assert not self.asked, "requests that never end"
        assert self.drive.engine.scheduler.idle
        assert self.drive.engine.blocks.free == BLOCKS

    def _arrive(self) -> None:
        """Reads the inbox as before a step, so that later emissions belong to the new messages."""
        self.drive.engine.loop._run_inbox()
        self.drive.engine.loop._flush_emissions()
        self._check_emissions()

    def _check_emissions(self) -> None:
        """Fails unless emissions belong to running requests, in order and without a gap, and end each of them once."""
        emitted = self.drive.emitted
        for one in emitted:
            assert one.request not in self.cancelled, "of a cancelled request"
            if one.request not in self.asked:
                raise AssertionError(f"{one.request} had ended")
            key = (one.request, one.attempt)
            assert one.index == self.next_index.get(key, 0)
            self.next_index[key] = one.index + (one.token is not None)
            if one.finish:
                assert one.attempt == self.asked[one.request][0]
                self._check_end(one.request, one)
                del self.asked[one.request]
        emitted.clear()

    def _check_end(self, name: str, end: Any) -> None:
        if end.finish == "length":
            assert self.next_index[name, end.attempt] == self.most[name]
        elif end.error_code == "deadline_exceeded":
            assert self.drive.now_s > self.asked[name][1]
        else:
            codes = {"queue_full"} | ({"engine_unavailable"} if self.draining else set())
            assert end.error_code in codes, end


def run(examples: int, steps: int) -> None:
    """Runs the machine on the same examples each time."""
    run_machine(
        Served,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_requests_in_any_order_end_and_leave_no_memory_held() -> None:
    run(16, 30)


@pytest.mark.slow
def test_requests_in_many_orders_end_and_leave_no_memory_held() -> None:
    run(600, 80)
