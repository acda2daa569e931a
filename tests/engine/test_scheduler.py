"""The scheduler's choice of requests: order, room, chunks, pre-emption and fairness, on a clock that the test moves."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.fairness import LEAD_S, MAX_USERS, FairnessAccounts
from edgemoe.engine.scheduler import (
    AGING_SHARE,
    FEW_RUNNING,
    FIRST_CHUNK_TOKENS,
    FIRST_SEQUENCE_TIMEOUT_S,
    OUTPUT_RESERVE,
    ChunkBudget,
    ScheduledWork,
    Scheduler,
)
from edgemoe.engine.sequence import Sequence
from edgemoe.types.request import Identity, Principal, Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS


def alone(name: str) -> Identity:
    """Returns the identity of a principal without a named user."""
    return Identity(Principal(name), name)


class Engine:
    """A scheduler with steps of a given time, over a model that always emits 1."""

    def __init__(
        self,
        blocks: int = 1000,
        step_s: float = 0.1,
        aging_tokens_per_s: float = 0.0,
        output_reserve: float = OUTPUT_RESERVE,
        **settings: Any,
    ) -> None:
        """Ages waiting requests by `aging_tokens_per_s`, or by the measured speed if it is 0."""
        self.settings = EngineSettings(**{"mixed_step_s": 0.0, **settings})
        self.blocks = BlockManager(blocks, 1, 1)
        self.chunk_budget = ChunkBudget(self.settings.step_tokens, self.settings.mixed_step_s)
        kind = (
            type("Aging", (Scheduler,), {"aging_tokens_per_s": aging_tokens_per_s}) if aging_tokens_per_s else Scheduler
        )
        self.scheduler = kind(self.settings, self.blocks, self.chunk_budget)
        self.scheduler.output_reserve = output_reserve
        self.now_s, self.step_s = 100.0, step_s
        self.first_s: dict[str, float] = {}
        self.finished: list[str] = []
        self._names, self._tokens = itertools.count(), itertools.count(10)

    def submit(
        self, prompt: int | list[int], output: int = 1, user: str = "", name: str = "", principal: str = ""
    ) -> Sequence:
        """Queues a request; a prompt given as a length shares no prefix with any other."""
        tokens = [next(self._tokens)] * prompt if isinstance(prompt, int) else prompt
        name = name or f"{user}{next(self._names)}"
        sampling = Sampling(max_tokens=output)
        request = Request(id=name, prompt=tuple(tokens), sampling=sampling, seed=0, user=user, principal=principal)
        seq = Sequence(request, (), 1, self.now_s, self.now_s + 1e6)
        self.refused = self.scheduler.add(seq)
        return seq

    def step(self) -> list[ScheduledWork]:
        """Schedules and computes one step."""
        works = self.scheduler.schedule(self.now_s)
        self.now_s += self.step_s
        for seq, tokens, _ in works:
            self.blocks.advance(seq, tokens)
            if not seq.uncomputed:
                seq.tokens.append(1)
                self.scheduler.fairness.add_service(seq.identity, 0, 1)
                self.first_s.setdefault(seq.request.id, self.now_s)
                if seq.emitted >= seq.sampling.max_tokens:
                    self.scheduler.fairness.add_answer(seq.identity, seq.emitted)
                    self.scheduler.remove(seq)
                    self.finished.append(seq.request.id)
        self.scheduler.check_integrity()
        return works

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if self.scheduler.idle:
                return
            self.step()


def names(works: list[ScheduledWork]) -> list[str]:
    return [work.seq.request.id for work in works]


# --- order


@pytest.mark.parametrize(("rule", "order"), [("sjf", ["b", "c", "a"]), ("fcfs", ["a", "b", "c"])])
def test_the_rule_of_the_settings_orders_the_waiting(rule: str, order: list[str]) -> None:
    engine = Engine(max_sequences=1, scheduler=rule, aging_tokens_per_s=100.0)
    blocker = engine.submit(10, output=60)  # six seconds
    engine.step()
    engine.submit(2000, name="a")
    engine.step()
    engine.submit(20, name="b")
    engine.submit(30, name="c")
    engine.run()
    assert engine.finished == [blocker.request.id, *order]


def test_a_prompt_that_the_cache_has_counts_as_short() -> None:
    engine = Engine(max_sequences=1)
    shared = [5] * 512
    engine.submit(shared)
    engine.run()
    engine.submit(10, output=2)
    engine.step()
    engine.submit(100, name="shorter")
    engine.submit([*shared, 6], name="cached")
    engine.run()
    assert engine.finished[-2:] == ["cached", "shorter"]


def test_decoding_sequences_get_a_token_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    engine = Engine(step_tokens=64)
    decoding = [engine.submit(4, output=50) for _ in range(8)]
    engine.step()
    engine.submit(3000)
    for _ in range(40):
        works = engine.step()
        assert {work.seq for work in works if work.tokens == 1} >= set(decoding)
        assert sum(work.tokens for work in works) <= 64


def test_a_short_prompt_overtakes_a_long_one_that_is_being_prefilled() -> None:
    engine = Engine(step_tokens=64)
    engine.submit(3000, name="long")
    engine.step()
    engine.submit(10, name="short")
    assert names(engine.step()) == ["short", "long"]


def test_as_many_short_prompts_as_fit_the_budget_share_a_step() -> None:
    engine = Engine(step_tokens=100)
    for _ in range(12):
        engine.submit(10)
    assert len(engine.step()) == 10


def test_nobody_is_admitted_who_would_get_no_tokens() -> None:
    engine = Engine(step_tokens=100)
    engine.submit(90)
    engine.submit(95)
    engine.submit(95)
    engine.step()
    assert len(engine.scheduler.waiting) == 1, "the third holds no blocks yet"


def test_a_principal_runs_few_requests_beside_another_s_stream_and_alone_all() -> None:
    engine = Engine(step_tokens=512)
    stream = engine.submit(4, output=500, user="stream")
    engine.step()
    late = [engine.submit(4, output=400, user="crowd") for _ in range(60)]
    for _ in range(10):
        engine.step()
    assert engine.scheduler.running == [stream, *late[:FEW_RUNNING]]
    waits_s = FIRST_SEQUENCE_TIMEOUT_S
    for more in range(1, 4):  # long ones keep the others out for a while only
        engine.now_s += waits_s
        engine.step()
        engine.step()
        assert len(engine.scheduler.running) == 1 + FEW_RUNNING + more
    other = engine.submit(4, output=9, user="other")
    engine.step()
    assert other in engine.scheduler.running
    engine.scheduler.remove(stream)
    engine.scheduler.remove(other)
    engine.step()
    assert not engine.scheduler.waiting


# --- sharing


def test_requests_that_begin_alike_wait_for_the_one_that_computes_the_beginning() -> None:
    engine = Engine()
    choices = [engine.submit([7] * 100, name=f"n{choice}") for choice in range(4)]
    assert names(engine.step()) == ["n0"]
    works = engine.step()
    assert [work.tokens for work in works] == [4, 4, 4]
    assert [seq.cached_tokens for seq in choices] == [0, 96, 96, 96]


def test_others_go_on_while_some_wait_for_a_shared_beginning() -> None:
    engine = Engine(step_tokens=32)
    engine.submit([7] * 100, name="first")
    engine.step()
    engine.submit([7] * 100, name="same")
    engine.submit(90, name="other")
    assert names(engine.step()) == ["first"]  # 68 tokens are left of it, and 32 fit a step
    engine.run()
    assert engine.finished == ["first", "same", "other"]


# --- room


def test_admission_leaves_a_quarter_of_the_expected_output_free() -> None:
    engine = Engine(blocks=20, output_reserve=0.25)
    first = engine.submit(BLOCK_TOKENS * 8, output=256)  # 8 blocks, and a reserve of 4
    engine.submit(BLOCK_TOKENS * 8 + 1, output=256)  # 9, and 4 more: 25 in all
    engine.step()
    assert engine.scheduler.running == [first]
    tight = Engine(blocks=20, output_reserve=0.0)
    tight.submit(BLOCK_TOKENS * 8, output=256)
    tight.submit(BLOCK_TOKENS * 8 + 1, output=256)
    tight.step()
    assert len(tight.scheduler.running) == 2


def test_the_reserve_follows_the_length_of_past_answers() -> None:
    engine = Engine()
    for _ in range(60):
        engine.submit(4, output=3, user="brief")
    engine.run()
    engine.scheduler.fairness.add_request(alone("brief"))
    expected = engine.scheduler.fairness.expected_output
    assert expected(alone("brief"), 1000) == pytest.approx(3, abs=1)
    assert expected(alone("brief"), 2) == 2
    assert expected(alone("new"), 1000) == pytest.approx(3, abs=1), "the model's own mean"


def test_when_blocks_run_out_the_newest_makes_room_and_the_oldest_goes_on() -> None:
    engine = Engine(blocks=8, output_reserve=0.0)
    old = engine.submit(BLOCK_TOKENS * 3, output=60, name="old")
    new = engine.submit(BLOCK_TOKENS * 3, output=60, name="new")
    wait_until(lambda: engine.scheduler.paused_total["recompute"], meanwhile=engine.step)
    assert engine.scheduler.running == [old]
    assert engine.scheduler.waiting == [new]
    engine.run()
    assert engine.finished == ["old", "new"]
    assert new.emitted == 60


def test_a_paused_request_is_resumed_before_others_of_its_user_start() -> None:
    engine = Engine(blocks=8, output_reserve=0.0)
    for name in ("old", "new"):
        engine.submit(BLOCK_TOKENS * 3, output=60, name=name)
    wait_until(lambda: engine.scheduler.paused_total["recompute"], meanwhile=engine.step)
    engine.submit(BLOCK_TOKENS * 2, name="small")
    ran: list[str] = []
    wait_until(lambda: "small" in ran, meanwhile=lambda: ran.extend(names(engine.step())))
    assert ran.index("new") < ran.index("small")


def test_a_request_that_does_not_fit_is_not_overtaken_by_smaller_ones() -> None:
    engine = Engine(blocks=20, output_reserve=0.0, aging_tokens_per_s=1e6)
    engine.submit(BLOCK_TOKENS * 12, output=20, name="running")
    engine.step()
    engine.submit(BLOCK_TOKENS * 12, name="large")
    engine.step()
    engine.submit(4, name="small")
    engine.run()
    assert engine.finished == ["running", "large", "small"]


# --- the bounded queue


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = Engine(max_sequences=2, max_queue=3)
    for _ in range(5):
        engine.submit(10, output=5)
        assert engine.refused is None
    last = engine.submit(10)
    assert engine.refused is last
    assert 1.0 <= engine.scheduler.retry_after_s() <= 60.0


def test_a_full_queue_refuses_the_longest_line_not_the_newcomer() -> None:
    engine = Engine(max_sequences=1, max_queue=4)
    for at in range(5):
        engine.submit(10, user="many", name=f"m{at}")
    engine.submit(10, user="one")
    assert engine.refused is not None
    assert engine.refused.request.id == "m4"


def test_a_replayed_request_is_never_refused_for_a_new_one() -> None:
    engine = Engine(max_sequences=1, max_queue=1)
    new = engine.submit(10)
    for at in range(3):
        request = Request(id=f"old{at}", prompt=(1,), sampling=Sampling(), seed=0)
        engine.refused = engine.scheduler.add(Sequence(request, (4, 5), 2, engine.now_s, 1e9))
        if engine.refused:
            assert engine.refused is new


# --- fairness and starvation


def test_a_user_with_one_request_is_not_starved_by_one_with_a_hundred() -> None:
    engine = Engine(max_sequences=4, max_queue=200)
    for _ in range(100):
        engine.submit(200, output=20, user="many")
    for _ in range(30):
        engine.step()
    engine.submit(200, output=20, user="one", name="only")
    started_s = engine.now_s
    engine.run()
    waited_s = engine.first_s["only"] - started_s
    assert waited_s <= 20 * engine.step_s + 1.0, "as soon as one of the running ones has finished"
    assert engine.finished.index("only") < 40


def test_backlogged_users_are_served_alike_at_any_size_of_requests() -> None:
    engine = Engine(max_sequences=4, max_queue=400, step_tokens=200)
    for _ in range(150):
        engine.submit(20, output=5, user="small")
    for _ in range(50):
        engine.submit(150, output=5, user="large")
    served: dict[str, int] = {"small": 0, "large": 0}
    while all(any(seq.identity.user == user for seq in engine.scheduler.waiting) for user in served):
        for seq, tokens, _ in engine.step():
            served[seq.identity.user] += tokens
    assert 0.4 < served["large"] / sum(served.values()) < 0.75


def test_long_answers_of_one_user_make_room_for_another_after_a_moment() -> None:
    engine = Engine(max_sequences=2, step_s=0.1)
    for _ in range(2):
        engine.submit(20, output=5000, user="long")
    engine.step()
    engine.submit(20, output=2, user="brief", name="brief")
    began_s = engine.now_s
    for _ in range(200):
        engine.step()
    assert engine.first_s["brief"] - began_s <= FIRST_SEQUENCE_TIMEOUT_S + 4 * engine.step_s
    assert len(engine.scheduler.running) == 2, "and the one that made room is back"
    assert all(seq.emitted > 150 for seq in engine.scheduler.running)


@pytest.mark.parametrize("rule", ["fcfs", "gimbal"])
def test_by_rules_without_users_nobody_is_displaced_who_would_be_next_again(rule: str) -> None:
    engine = Engine(max_sequences=2, step_s=0.1, scheduler=rule)
    seqs = [engine.submit(20, output=5000, user="long") for _ in range(2)]
    engine.step()
    engine.submit(20, output=2, user="brief")
    for _ in range(200):
        engine.step()
    assert all(seq.emitted > 150 for seq in seqs)
    assert not engine.scheduler.paused_total


def test_a_user_with_a_single_answer_running_keeps_it() -> None:
    engine = Engine(max_sequences=1)
    engine.submit(20, output=100, user="first", name="first")
    engine.step()
    engine.submit(20, output=2, user="second", name="second")
    engine.run()
    assert engine.finished == ["first", "second"]
    assert not engine.scheduler.paused_total


def flood(engine: Engine, users: int) -> tuple[float, dict[str, float]]:
    """Submits a long prompt, and short ones at twice the engine's speed, until the long one starts.

    Returns the arrival time of the long one, and of each short one.
    """
    random, came_s = np.random.default_rng(0), {}
    engine.submit(6000, user=f"u{users - 1}", name="long")
    began_s = engine.now_s
    while "long" not in engine.first_s:
        for _ in range(2):
            short = engine.submit(int(random.integers(1, 60)), user=f"u{random.integers(users)}")
            came_s[short.request.id] = engine.now_s
        engine.step()
        assert engine.now_s - began_s < 600, "starved"
    return began_s, came_s


def test_nobody_who_comes_later_than_the_stated_bound_overtakes() -> None:
    engine = Engine(max_sequences=1, max_queue=4000, aging_tokens_per_s=1500.0)
    began_s, came_s = flood(engine, users=1)
    latest_s = max(came_s[name] for name in engine.first_s if name != "long")
    assert latest_s - began_s <= 6000 / 1500.0


def test_the_head_of_a_users_line_starts_within_the_stated_bound() -> None:
    engine = Engine(max_sequences=1, max_queue=4000, aging_tokens_per_s=1500.0)
    began_s, _ = flood(engine, users=3)
    in_own_line_s, among_users_s = 6000 / 1500.0, 6000 / 1500.0 + LEAD_S
    own_work_s, prefill_s = 2 / 3 * 20 * in_own_line_s * engine.step_s, 6000 / 512 * engine.step_s
    assert engine.first_s["long"] - began_s <= in_own_line_s + own_work_s + among_users_s + prefill_s


def test_shortest_first_with_aging_beats_first_come_on_the_mean_and_not_at_the_expense_of_the_tail() -> None:
    def ttft(rule: str, seed: int) -> list[float]:
        random = np.random.default_rng(seed)
        engine = Engine(max_sequences=8, max_queue=4000, step_s=0.05, step_tokens=512, scheduler=rule)
        arrivals = np.cumsum(random.exponential(0.2, 250)) + engine.now_s
        sizes, began = np.minimum(6000, random.lognormal(6.6, 1.2, 250)).astype(int) + 1, {}
        for at, size in zip(arrivals, sizes, strict=True):
            while engine.now_s < at and not engine.scheduler.idle:
                engine.step()
            engine.now_s = max(engine.now_s, at)
            began[engine.submit(int(size), output=20).request.id] = at
        engine.run()
        return [engine.first_s[name] - at for name, at in began.items()]

    waits = {rule: np.concatenate([ttft(rule, seed) for seed in range(2)]) for rule in ("sjf", "fcfs")}
    assert waits["sjf"].mean() < 0.9 * waits["fcfs"].mean()
    assert np.quantile(waits["sjf"], 0.99) < 1.15 * np.quantile(waits["fcfs"], 0.99)


# --- chunk budget


def test_chunks_beside_decoders_shrink_until_a_step_takes_the_time_aimed_for() -> None:
    chunk_budget = ChunkBudget(step_tokens=512, aim_s=0.2)
    assert chunk_budget.prefill_tokens(decoding=1) == FIRST_CHUNK_TOKENS
    for _ in range(30):
        tokens = chunk_budget.prefill_tokens(decoding=1)
        chunk_budget.observe(tokens, 0.02 + 0.001 * tokens)
    assert chunk_budget.prefill_tokens(decoding=1) == pytest.approx(180, abs=20)
    assert chunk_budget.prefill_tokens(decoding=0) == 512


def test_chunks_do_not_shrink_where_every_step_is_slow_anyway() -> None:
    chunk_budget = ChunkBudget(step_tokens=512, aim_s=0.2)
    for _ in range(40):
        tokens = chunk_budget.prefill_tokens(decoding=4) - 10 * (_ % 2)  # the last chunk of a prompt is shorter
        chunk_budget.observe(tokens, 2.0 + 0.001 * tokens)
    assert chunk_budget.prefill_tokens(decoding=4) == 508


def test_chunks_keep_their_length_on_a_machine_that_stutters() -> None:
    chunk_budget, random, lengths = ChunkBudget(step_tokens=512, aim_s=0.25), np.random.default_rng(0), []
    for _ in range(300):
        lengths.append(chunk_budget.prefill_tokens(decoding=4))
        chunk_budget.observe(lengths[-1], float((0.02 + 0.003 * lengths[-1]) * random.lognormal(0.0, 0.6)))
    assert 30 < np.median(lengths[20:]) < 130, "77 would take a quarter of a second"
    assert np.quantile(lengths[20:], 0.95) < 200


USERS = pytest.mark.parametrize("users", [1, 7, 1000])


@USERS
def test_principals_are_served_alike_however_many_users_one_of_them_names(users: int) -> None:
    engine = Engine(max_sequences=4, max_queue=400, step_tokens=200)
    for n in range(200):
        engine.submit(50, output=5, user=f"m/{n % users}", principal="m")
        engine.submit(50, output=5, user="v", principal="v")
    served: Counter[str] = Counter()
    while all(any(seq.identity.principal == one for seq in engine.scheduler.waiting) for one in "mv"):
        for seq, tokens, _ in engine.step():
            served[seq.identity.principal] += tokens
    assert 0.4 < served["v"] / served.total() < 0.6


@USERS
def test_long_answers_of_a_principals_users_make_room_for_another_principal(users: int) -> None:
    engine = Engine(max_sequences=8, step_s=0.1, max_queue=400)
    for n in range(100):
        engine.submit(20, output=5000, user=f"m/{n % users}", principal="m")
    engine.step()
    engine.submit(20, output=2, user="v", principal="v", name="brief")
    began_s = engine.now_s
    for _ in range(60):
        engine.step()
    assert engine.first_s["brief"] - began_s <= FIRST_SEQUENCE_TIMEOUT_S + 4 * engine.step_s


@USERS
def test_a_full_queue_refuses_the_principal_that_has_most_there(users: int) -> None:
    engine = Engine(max_sequences=1, max_queue=20)
    for n in range(18):
        engine.submit(10, user=f"m/{n % users}", principal="m")
    for _ in range(8):
        engine.submit(10, user="v", principal="v")
        assert engine.refused is None or engine.refused.identity.principal == "m"
    assert sum(seq.identity.principal == "v" for seq in engine.scheduler.waiting) == 8


def test_users_of_a_principal_take_turns_within_it() -> None:
    engine = Engine(max_sequences=2, max_queue=400, step_tokens=100)
    for n in range(60):
        engine.submit(50, output=2, user="m/greedy", principal="m", name=f"g{n}")
    for n in range(3):
        engine.submit(50, output=2, user="m/brief", principal="m", name=f"b{n}")
    engine.run()
    assert max(engine.finished.index(f"b{n}") for n in range(3)) < 12


def test_memory_of_users_is_bounded_and_no_principal_flushes_another_s() -> None:
    fairness = FairnessAccounts()
    regular = Identity(Principal("v"), "v")
    fairness.add_request(regular)
    fairness.add_service(regular, 1000, 0)
    fairness.remove_request(regular)
    for n in range(3 * MAX_USERS):
        other = Identity(Principal("m"), f"m/{n}")
        fairness.add_request(other)
        fairness.add_service(other, 10, 0)
        fairness.remove_request(other)
    assert len(fairness.users("m")) == MAX_USERS
    assert fairness.principals["v"].service == 1000
    assert fairness.principals["m"].service == 30 * MAX_USERS, "another name is no way to be forgotten"


def test_users_who_were_away_have_no_credit() -> None:
    engine = Engine(max_sequences=3, step_tokens=2000)
    engine.submit(10, output=1, user="away")
    engine.submit(1000, output=2, user="busy")
    engine.submit(10, output=50, user="busy")
    for _ in range(3):
        engine.step()
    engine.submit(10, user="away")
    engine.submit(10, user="new")
    assert engine.scheduler.fairness.principals.service_ahead(["busy", "away", "new"]) == [0.0, 0.0, 0.0]


def test_aging_keeps_step_with_the_speed_of_the_engine() -> None:
    engine = Engine()
    for _ in range(20):
        engine.chunk_budget.observe(100, 2.0)
    assert engine.scheduler.aging_tokens_per_s == pytest.approx(50 * AGING_SHARE)
