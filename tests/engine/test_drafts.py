"""Drafts change no token: each is checked by choosing the token as without drafts, and comparing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from support.drafting import drafting
from support.engine_kit import SPEC, Drive, prompt
from support.waiting import wait_until
from test_sampler import SCHEMA, byte_tokenizer

from edgemoe.engine import sampler
from edgemoe.engine import steps as step_module
from edgemoe.engine.grammar import GrammarCompiler
from edgemoe.errors import MissingExpert
from edgemoe.types.request import Emission
from edgemoe.types.step import StepRouting

STYLES: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": 1},
    {"temperature": 0.5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.1},
    {"logit_bias": {5: 4.0, 9: -3.0}, "min_p": 0.02, "temperature": 0.4},
    {"stop_token_ids": tuple(range(0, SPEC.vocab, 9)), "min_tokens": 12},
]


def repetitive(length: int, seed: int) -> list[int]:
    """Returns a prompt that says the same again and again, with faults."""
    rng, part = np.random.default_rng(seed), prompt(9, seed)
    tokens: list[int] = (part * (length // 9 + 1))[:length]
    for place in rng.integers(0, length, length // 12).tolist():
        tokens[place] = int(rng.integers(SPEC.vocab))
    return tokens


def submit_all(drive: Drive, output: int = 40) -> None:
    for n, style in enumerate(STYLES):
        drive.submit(repetitive(20 + 13 * n, n), f"r{n}", seed=n, max_tokens=output, **style)


def results(drive: Drive) -> list[Any]:
    """Returns each request's tokens with their log probabilities, and its end."""
    names = [f"r{n}" for n in range(len(STYLES))]
    found = []
    for name in names:
        mine = [one for one in drive.emitted if one.request == name]
        tokens = [(one.index, one.token) for one in mine if one.token is not None]
        shown = [one.logprob is None for one in mine if one.token is not None]
        found.append((tokens, shown, mine[-1].finish))
    return found


def logprobs(drive: Drive) -> list[float]:
    return [one.logprob for one in sorted(drive.emitted, key=lambda one: (one.request, one.index)) if one.logprob]


@pytest.fixture(scope="module")
def plain() -> Drive:
    """Runs the requests without drafts."""
    drive = Drive()
    submit_all(drive)
    drive.run()
    return drive


@pytest.fixture
def drafts() -> Iterator[None]:
    with drafting():
        yield


def drafted(drive: Drive) -> tuple[int, int]:
    speculation = drive.engine.speculation
    assert speculation is not None
    return speculation.accepted, speculation.rejected


def counted(items: list[Emission]) -> tuple[int, int]:
    return sum(one.accepted_drafts for one in items), sum(one.rejected_drafts for one in items)


ENGINES: list[dict[str, Any]] = [
    {},
    {"max_sequences": 1},
    {"max_sequences": 3},
    {"prefix_cache": False},
    {"blocks": 20, "output_reserve": 0.0, "preemption": "park", "max_sequences": 4},
    {"blocks": 20, "output_reserve": 0.0, "preemption": "recompute", "max_sequences": 4},
]


@pytest.mark.parametrize("settings", ENGINES, ids=str)
@pytest.mark.usefixtures("drafts")
def test_tokens_are_those_without_drafts(plain: Drive, settings: dict[str, Any]) -> None:
    drive = Drive(drafts="lookup", **settings)
    submit_all(drive)
    drive.run()
    accepted, rejected = drafted(drive)
    assert accepted > 10 < rejected
    assert results(drive) == results(plain)
    assert logprobs(drive) == pytest.approx(logprobs(plain), abs=1e-4)
    assert drive.engine.runner.totals["steps", "decode"] < plain.engine.runner.totals["steps", "decode"] or settings
    assert drive.engine.blocks.free == drive.engine.blocks.count
    if settings.get("preemption"):
        assert drive.engine.scheduler.paused_total[settings["preemption"]] > 0


@pytest.mark.usefixtures("drafts")
def test_emissions_count_accepted_and_rejected_drafts() -> None:
    drive = Drive(drafts="lookup")
    drive.submit(repetitive(60, 3), max_tokens=40)
    drive.run()
    accepted, rejected = counted(drive.emitted)
    assert accepted >= drafted(drive)[0] > 0
    assert rejected > 0
    assert accepted <= len(drive.tokens())


