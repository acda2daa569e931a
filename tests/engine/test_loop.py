"""The step loop over a real, small model: emitted tokens depend on the request alone."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher
from support.engine_kit import SPEC, Drive, prompt, tried
from support.waiting import wait_until
from test_sampler import SCHEMA, byte_tokenizer

from edgemoe.api.generate.answer_grammar import MAX_GRAMMAR_BYTES
from edgemoe.engine.grammar import GrammarCompiler
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.sequence import MAX_GRAMMAR_CHARS, check_request
from edgemoe.errors import InvalidRequest, MissingExpert
from edgemoe.types.request import Emission, Request, RequestLimits, Sampling
from edgemoe.types.step import BLOCK_TOKENS, StepRouting

STYLES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"logit_bias": {5: 2.0, 9: -3.0}, "min_p": 0.02, "temperature": 1.0},
]


def alone(length: int, n: int, output: int = 12) -> list[int]:
    """Returns request n's tokens on an otherwise idle engine."""
    drive = Drive()
    drive.submit(prompt(length, n), seed=n, max_tokens=output, **STYLES[n % len(STYLES)])
    drive.run()
    return drive.tokens()


def test_every_request_gets_in_any_company_the_tokens_that_it_gets_alone() -> None:
    lengths = [3, 17, 70, 33, 1, 120, 16, 48, 5, 90]
    drive, arrivals = Drive(max_sequences=6), np.random.default_rng(0)
    for n, length in enumerate(lengths):
        drive.submit(prompt(length, n), f"r{n}", seed=n, **STYLES[n % len(STYLES)])
        for _ in range(arrivals.integers(4)):
            drive.step()
    drive.run()
    for n, length in enumerate(lengths):
        assert drive.tokens(f"r{n}") == alone(length, n), f"request {n}"
        assert drive.end(f"r{n}").finish == "length"


def test_a_prompt_that_the_prefix_cache_has_gives_the_same_tokens() -> None:
    drive = Drive()
    for name in ("miss", "hit"):
        drive.submit(prompt(75), name, temperature=1.0)
        drive.run()
    assert drive.tokens("hit") == drive.tokens("miss")
    first = [next(one for one in drive.emitted if one.request == name) for name in ("miss", "hit")]
    assert [one.cached_tokens for one in first] == [0, 64]
    assert all(one.cached_tokens == 0 for one in drive.emitted if one not in first)


def test_a_conversation_goes_on_from_the_blocks_of_its_last_answer() -> None:
    drive = Drive()
    drive.submit(prompt(20), "first", max_tokens=30)
    drive.run()
    drive.submit([*prompt(20), *drive.tokens("first"), 7, 7], "second")
    drive.run()
    assert next(one for one in drive.emitted if one.request == "second").cached_tokens == 48


@pytest.mark.parametrize("style", range(len(STYLES)))
def test_a_replay_from_any_token_gives_the_same_continuation(style: int) -> None:
    whole = alone(40, style, output=14)
    for cut in range(len(whole) + 1):
        drive = Drive()
        drive.submit(prompt(40, style), emitted=whole[:cut], attempt=2, seed=style, max_tokens=14, **STYLES[style])
        drive.run()
        if cut < len(whole):
            assert drive.tokens() == whole[cut:]
            assert drive.emitted[0].index == cut
        assert drive.end().finish == "length"
        assert {one.attempt for one in drive.emitted} == {2}


