"""A step that fails because of one sequence costs that sequence's request only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.engine_kit import SPEC, Drive, PlainDecoder, plain_model, prompt
from support.examples import examples
from test_loop import STYLES
from test_sampler import byte_tokenizer

from edgemoe.engine import loop, sampler
from edgemoe.engine import steps as step
from edgemoe.engine.grammar import GrammarCompiler, GrammarMatcher
from edgemoe.types.request import Sampling
from edgemoe.types.step import Batch

LENGTHS = [3, 17, 40, 9, 70, 5]
POISON = 261  # a token that no other prompt has
BAD = {"name": "bad", "temperature": 1.0, "logprobs": 2, "frequency_penalty": 0.5, "max_tokens": 8}
GRAMMAR = LLMatcher.grammar_from_regex("[0-9]{40}")

Patch = pytest.MonkeyPatch


def others() -> list[list[int]]:
    return [[token for token in prompt(length, n) if token != POISON] for n, length in enumerate(LENGTHS)]


def company(drive: Drive) -> None:
    for n, tokens in enumerate(others()):
        drive.submit(tokens, f"r{n}", seed=n, **STYLES[n % len(STYLES)])


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    """The other requests' tokens without the bad one."""
    drive = Drive()
    company(drive)
    drive.run()
    return {f"r{n}": drive.tokens(f"r{n}") for n in range(len(LENGTHS))}