LIKELIEST, TEMPERATURE, SEEDS = 4, 12.0, 300  # the model is very sure of its tokens
CRITICAL = 16.27  # chi-square of 3 degrees of freedom that chance exceeds once in 1,000 tests


def chi_square(tokens: list[int], likeliest: list[tuple[int, float]]) -> float:
    """Returns the statistic of sampled tokens against softmax(log probability / temperature) of the likeliest ones."""
    names, scores = zip(*likeliest, strict=True)
    assert set(tokens) <= set(names)
    weights = np.exp((np.array(scores) - max(scores)) / TEMPERATURE)
    wanted = len(tokens) * weights / weights.sum()
    assert wanted.min() >= 5
    counts = np.array([tokens.count(name) for name in names])
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.usefixtures("drafts")
def test_sampled_tokens_keep_their_distribution_where_drafts_are_checked() -> None:
    """Sampled tokens behind the likeliest ones, which are drafted, follow the model's probabilities."""
    plain = Drive()
    plain.submit(prompt(30), max_tokens=3, logprobs=LIKELIEST)
    plain.run()
    likeliest, top = plain.tokens(), [one.top for one in plain.emitted if one.token is not None]
    drive = Drive(drafts="lookup")
    for seed in range(SEEDS):
        style = {"temperature": TEMPERATURE, "top_k": LIKELIEST, "expected": tuple(likeliest)}
        drive.submit(prompt(30), f"s{seed}", seed=seed, max_tokens=3, **style)
        drive.run()
    answers = [drive.tokens(f"s{seed}") for seed in range(SEEDS)]
    accepted, rejected = drafted(drive)
    assert accepted > 20 < rejected
    for at in range(3):
        same = [answer[at] for answer in answers if answer[:at] == likeliest[:at]]
        assert chi_square(same, list(top[at])) < CRITICAL
        more = [likeliest[at] if i % 3 else token for i, token in enumerate(same)]
        assert at == 2 or chi_square(more, list(top[at])) > CRITICAL  # drafts that are taken too often would be seen


@pytest.mark.usefixtures("drafts")
def test_a_text_that_the_request_expects_is_drafted() -> None:
    drive = Drive()
    drive.submit(prompt(30), max_tokens=30, temperature=2.0)
    drive.run()
    said, few = drive.tokens(), []
    for expected in ((), tuple(said)):
        again = Drive(drafts="lookup")
        again.submit(prompt(30), max_tokens=30, temperature=2.0, expected=expected)
        again.run()
        assert again.tokens() == said
        few.append(again.engine.runner.totals["steps", "decode"])
    assert few[1] <= 6 < few[0]


@pytest.mark.usefixtures("drafts")
def test_an_expected_text_of_another_vocabulary_is_refused() -> None:
    drive = Drive(drafts="lookup")
    drive.submit(prompt(30), expected=(1, SPEC.vocab))
    drive.run()
    assert (drive.end().finish, drive.end().error_code) == ("error", "invalid_request")
    assert "prediction" in drive.end().error