@pytest.mark.parametrize("way", ["recompute", "park"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pre_emption_changes_no_token(way: str, prefix_cache: bool) -> None:
    drive = Drive(blocks=10, output_reserve=0.0, preemption=way, prefix_cache=prefix_cache)
    for n in range(4):
        drive.submit(prompt(30, n), f"r{n}", seed=n, max_tokens=40, **STYLES[n % len(STYLES)])
    drive.run()
    assert drive.engine.scheduler.paused_total[way] > 0
    for n in range(4):
        assert drive.tokens(f"r{n}") == alone(30, n, output=40)


def test_choices_share_the_prompt_and_differ_after_it() -> None:
    drive = Drive()
    for choice in range(4):
        drive.submit(prompt(64), f"r{choice}", choice=choice, temperature=1.0)
    drive.run()
    computed = sum(sum(batch.query_lens) for batch in drive.model.decoder.steps)
    assert computed == 64 + 3 * BLOCK_TOKENS + 4 * 11, "the prompt, its last block for the others, and the decoding"
    assert len({tuple(drive.tokens(f"r{choice}")) for choice in range(4)}) == 4


def test_signatures_are_the_same_however_the_tokens_came_to_be_computed() -> None:
    signatures = []
    for settings in ({}, {"step_tokens": 16}, {"prefix_cache": False}):
        drive = Drive(**settings)
        for name in ("a", "b"):
            drive.submit(prompt(60), name)
            drive.step()
            (seq,) = drive.engine.scheduler.running
            while seq.computed < 66:
                drive.step()
            signatures.append(drive.engine.blocks.signature(seq))
            drive.run()
    assert signatures[0].sum() == 66 * SPEC.layers * SPEC.router.top_k
    assert all((one == signatures[0]).all() for one in signatures)


def test_a_prompts_signature_is_exact_with_any_part_of_it_cached_and_however_many_blocks_others_used_between() -> None:
    """A reference counts each token's experts; the chain of blocks is followed from its end."""
    chosen: dict[int, npt.NDArray[np.int64]] = {}

    def observe(routing: StepRouting) -> None:
        meta, at = routing.meta, 0
        for name, tokens in zip(meta.requests, meta.query_lens.tolist(), strict=True):
            if name == "first":
                for token in range(at, at + tokens):
                    counts = np.zeros((SPEC.layers, SPEC.router.experts), np.int64)
                    np.add.at(counts, (np.arange(SPEC.layers)[:, None], routing.ids[:, token]), 1)
                    chosen[int(meta.positions[token])] = counts
            at += tokens

    drive, whole, hits = Drive(blocks=80, observe=observe), prompt(500), set[int]()
    drive.submit(whole, "first", max_tokens=1)
    drive.run()
    blocks = len(whole) // BLOCK_TOKENS
    exact = sum(chosen[position] for position in range(blocks * BLOCK_TOKENS))
    for n, between in enumerate((0, 1, 4, 9, 14, 20, 33)):
        for other in range(between):
            drive.submit(prompt(60, 1000 * n + other), f"other {n} {other}", max_tokens=1)
            drive.run()
        tokens, cached = drive.engine.prefixes.signature(whole, b"")
        assert (cached == sum(chosen[position] for position in range(tokens))).all()
        drive.submit(whole, f"again {n}", max_tokens=8)
        while not any(seq.computed >= len(whole) for seq in drive.engine.scheduler.running):
            drive.step()
        (seq,) = drive.engine.scheduler.running
        assert seq.cached_tokens == tokens
        hits.add(tokens)
        assert (drive.engine.blocks.total(seq.blocks[:blocks]) == exact).all()
        drive.run()
    assert min(hits) == 0
    assert len(hits) >= 3, "all, none and some of it"


# --- ends


def test_a_stop_token_ends_the_request_and_is_not_delivered() -> None:
    whole = alone(10, 0)
    drive = Drive()
    drive.submit(prompt(10, 0), seed=0, stop_token_ids=(whole[5],))
    drive.run()
    assert drive.tokens() == whole[: whole.index(whole[5])]
    assert drive.end() == Emission(request="r", attempt=1, index=whole.index(whole[5]), finish="stop")


def test_the_context_ends_a_request_that_nothing_else_ends() -> None:
    drive = Drive()
    drive.submit(prompt(SPEC.context_tokens - 4), max_tokens=100)
    drive.run()
    assert len(drive.tokens()) == 4
    assert drive.end().finish == "length"


def test_no_tokens_wanted_is_an_end_at_once() -> None:
    drive = Drive()
    drive.submit(max_tokens=0)
    drive.run()
    assert drive.emitted == [Emission(request="r", attempt=1, index=0, finish="length")]


def test_one_message_a_step_carries_all_its_tokens() -> None:
    drive, messages = Drive(), []
    drive.engine.loop._emit = messages.append
    for n in range(3):
        drive.submit(prompt(4, n), f"r{n}", max_tokens=3)
    drive.run()
    assert [len(message) for message in messages] == [3, 3, 3]


# --- failures


def test_a_cancelled_request_leaves_nothing_behind_from_the_next_step_on() -> None:
    drive = Drive()
    drive.submit(prompt(60), "gone", max_tokens=100)
    drive.submit(prompt(5, 1), "stays")
    drive.step()
    drive.engine.loop.cancel("gone", 1)
    count = len(drive.emitted)
    drive.run()
    assert all(one.request == "stays" for one in drive.emitted[count:])
    assert drive.engine.blocks.free == drive.engine.blocks.count


def test_a_cancel_of_an_earlier_attempt_is_no_cancel() -> None:
    drive = Drive()
    drive.submit(attempt=2)
    drive.engine.loop.cancel("r", 1)
    drive.run()
    assert drive.end().finish == "length"


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    drive = Drive()
    drive.submit(max_tokens=30)
    drive.step()
    drive.submit(attempt=2, max_tokens=30, emitted=drive.tokens())
    drive.submit(attempt=1, max_tokens=30)
    drive.run()
    assert {one.attempt for one in drive.emitted} == {1, 2}
    assert len(drive.tokens()) == 30
    assert drive.end().attempt == 2


def test_a_missing_expert_fails_only_requests_that_need_it() -> None:
    lengths = [3, 9, 20, 5, 11, 2]
    drive = Drive()
    drive.model.decoder.experts.missing = {(0, 3)}
    for n, length in enumerate(lengths):
        drive.submit(prompt(length, n), f"r{n}", seed=n, max_tokens=4, **STYLES[n % len(STYLES)])
    drive.run()
    ends = [drive.end(f"r{n}") for n in range(len(lengths))]
    assert {one.finish for one in ends} == {"length", "error"}
    for n, end in enumerate(ends):
        if end.finish == "error":
            assert end.error_code == "missing_expert"
            assert "expert 3 of layer 0" in end.error
        else:
            assert drive.tokens(f"r{n}") == alone(lengths[n], n)[:4]
    assert drive.engine.blocks.free == drive.engine.blocks.count


def test_a_missing_expert_that_comes_back_costs_no_token() -> None:
    lengths = [3, 9, 20, 5, 11, 2]
    drive = Drive(missing_expert_timeout_s=10.0)
    for n, length in enumerate(lengths):
        drive.submit(prompt(length, n), f"r{n}", seed=n, max_tokens=12, **STYLES[n % len(STYLES)])
    for missing in (set(), {(0, 3)}, {(0, 3), (1, 2)}, set(), {(1, 5)}):  # each for less than the timeout
        drive.model.decoder.experts.missing = missing
        for _ in range(5):
            drive.step()
    drive.model.decoder.experts.missing = set()
    drive.run()
    for n, length in enumerate(lengths):
        assert drive.tokens(f"r{n}") == alone(length, n)[:12]
        assert drive.end(f"r{n}").finish == "length"


def test_a_request_waiting_for_the_place_of_a_failed_one_starts_at_once() -> None:
    """The step in which its request ended computed nothing, but is not the last one yet."""
    drive = Drive(max_sequences=1)
    drive.model.decoder.experts.missing = {(0, expert) for expert in range(SPEC.router.experts)}
    drive.submit(prompt(5), "lacks")
    drive.submit(prompt(7), "waits", max_tokens=2)
    assert drive.step()
    assert drive.end("lacks").error_code == "missing_expert"
    drive.model.decoder.experts.missing = set()
    drive.run()
    assert len(drive.tokens("waits")) == 2


@pytest.mark.parametrize("user", ["a", "b"])
def test_a_prompt_that_lacks_an_expert_takes_nobodys_share_of_a_step(user: str) -> None:
    drive = Drive(missing_expert_timeout_s=20.0)
    forward = drive.model.decoder.forward

    def lacking(batch: Any, *rest: Any) -> Any:
        if (batch.tokens == 95).any():
            raise MissingExpert(0, 3, "the test says so")
        return forward(batch, *rest)

    drive.model.decoder.forward = lacking
    drive.submit([95] * 100, "lacks", user="a")
    drive.step()
    drive.submit([5] * 150, "needs nothing", user=user, max_tokens=2)
    for _ in range(10):
        drive.step()
    assert len(drive.tokens("needs nothing")) == 2
    assert not any(one.request == "lacks" for one in drive.emitted)


def test_a_request_without_an_expert_names_it_at_the_deadline_too() -> None:
    drive = Drive(missing_expert_timeout_s=2.0)
    drive.model.decoder.experts.missing = {(0, expert) for expert in range(SPEC.router.experts)}
    drive.submit(prompt(5), "patient")
    drive.submit(prompt(7), "hurried", remaining_s=1.0)
    while not any(one.request == "patient" for one in drive.emitted):
        drive.step()
        assert drive.now_s < 5, "it waits for longer than it should"
    for name in ("patient", "hurried"):
        assert drive.end(name).error_code == "missing_expert"
        assert "of layer 0 is nowhere to be had" in drive.end(name).error
    assert drive.emitted[0].request == "hurried"
    assert drive.engine.blocks.free == drive.engine.blocks.count


def test_a_request_waits_up_to_its_deadline_for_a_box_that_is_away_with_its_expert() -> None:
    drive = Drive(missing_expert_timeout_s=2.0)
    experts, attempts = drive.model.decoder.experts, Counter[str]()
    experts.missing, experts.away = {(0, expert) for expert in range(SPEC.router.experts)}, ("b",)
    run = drive.engine.loop.steps.run

    def counted(works: Any, **how: Any) -> Any:
        attempts.update(work.seq.request.id for work in works)
        return run(works, **how)

    drive.engine.loop.steps.run = counted  # type: ignore[method-assign]
    drive.submit(prompt(5), "patient", remaining_s=100.0)
    drive.submit(prompt(7), "hurried", remaining_s=20.0)
    drive.submit(prompt(3), "eternal", remaining_s=math.inf)  # it has no deadline, and waits as for any expert
    while drive.now_s < 50.0:
        drive.step()
    assert {(one.request, one.error_code) for one in drive.emitted if one.finish} == {
        ("hurried", "missing_expert"),
        ("eternal", "missing_expert"),
    }
    assert "b had it when last heard" in drive.end("hurried").error
    assert attempts["patient"] < 130, "an attempt computes layers in vain, so they pause in between"
    experts.away = ()  # its other incarnation has not announced its experts yet
    for _ in range(15):
        drive.step()
    experts.missing = set()
    while not any(one.request == "patient" and one.finish for one in drive.emitted):
        drive.step()
        assert drive.now_s < 60.0, "it does not go on"
    assert drive.end("patient").finish == "length"
    assert drive.tokens("patient") == alone(5, 0)[:12]
    assert drive.engine.blocks.free == drive.engine.blocks.count


def test_an_error_that_nobody_makes_ends_the_loop_and_says_so() -> None:
    drive, ended = Drive(), []
    drive.model.decoder.embed = drive.model.decoder.embed[:0]
    drive.submit()
    drive.engine.start(1, ended.append).join(timeout=60)
    assert isinstance(ended[0], IndexError)


@pytest.mark.parametrize("waited_s", [0.0, 60.0])
def test_a_request_that_comes_from_elsewhere_keeps_its_age(waited_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "aging_tokens_per_s", 10.0)
    drive = Drive(max_sequences=1)
    drive.submit(name="running")
    drive.step()
    drive.submit([5, 6], "short")
    drive.submit([7] * 30, "long", waited_s=waited_s)
    drive.run()
    ends = [emission.request for emission in drive.emitted if emission.finish]
    assert ends == ["running", *(("long", "short") if waited_s else ("short", "long"))]


def test_a_request_ends_where_it_makes_no_progress_for_its_timeout() -> None:
    drive = Drive(max_sequences=1)
    drive.submit(name="running", max_tokens=40, remaining_s=0.5)  # 4 s of tokens
    drive.submit(name="waiting", max_tokens=40, remaining_s=1.0)
    ended_s: dict[str, float] = {}
    for _ in range(60):
        drive.step()
        for one in drive.emitted:
            if one.finish:
                ended_s.setdefault(one.request, drive.now_s)
    assert drive.end("running").finish == "length"
    assert len(drive.tokens("running")) == 40
    assert drive.end("waiting").error_code == "deadline_exceeded"
    assert ended_s["waiting"] == pytest.approx(1.1, abs=0.2)


def test_a_queue_that_moves_is_progress() -> None:
    drive = Drive(max_sequences=1)
    for name in "abcde":
        drive.submit(name=name, max_tokens=8, remaining_s=1.0)  # the last waits more than 3 s
    drive.run()
    assert [drive.end(name).finish for name in "abcde"] == ["length"] * 5


def test_a_long_prompt_is_progress_and_reported() -> None:
    drive = Drive(max_sequences=1)
    drive.submit([3] * 200, name="long", max_tokens=1, remaining_s=0.3)
    drive.run()
    reports = [one for one in drive.emitted if one.token is None and not one.finish]
    assert drive.end("long").finish == "length"
    assert reports
    assert all((one.request, one.index) == ("long", 0) for one in reports)


def test_a_full_queue_is_told_to_come_back() -> None:
    drive = Drive(max_sequences=1, max_queue=1)
    for n in range(3):
        drive.submit(name=f"r{n}")
    drive.run()
    assert drive.end("r2").error_code == "queue_full"
    assert drive.end("r2").retry_after_s >= 1.0
    assert [drive.end(f"r{n}").finish for n in range(2)] == ["length", "length"]


def test_a_draining_engine_finishes_its_requests_and_accepts_no_more() -> None:
    drive = Drive()
    drive.submit(name="old")
    drive.step()
    drive.engine.loop.drain()
    drive.submit(name="new")
    drive.run()
    assert drive.end("old").finish == "length"
    assert drive.end("new").error_code == "engine_unavailable"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({"prompt": []}, "invalid_request"),
        ({"prompt": [0, SPEC.vocab]}, "invalid_request"),
        ({"prompt": [-1]}, "invalid_request"),
        ({"prompt": [1] * SPEC.context_tokens}, "context_length_exceeded"),
        ({"logit_bias": {SPEC.vocab: 1.0}}, "invalid_request"),
        ({"logit_bias": {1: float("nan")}}, "invalid_request"),
        ({"temperature": float("nan")}, "invalid_request"),
        ({"temperature": -1.0}, "invalid_request"),
        ({"top_p": 1.5}, "invalid_request"),
        ({"stop_token_ids": (SPEC.vocab + 3,)}, "invalid_request"),
        ({"emitted": [SPEC.vocab]}, "invalid_request"),
        ({"grammar": "{}"}, "invalid_request"),
    ],
)
def test_a_request_that_makes_no_sense_fails_alone(bad: dict[str, Any], code: str) -> None:
    drive = Drive()
    drive.submit(name="good")
    drive.submit(name="bad", **bad)
    drive.run()
    assert drive.end("bad").error_code == code
    assert drive.end("good").finish == "length"


