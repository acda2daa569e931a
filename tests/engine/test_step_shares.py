"""How much the work of other principals lengthens the steps of a stream, by a model of a step's duration."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.engine_kit import Drive

from edgemoe.config.settings import EngineSettings
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.fairness import MAX_LONG_STEPS, STEPS_OF_OTHERS, ServiceAccounts, StepPrices, StepShares
from edgemoe.engine.scheduler import ChunkBudget, Scheduler
from edgemoe.engine.sequence import Sequence
from edgemoe.types.request import Principal, Request, Sampling

STRETCH = 1.5
VICTIM, ATTACKER = "victim", "attacker"
# Seconds of a step by its tokens: overhead alone, weights of more experts with each token, arithmetic alone.
COSTS: dict[str, Callable[[int], float]] = {
    "fixed": lambda tokens: 0.010 + 1e-6 * tokens,
    "experts": lambda tokens: 0.002 + 0.1 * (1 - (1 - 1 / 16) ** tokens) + 1e-4 * tokens,
    "arithmetic": lambda tokens: 0.001 + 0.004 * tokens,
}
FLOODS: dict[str, tuple[int, int, int]] = {  # requests at once, tokens of the prompt, tokens of the answer
    "long prompts": (12, 300, 4),
    "one long prompt after the other": (1, 2000, 1),
    "many choices": (30, 4, 400),
    "small requests": (30, 4, 1),
    "both": (12, 200, 100),
}


def test_a_step_that_is_held_up_counts_at_most_twice_its_usual_duration() -> None:
    held_up, twice = StepPrices(), StepPrices()
    for prices, late_s in ((held_up, 60.0), (twice, 0.02)):
        for _ in range(5):
            prices.observe(1, 0.01)
            prices.observe(64, 0.04)
        prices.observe(1, late_s)
    assert [held_up.tokens_within(1.5, tokens) for tokens in (1, 8, 64)] == [
        twice.tokens_within(1.5, tokens) for tokens in (1, 8, 64)
    ]


class SteppedScheduler:
    """Schedules steps that take the time of a cost model. Every request gets the token 1."""

    def __init__(self, seconds: Callable[[int], float], **settings: Any) -> None:
        self.settings = EngineSettings(**settings)
        self.blocks = BlockManager(1500, 1, 1)
        self.chunk_budget = ChunkBudget(self.settings.step_tokens, self.settings.mixed_step_s)
        self.scheduler = Scheduler(self.settings, self.blocks, self.chunk_budget)
        self.seconds, self.now_s = seconds, 0.0
        self.done = Counter[str]()  # tokens computed, by principal
        self.last_s: dict[str, float] = {}  # of each request, when tokens of it were last computed
        self._names = itertools.count()

    def submit(self, principal: str, prompt: int, output: int) -> Sequence:
        name = f"{principal} {next(self._names)}"
        tokens = tuple([int(name.split()[1]) + 10] * prompt)
        request = Request(
            id=name,
            prompt=tokens,
            sampling=Sampling(max_tokens=output),
            seed=0,
            user=principal,
            principal=Principal(principal),
        )
        seq = Sequence(request, (), 1, self.now_s, 1e9)
        self.scheduler.add(seq)
        return seq

    def count(self, principal: str) -> int:
        both = [*self.scheduler.running, *self.scheduler.waiting]
        return sum(seq.identity.principal == principal for seq in both)

    def step(self) -> float:
        """Computes a step; returns its duration."""
        works = self.scheduler.schedule(self.now_s)
        tokens = sum(work.tokens for work in works)
        step_s = self.seconds(tokens)
        self.now_s += step_s
        prefilled = sum(count for seq, count, _ in works if not seq.decoding)
        self.scheduler.step_shares.prices.observe(tokens, step_s)
        if prefilled:
            self.chunk_budget.observe(prefilled, step_s)
        for seq, count, _ in works:
            self.done[seq.identity.principal] += count
            self.last_s[seq.request.id] = self.now_s
            self.blocks.advance(seq, count)
            if not seq.uncomputed:
                seq.tokens.append(1)
                if seq.emitted >= seq.sampling.max_tokens:
                    self.scheduler.remove(seq)
        return step_s

    def flood(self, name: str) -> None:
        """Sends as many of an attacker's requests as have ended."""
        at_once, prompt, output = FLOODS[name]
        for _ in range(at_once - self.count(ATTACKER)):
            self.submit(ATTACKER, prompt, output)


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("cost", COSTS)
def test_a_stream_s_p99_gap_stays_within_the_bound_or_an_equal_share(cost: str, flood: str) -> None:
    stepped = SteppedScheduler(COSTS[cost])
    victim = stepped.submit(VICTIM, 4, 2000)
    for _ in range(50):
        stepped.step()
    gaps_s = []
    for _ in range(800):
        stepped.flood(flood)
        before = victim.emitted
        gaps_s.append(stepped.step())
        assert victim.emitted == before + 1  # a token in every step
    later = gaps_s[250:]  # the long steps that the attacker had at first are used up
    bound_s = max(STRETCH * COSTS[cost](1), COSTS[cost](2))
    assert np.percentile(later, 99) <= 1.001 * bound_s
    assert stepped.done[ATTACKER] >= len(gaps_s)  # no less than the victim
    stepped.scheduler.check_integrity()