@pytest.mark.parametrize("style", range(len(STYLES)))
@pytest.mark.usefixtures("drafts")
def test_another_engine_goes_on_where_one_died(plain: Drive, style: int) -> None:
    whole = plain.tokens(f"r{style}")
    for cut in range(0, len(whole), 7):
        drive = Drive(drafts="lookup")
        request = repetitive(20 + 13 * style, style)
        drive.submit(request, emitted=whole[:cut], attempt=2, seed=style, max_tokens=40, **STYLES[style])
        drive.run()
        assert drive.tokens() == whole[cut:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.usefixtures("drafts")
def test_a_grammar_holds_along_the_drafts(temperature: float) -> None:
    grammars = GrammarCompiler(byte_tokenizer()[1])
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    said = []
    for setting in ("off", "lookup"):
        drive = Drive(grammars=grammars, drafts=setting)
        for n in range(3):
            expected = tuple(json.dumps({"name": "aaaa", "size": 11, "kind": "a", "tags": []}).encode())
            drive.submit(
                prompt(8, n), f"r{n}", grammar=grammar, expected=expected, max_tokens=60, temperature=temperature
            )
        emitted = drive.emitted
        wait_until(lambda emitted=emitted: sum(bool(one.finish) for one in emitted) == 3, meanwhile=drive.step)
        said.append([(drive.tokens(f"r{n}"), drive.end(f"r{n}").finish) for n in range(3)])
    grammars.close()
    assert said[0] == said[1]
    assert sum(drafted(drive)) > 0


@pytest.mark.usefixtures("drafts")
def test_the_prefix_cache_holds_no_rejected_token() -> None:
    drive = Drive(drafts="lookup")
    drive.submit(repetitive(60, 5), "first", max_tokens=50, temperature=0.9)
    drive.run()
    assert drafted(drive)[1] > 0
    turn = [*repetitive(60, 5), *drive.tokens("first"), 7, 7]
    drive.submit(turn, "second", max_tokens=30)
    drive.run()
    alone = Drive()
    alone.submit(turn, max_tokens=30)
    alone.run()
    assert drive.tokens("second") == alone.tokens()
    assert next(one for one in drive.emitted if one.request == "second").cached_tokens == len(turn[:-3]) // 16 * 16


def test_signatures_count_no_rejected_token() -> None:
    signatures = []
    for setting in ("off", "lookup"):
        with drafting():
            drive = Drive(drafts=setting)
            drive.submit(repetitive(60, 4), max_tokens=100, temperature=0.4)
            totals = {}
            while drive.step():
                for seq in drive.engine.scheduler.running:
                    totals[seq.computed] = drive.engine.blocks.signature(seq).tolist()
        signatures.append(totals)
    assert sum(drafted(drive)) > 0
    both = signatures[0].keys() & signatures[1].keys()
    assert len(both) > 10
    assert {at: signatures[0][at] for at in both} == {at: signatures[1][at] for at in both}


@pytest.mark.usefixtures("drafts")
def test_observers_see_accepted_tokens_only() -> None:
    seen: list[StepRouting] = []
    drive = Drive(drafts="lookup", observe=seen.append)
    drive.submit(repetitive(60, 5), max_tokens=50, temperature=0.5)
    drive.run()
    accepted, rejected = drafted(drive)
    assert accepted > 0 < rejected
    tokens = np.concatenate([routing.meta.tokens for routing in seen])
    positions = np.concatenate([routing.meta.positions for routing in seen])
    whole = [*repetitive(60, 5), *drive.tokens()]
    assert positions.tolist() == list(range(len(positions)))
    assert tokens.tolist() == whole[: len(tokens)]
    for routing in seen:
        assert routing.ids.shape[1] == len(routing.meta.tokens) == routing.meta.query_lens.sum()


@pytest.mark.usefixtures("drafts")
def test_an_expert_that_only_a_draft_needs_costs_nothing_but_the_draft() -> None:
    drive = Drive(drafts="lookup", missing_expert_timeout_s=0.0)
    experts = drive.model.experts
    submit_all(drive)
    original = experts.forward

    def forward(layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
        if len(ids) > 1 and len(experts._meta.drafted):
            raise MissingExpert(layer, 0, "the test says so")
        return original(layer, hidden, ids, weights)

    experts.forward = forward
    drive.run()
    assert {drive.end(f"r{n}").finish for n in range(len(STYLES))} <= {"length", "stop"}
    assert drafted(drive) == (0, 0)


@pytest.mark.usefixtures("drafts")
def test_a_fault_while_a_draft_is_checked_costs_nothing_but_the_draft(
    plain: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = sampler.sample, [0]

    def sample(logits: Any, rows: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0 and any(seq.uncomputed == 0 or seq.checked_drafts[0] for seq in rows):
            raise ZeroDivisionError("the test says so")
        return original(logits, rows)

    monkeypatch.setattr(step_module, "sample", sample)
    drive = Drive(drafts="lookup")
    submit_all(drive)
    drive.run()
    assert results(drive) == results(plain)


@pytest.mark.usefixtures("drafts")
def test_a_draft_ends_with_the_request() -> None:
    said = []
    for setting in ("off", "lookup"):
        drive = Drive(drafts=setting)
        for output in range(1, 12):
            drive.submit(repetitive(40, 2), f"r{output}", max_tokens=output)
        drive.submit(repetitive(505, 2), "long", max_tokens=100)
        drive.run()
        said.append([drive.tokens(name) for name in [f"r{n}" for n in range(1, 12)] + ["long"]])
    assert said[0] == said[1]
    assert [len(tokens) for tokens in said[1]] == [*range(1, 12), 7]