# --- grammars


def test_output_under_a_grammar_is_valid_and_the_same_after_a_replay() -> None:
    tokenizer, engine_side = byte_tokenizer(("true",))
    compact = {"whitespace_flexible": False}  # else random weights emit white space for ever
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=compact)
    wanted = {"grammar": grammar, "temperature": 2.0, "max_tokens": 200, "stop_token_ids": (256,), "seed": 5}

    def output(**more: Any) -> list[int]:
        drive = Drive(grammars=GrammarCompiler(engine_side))
        drive.submit(**wanted, **more)
        drive.submit(name="other", temperature=1.0)
        wait_until(lambda: any(one.request == "r" and one.finish for one in drive.emitted), meanwhile=drive.step)
        assert drive.end().finish == "stop"
        drive.run()
        drive.engine.close()
        return drive.tokens()

    whole = output()
    assert set(json.loads(tokenizer.decode(whole))) == set(SCHEMA["required"])
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert output(emitted=whole[:cut], attempt=2) == whole[cut:]


def test_a_broken_grammar_fails_its_request_only() -> None:
    drive = Drive(grammars=GrammarCompiler(byte_tokenizer()[1]))
    drive.submit(name="bad", grammar='{"grammars": [{"lark_grammar": "start: ("}]}')
    drive.submit(name="good")
    wait_until(lambda: len([one for one in drive.emitted if one.finish]) == 2, meanwhile=drive.step)
    assert drive.end("bad").error_code == "invalid_grammar"
    assert drive.end("good").finish == "length"
    drive.engine.close()