@pytest.mark.parametrize("cost", COSTS)
def test_every_sequence_of_a_principal_that_is_cut_takes_its_turn(cost: str) -> None:
    stepped = SteppedScheduler(COSTS[cost])
    stepped.submit(VICTIM, 4, 6000)
    for prompt in (4, 4, 4, 40, 400):
        stepped.submit(ATTACKER, prompt, 5000)
    for _ in range(300):
        stepped.step()
    attackers = {name for name in stepped.last_s if name.startswith(ATTACKER)}
    assert len(attackers) == 5
    turn_s = 6 * max(STRETCH * COSTS[cost](1), COSTS[cost](2)) + COSTS[cost](512)
    assert all(stepped.now_s - stepped.last_s[name] <= turn_s for name in attackers)


def test_streams_in_equal_numbers_are_not_cut() -> None:
    stepped = SteppedScheduler(COSTS["arithmetic"])
    each = [stepped.submit(principal, 4, 500) for principal in ("a", "b", "c") for _ in range(2)]
    for _ in range(50):
        stepped.step()
    before = [seq.emitted for seq in each]
    for _ in range(100):
        stepped.step()
    assert [seq.emitted - count for seq, count in zip(each, before, strict=True)] == [100] * 6


def test_a_principal_alone_and_a_stretch_of_0_have_no_bound() -> None:
    for stretch, principals in ((STRETCH, ("a", "a")), (0.0, ("a", "b"))):
        stepped = SteppedScheduler(COSTS["experts"], step_stretch=stretch, mixed_step_s=0.0)
        stepped.submit(principals[0], 4, 1000)
        for _ in range(50):
            stepped.step()
        for _ in range(40):  # more than the long steps
            prompt = stepped.submit(principals[1], 400, 1)
            stepped.step()
            assert prompt.emitted == 1  # all of it in one step


def test_long_steps_are_earned_by_others_steps_and_by_nothing_else() -> None:
    prices = StepPrices()
    for tokens in (1, 2, 4, 512):
        prices.observe(tokens, COSTS["arithmetic"](tokens))
    shares, accounts = StepShares(STRETCH, prices), ServiceAccounts(8)
    for name in (VICTIM, ATTACKER):
        accounts.add_request(name)

    def long_steps(steps: int) -> int:
        wanted = {VICTIM: 1, ATTACKER: 500}
        return sum(not shares.divide(wanted, {VICTIM: 1}, accounts) for _ in range(steps))

    assert long_steps(100) == MAX_LONG_STEPS
    for _ in range(10 * STEPS_OF_OTHERS):  # the attacker alone
        assert not shares.divide({ATTACKER: 500}, {ATTACKER: 3}, accounts)
    assert long_steps(1) == 0
    assert long_steps(10 * STEPS_OF_OTHERS) == 10


@pytest.mark.parametrize("cost", COSTS)
def test_prices_follow_a_machine_that_changes_its_speed(cost: str) -> None:
    prices = StepPrices()
    for speed in (1.0, 8.0, 0.2):
        for _ in range(100):
            for tokens in range(1, 9):
                prices.observe(tokens, speed * COSTS[cost](tokens))
        fits = prices.tokens_within(STRETCH, 2)
        most = STRETCH * COSTS[cost](2)
        assert COSTS[cost](fits) <= 1.01 * most
        assert fits >= 8 or COSTS[cost](fits + 1) > 0.99 * most


def test_prices_without_a_step_allow_no_more_than_what_is_due() -> None:
    assert StepPrices().tokens_within(STRETCH, 3) == 3


def test_greedy_tokens_are_the_same_beside_an_attack() -> None:
    def answer(attacks: int) -> list[int]:
        drive = Drive(max_sequences=6)
        drive.submit([5, 6, 7], "v", user=VICTIM)
        for n in range(attacks):
            drive.submit([n + 1] * 40, f"a{n}", user=ATTACKER)
        drive.run()
        return [one.token for one in drive.emitted if one.request == "v" and one.token is not None]

    assert answer(0) == answer(12)
    assert answer(0)