class Poisoned(PlainDecoder):
    """Raises if a step has the bad request's token."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, batch: Batch, kv: Any, experts: Any) -> torch.Tensor:
        logits = super().forward(batch, kv, experts)
        if (batch.tokens == POISON).any():
            raise self.error
        return logits


def raising_for(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `original`: it raises if the bad request is among its arguments."""

    def bad(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(bad(each) for each in value)
        return getattr(value, "id", None) == name or getattr(getattr(value, "request", None), "id", None) == name

    def patched(*args: Any, **named: Any) -> Any:
        if bad(args):
            raise ZeroDivisionError("the test says so")
        return original(*args, **named)

    return patched


@pytest.mark.parametrize("error", [IndexError("a"), RuntimeError("b"), AssertionError("c"), KeyError("d")])
@pytest.mark.parametrize("place", [0, 20, 33])
def test_a_prompt_that_the_model_cannot_take_fails_alone(
    error: Exception, place: int, wanted: dict[str, list[int]]
) -> None:
    decoder = Poisoned(error)
    drive = Drive(model=plain_model()._replace(decoder=decoder, experts=decoder.experts), step_tokens=48)
    company(drive)
    drive.step()
    drive.submit([*prompt(place, 99), POISON, *prompt(10, 98)], **BAD)
    drive.run()
    assert (drive.end("bad").finish, drive.end("bad").error_code) == ("error", "request_failed")
    assert type(error).__name__ in drive.end("bad").error
    assert {name: drive.tokens(name) for name in wanted} == wanted
    assert drive.engine.blocks.free == drive.engine.blocks.count
    assert drive.engine.loop.steps.blamed == 1


STAGES = [
    (sampler, "_penalise", {}),
    (sampler, "_draw", {}),
    (sampler, "_penalise_repetition", {"repetition_penalty": 1.2}),
    (step, "prompt_logprobs_of", {"prompt_logprobs": 1}),
    (loop, "check_request", {}),
]


@pytest.mark.parametrize(("owner", "stage", "chosen"), STAGES)
def test_a_stage_that_fails_for_one_sequence_fails_it_alone(
    owner: Any, stage: str, chosen: dict[str, Any], wanted: dict[str, list[int]], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(owner, stage, raising_for("bad", getattr(owner, stage)))
    drive = Drive()
    company(drive)
    drive.step()
    drive.submit(prompt(30, 99), **BAD, **chosen)
    drive.run()
    assert (drive.end("bad").finish, drive.end("bad").error_code) == ("error", "request_failed")
    assert {name: drive.tokens(name) for name in wanted} == wanted
    assert drive.engine.blocks.free == drive.engine.blocks.count


@pytest.mark.parametrize("stage", ["fill", "accept", "finished", "__init__"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_grammar_that_fails_within_fails_its_request_alone(
    stage: str, after: int, wanted: dict[str, list[int]], monkeypatch: Patch
) -> None:
    calls = 0

    def fails(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise ZeroDivisionError("the test says so")
        return real(*_)

    real = GrammarMatcher.__dict__[stage].fget if stage == "finished" else getattr(GrammarMatcher, stage)
    monkeypatch.setattr(GrammarMatcher, stage, property(fails) if stage == "finished" else fails)
    drive = Drive(grammars=GrammarCompiler(byte_tokenizer()[1]))
    company(drive)
    for n in range(1 + after * (stage == "__init__")):
        drive.submit(prompt(30, 99), f"bad{n}", grammar=GRAMMAR, max_tokens=20)
    while len([one for one in drive.emitted if one.finish]) < len(LENGTHS) + n + 1:
        drive.step()
    assert "request_failed" in {drive.end(f"bad{at}").error_code for at in range(n + 1)}
    assert {name: drive.tokens(name) for name in wanted} == wanted
    assert drive.engine.blocks.free == drive.engine.blocks.count
    drive.engine.close()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_numbers_end_their_request_alone(
    value: float, temperature: float, wanted: dict[str, list[int]]
) -> None:
    class Broken(PlainDecoder):
        def forward(self, batch: Batch, kv: Any, experts: Any) -> torch.Tensor:
            logits = super().forward(batch, kv, experts)
            logits[batch.tokens[batch.logit_rows] == POISON, 17] = value
            return logits

    decoder = Broken()
    drive = Drive(model=plain_model()._replace(decoder=decoder, experts=decoder.experts))
    company(drive)
    drive.submit([*prompt(30, 99), POISON], "bad", temperature=temperature, logprobs=1)
    drive.run()
    assert drive.end("bad").error_code == "not_a_number"
    assert {name: drive.tokens(name) for name in wanted} == wanted


@pytest.mark.parametrize("step", [1, 9])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_numbers_that_are_lost_once_cost_nobody_a_token(
    prefix_cache: bool, step: int, wanted: dict[str, list[int]]
) -> None:
    drive = Drive(prefix_cache=prefix_cache)
    drive.model.decoder.lost = (step,)
    company(drive)
    drive.run()
    assert {name: drive.tokens(name) for name in wanted} == wanted


def test_blocks_of_a_step_with_nan_are_not_found_in_the_prefix_cache() -> None:
    drive = Drive()
    drive.model.decoder.lost = (1, 2)
    for name in "abc":
        drive.submit(prompt(40), name)
        drive.run()
    assert drive.end("a").error_code == "not_a_number", "twice is once too often"
    assert (drive.end("b").finish, drive.tokens("b")) == ("length", drive.tokens("c"))
    assert [one.cached_tokens for one in drive.emitted if one.request in "bc" and not one.index] == [0, 32]


def test_lost_log_probabilities_of_the_prompt_are_computed_again() -> None:
    told = []
    for lost in ((), (1,)):
        drive = Drive()
        drive.model.decoder.lost = lost
        drive.submit(prompt(20), prompt_logprobs=1)
        drive.run()
        told += [one.prompt_logprobs for one in drive.emitted if one.prompt_logprobs]
    assert told[0] == told[1]


def test_a_failure_that_does_not_come_again_costs_nothing(wanted: dict[str, list[int]]) -> None:
    class Once(PlainDecoder):
        at: tuple[int, ...] = (2, 5, 6, 9)  # steps

        def forward(self, batch: Batch, kv: Any, experts: Any) -> torch.Tensor:
            logits = super().forward(batch, kv, experts)
            if len(self.steps) in self.at:
                raise RuntimeError("once")
            return logits

    decoder = Once()
    drive = Drive(model=plain_model()._replace(decoder=decoder, experts=decoder.experts))
    company(drive)
    drive.run()
    assert {name: drive.tokens(name) for name in wanted} == wanted
    drive.submit(name="single")
    decoder.at = (len(decoder.steps) + 2,)  # with nobody else in it
    drive.run()
    assert drive.end("single").finish == "length"
    assert drive.engine.loop.steps.blamed == 0


def test_of_many_the_one_that_fails_is_found_in_few_steps() -> None:
    decoder = Poisoned(RuntimeError("no"))
    drive = Drive(
        model=plain_model()._replace(decoder=decoder, experts=decoder.experts), max_sequences=32, step_tokens=512
    )
    for n in range(31):
        drive.submit(prompt(5, n), f"r{n}", max_tokens=30)
    drive.submit([1, 2, POISON], **BAD)
    while not any(one.request == "bad" for one in drive.emitted):
        before = len(decoder.steps)
        drive.step()
    assert len(decoder.steps) - before <= 1 + 2 * 5 + 1, "the whole, two halves at each of five levels, and nobody's"


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.AcceleratorError("the device is lost")])
def test_a_device_or_memory_that_gives_out_ends_the_loop_and_no_request(error: Exception) -> None:
    decoder, ended = Poisoned(error), []
    drive = Drive(model=plain_model()._replace(decoder=decoder, experts=decoder.experts))
    drive.submit([POISON], name="bad")
    drive.engine.start(1, ended.append).join(timeout=60)
    assert ended == [error]
    assert not drive.emitted


# --- every parameter at its bounds


@cache
def plain_alone() -> list[int]:
    drive = Drive()
    drive.submit(others()[1], "plain", seed=1, **STYLES[1])
    drive.run()
    return drive.tokens("plain")


def bound(low: float, high: float, *more: float) -> st.SearchStrategy[float]:
    return st.sampled_from([low, high, *more]) | st.floats(low, high)


TOKENS = st.integers(0, SPEC.vocab - 1)
SAMPLINGS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([0, 1, 2, 1 << 31])},
    optional={
        "temperature": bound(0.0, 2.0, 1e-5, 1e-300),
        "top_p": bound(0.0, 1.0, 1e-50, 1e-300, 1 - 1e-16),
        "top_k": st.sampled_from([0, 1, 2, SPEC.vocab, 1 << 31]),
        "min_p": bound(0.0, 1.0, 1e-50),
        "presence_penalty": bound(-2.0, 2.0),
        "frequency_penalty": bound(-2.0, 2.0),
        "repetition_penalty": bound(0.01, 100.0, 1.0),
        "logit_bias": st.dictionaries(TOKENS, bound(-100.0, 100.0), max_size=SPEC.vocab),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "stop_token_ids": st.lists(TOKENS, max_size=4).map(tuple) | st.just(tuple(range(SPEC.vocab))),
        "min_tokens": st.sampled_from([0, 1, 1 << 31]),
        "seed": st.sampled_from([0, -1, 2**63, 2**64 - 1]),
        "choice": st.sampled_from([0, 1, 1 << 31]),
    },
)


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.lists(SAMPLINGS, min_size=1, max_size=4), st.integers(1, 40))
@example([{"top_p": 0.0, "max_tokens": 2, "temperature": 1.0}, {"top_p": 1e-50, "max_tokens": 2}], 5)
def test_every_parameter_may_be_at_its_bounds(chosen: list[dict[str, Any]], length: int) -> None:
    """A request with such parameters gets its tokens or a reason; another one beside it gets the same tokens as
    alone.
    """
    drive = Drive()
    drive.submit(others()[1], "plain", seed=1, **STYLES[1])
    for n, each in enumerate(chosen):
        drive.submit(prompt(length, n), f"r{n}", **each)
        assert Sampling(**{name: value for name, value in each.items() if name not in ("seed", "choice")})
    drive.step()
    for n in range(len(chosen)):  # requests without an end of their own
        if drive.engine.loop.finished.total() <= n:
            drive.step()
            drive.engine.loop.cancel(f"r{n}", 1)
    drive.run()
    for n in range(len(chosen)):
        ends = [one for one in drive.emitted if one.request == f"r{n}" and one.finish]
        assert all(one.error_code in ("", "invalid_request") for one in ends), "only all tokens forbidden is an error"
    assert drive.engine.loop.steps.blamed == 0
    assert drive.tokens("plain") == plain_alone()
    assert drive.engine.blocks.free == drive.engine.blocks.count