def test_a_grammar_of_a_request_that_is_over_is_not_compiled() -> None:
    gate, begun, compiled = threading.Event(), threading.Event(), list[str]()

    class Slow(GrammarCompiler):
        def _compile(self, grammar: str) -> LLMatcher:
            begun.set()
            assert gate.wait(60)
            compiled.append(grammar)
            return super()._compile(grammar)

    first, *others, last = (str(LLMatcher.grammar_from_regex(f"[0-9]{{{n}}}")) for n in range(3, 7))
    drive = Drive(grammars=Slow(byte_tokenizer()[1]))
    drive.submit(name="first", grammar=first)
    drive.step()
    assert begun.wait(60)
    drive.submit(name="cancelled", grammar=others[0])
    drive.submit(name="late", grammar=others[1], remaining_s=0.05)
    drive.step()
    drive.engine.loop.cancel("cancelled", 1)
    drive.submit(name="last", grammar=last)
    drive.step()
    assert drive.end("late").error_code == "deadline_exceeded"
    gate.set()
    wait_until(lambda: any(one.request == "last" and one.finish for one in drive.emitted), meanwhile=drive.step)
    assert compiled == [first, last]
    drive.engine.close()


def test_a_grammar_that_no_front_makes_is_refused() -> None:
    assert MAX_GRAMMAR_CHARS >= 2 * MAX_GRAMMAR_BYTES
    limits = RequestLimits(SPEC.context_tokens, SPEC.vocab)
    text = "x" * MAX_GRAMMAR_CHARS
    longest = Request(id="r", prompt=(1,), sampling=Sampling(grammar=text, grammar_trial=tried(text)), seed=0)
    check_request(longest, [], limits, grammars=True)
    longer = Request(id="r", prompt=(1,), sampling=Sampling(grammar="x" * (MAX_GRAMMAR_CHARS + 1)), seed=0)
    with pytest.raises(InvalidRequest, match="longer than"):
        check_request(longer, [], limits, grammars=True)


# --- the thread


def test_the_loop_sleeps_until_something_arrives_and_stops_when_told() -> None:
    drive, ended = Drive(), threading.Event()
    finished = threading.Semaphore(0)
    drive.engine.loop._emit = lambda items: [finished.release() for one in items if one.finish] and None
    drive.engine.start(1, lambda error: ended.set() if error is None else None)
    for round_ in range(3):
        drive.submit(name=f"r{round_}")
        assert finished.acquire(timeout=60)
    drive.engine.loop.stop()
    assert ended.wait(timeout=60)
    assert drive.engine.runner.totals["steps", "decode"] == 3 * 11


def test_a_storm_of_requests_of_which_a_third_hang_up_leaves_nothing_behind() -> None:
    drive, random = Drive(blocks=40, max_sequences=6, preemption="park"), np.random.default_rng(1)
    gone = set()
    for n in itertools.count():
        if n < 100:
            style = STYLES[n % len(STYLES)]
            drive.submit(prompt(int(random.integers(1, 90)), n % 13), f"r{n}", seed=n, user=f"u{n % 5}", **style)
        if n % 3 == 0 and n < 150:
            victim = f"r{random.integers(min(n, 99) + 1)}"
            gone.add(victim)
            drive.engine.loop.cancel(victim, 1)
        if not drive.step() and n > 100:
            break
    assert drive.engine.blocks.free == drive.engine.blocks.count
    assert {f"r{n}" for n in range(100)} - {one.request for one in drive.emitted if one.finish} <= gone
    for n in (n for n in range(100) if f"r{n}" not in gone):
        assert len(drive.tokens(f"r{n}")) == 12
