"""Sampling against transformers' processors, and its independence of the batch."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgemoe.engine import sampler
from edgemoe.engine.grammar import GrammarCompiler, GrammarMatcher
from edgemoe.engine.sampler import SampledToken, crossing, sample, uniform
from edgemoe.engine.sequence import Sequence
from edgemoe.errors import InvalidRequest
from edgemoe.types.request import GrammarTrial, Request, Sampling, digest_of

VOCAB = 50


def sequence(output: tuple[int, ...] = (), *, seed: int = 0, choice: int = 0, **sampling: Any) -> Sequence:
    chosen = Sampling(**{"max_tokens": 1000, **sampling})
    request = Request(id="r", prompt=(1, 2), sampling=chosen, seed=seed, choice=choice)
    return Sequence(request, output, 1, 0.0, 1e9)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def tokens(sampled: list[SampledToken | InvalidRequest]) -> list[int]:
    return [one.token for one in sampled if isinstance(one, SampledToken)]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 30, "min_p": 0.05},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {3: 5.0, 7: -100.0}, "logprobs": 3},
    {"min_tokens": 20, "stop_token_ids": (0, 1, 2)},
]


def test_a_row_gets_the_same_token_alone_and_in_any_batch() -> None:
    logits = random_logits(60)
    rows = [sequence(tuple(range(n % 7)), seed=n, **SETTINGS[n % len(SETTINGS)]) for n in range(60)]
    alone = [sample(logits[n : n + 1].clone(), [rows[n]])[0] for n in range(60)]
    assert sample(logits.clone(), rows) == alone
    shuffled = np.random.default_rng(0).permutation(60)
    assert sample(logits[shuffled].clone(), [rows[n] for n in shuffled]) == [alone[n] for n in shuffled]


@pytest.mark.parametrize("chosen", [{"top_k": 1}, {"top_k": 40}, {"top_k": 40, "top_p": 0.9}])
def test_equals_at_the_cut_are_kept_in_any_place_and_batch(chosen: dict[str, Any]) -> None:
    """16-bit scores often tie; transformers keep all that equal the last one kept."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(100, 20_000, generator=generator)).bfloat16().float()
    logits[:50, ::50] = logits.max()  # 400 at the top
    rows = [sequence(seed=n, **chosen) for n in range(100)]
    alone = [sample(logits[n : n + 1].clone(), [rows[n]])[0] for n in range(100)]
    beside = sample(torch.cat([logits, logits[:1]]), [*rows, sequence(seed=1, top_k=200, top_p=0.99)])
    assert beside[:100] == alone
    drawn = {n: int(token) for n, token in enumerate(tokens(alone))}
    assert len({drawn[n] for n in range(50)}) > 40
    for n in range(50, 100):
        kept = TopKLogitsWarper(chosen["top_k"])(None, logits[n : n + 1])[0]
        assert kept[drawn[n]] > -torch.inf


def test_rounding_in_the_logits_does_not_change_the_token() -> None:
    logits = random_logits(200)
    rows = [sequence(seed=n, **SETTINGS[n % len(SETTINGS)]) for n in range(200)]
    shaken = logits + 1e-6 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(1))
    assert tokens(sample(logits.clone(), rows)) == tokens(sample(shaken, rows))


@pytest.mark.parametrize(
    "chosen",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"top_p": 0.7},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
        {"min_p": 0.2, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_match_transformers_processors(chosen: dict[str, Any]) -> None:
    logits, draws = random_logits(1), 20_000
    expected = logits.clone()
    for warper in (
        TemperatureLogitsWarper(chosen.get("temperature", 1.0)),
        TopKLogitsWarper(chosen.get("top_k", VOCAB)),
        TopPLogitsWarper(chosen.get("top_p", 1.0)),
        MinPLogitsWarper(chosen.get("min_p", 0.0)),
    ):
        expected = warper(None, expected)
    probs = torch.softmax(expected, -1)[0].double().numpy()
    rows = [sequence(seed=seed, **chosen) for seed in range(draws)]
    counts = Counter(tokens(sample(logits.repeat(draws, 1), rows)))
    frequencies = np.array([counts[token] for token in range(VOCAB)]) / draws
    assert set(counts) <= set(np.flatnonzero(probs))
    assert np.abs(frequencies - probs).max() < 5 * np.sqrt(0.25 / draws)


def test_top_p_looks_further_where_the_likeliest_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = random_logits(100), [sequence(seed=n, top_p=0.99, temperature=3.0) for n in range(100)]
    whole = tokens(sample(logits.clone(), rows))
    monkeypatch.setattr(sampler, "CANDIDATES", 4)
    assert tokens(sample(logits.clone(), rows)) == whole
    assert len(set(whole)) > 10


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [
        {"top_p": 0.95},
        {"top_p": 0.9, "min_p": 0.002, "temperature": 1.5},
        {"top_k": 1000},
        {"top_k": 1500, "top_p": 0.7},
        {"top_k": 3000, "top_p": 0.999, "min_p": 0.01},
        {"min_p": 1e-4},
    ],
)
def test_choices_among_thousands_equal_a_sorted_vocabulary_s(chosen: dict[str, Any], ties: bool) -> None:
    logits = random_logits(1, 5000) / 3
    if ties:
        logits = (logits * 4).round() / 4
    weights = ((logits - logits.max()) / chosen.get("temperature", 1.0)).exp()[0].double().numpy()
    falling = np.sort(weights)[::-1]
    likely = falling[: chosen.get("top_k", 5000)]
    kept = likely[np.cumsum(likely) - likely < chosen.get("top_p", 1.0) * likely.sum()]
    least = max(kept.min(), chosen.get("min_p", 0.0))
    assert (weights >= least).sum() > 256
    cumulated = np.cumsum(np.where(weights >= least, weights, 0))
    rows = [sequence(seed=seed, **chosen) for seed in range(100)]
    points = uniform([row.request for row in rows], [0] * 100)
    expected = np.searchsorted(cumulated, points * cumulated[-1], side="right")
    assert tokens(sample(logits.repeat(100, 1), rows)) == expected.tolist()


def test_random_numbers_are_uniform_and_differ_by_seed_choice_and_position() -> None:
    requests = [sequence(seed=seed, choice=choice).request for seed, choice in itertools.product(range(200), range(5))]
    numbers = np.concatenate([uniform(requests, [position] * len(requests)) for position in range(20)])
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((histogram - 1000) ** 2 / 1000).sum() < 45  # chi squared, 19 degrees of freedom, p = .0007
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_a_random_number_is_fixed_for_ever() -> None:
    """A replay on another engine, or another version, must draw the same numbers."""
    request = sequence(seed=0x9E3779B97F4A7C15, choice=2).request
    assert uniform([request], [7])[0] == pytest.approx(0.06793712458765888, abs=1e-15)


def test_penalties_count_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    sampler.adjust(logits, [sequence((5, 5, 9), presence_penalty=1.0, frequency_penalty=0.25)])
    assert logits[0, [1, 2, 5, 9]].tolist() == [0.0, 0.0, -1.5, -1.25]


def test_stop_tokens_are_out_of_reach_before_the_minimum_length() -> None:
    stop = {"stop_token_ids": (7,), "min_tokens": 2, "logit_bias": {7: 1000.0}, "temperature": 0.0}
    assert tokens(sample(torch.zeros(1, VOCAB), [sequence((3,), **stop)])) != [7]
    assert tokens(sample(torch.zeros(1, VOCAB), [sequence((3, 4), **stop)])) == [7]


def test_log_probabilities_are_the_models_own_and_the_chosen_one_is_told_even_if_unlikely() -> None:
    logits = random_logits(2)
    expected = torch.log_softmax(logits, -1)
    worst = int(logits[0].argmin())
    forced, plain = sample(
        logits.clone(),
        [sequence(logprobs=2, logit_bias={worst: 1000.0}, temperature=0.0), sequence(logprobs=0, temperature=0.0)],
    )
    assert isinstance(forced, SampledToken)
    assert isinstance(plain, SampledToken)
    assert forced.token == worst
    assert forced.logprob == pytest.approx(expected[0, worst].item())
    assert [token for token, _ in forced.top] == expected[0].topk(2).indices.tolist()
    assert plain.top == ()
    assert plain.logprob == pytest.approx(expected[1].max().item())


# --- grammars


def byte_tokenizer(extra: tuple[str, ...] = ()) -> tuple[Tokenizer, LLTokenizer]:
    """Builds tokenizers with a token for each byte, one that ends the text (256), and some longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(list(extra))
    return tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=264, eos_token=[256])


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}


def generate(grammars: GrammarCompiler, grammar: str, seed: int, cut: int | None = None) -> list[int]:
    """Samples random logits under a grammar up to its end. At `cut` tokens the matcher is built again from the
    output.
    """
    output: list[int] = []
    seq = sequence(seed=seed, grammar=grammar, stop_token_ids=(256,))
    seq.matcher = grammars.matcher(grammar, output).result()
    while not seq.matcher.finished and len(output) < 400:
        if len(output) == cut:
            seq.matcher = grammars.matcher(grammar, output).result()
        (chosen,) = sample(random_logits(1, 264, seed=seed * 1000 + len(output)), [seq])
        assert isinstance(chosen, SampledToken)
        if chosen.token == 256:
            break
        seq.matcher.accept(chosen.token)
        seq.tokens.append(chosen.token)
        output.append(chosen.token)
    return output


def test_output_under_a_json_schema_is_always_valid_json_of_that_schema() -> None:
    tokenizer, engine_side = byte_tokenizer(('{"', '":', "true"))
    grammars = GrammarCompiler(engine_side)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    seen = set()
    for seed in range(12):
        value = json.loads(tokenizer.decode(generate(grammars, grammar, seed)))
        assert set(value) == set(SCHEMA["required"])
        assert 0 <= value["size"] <= 999
        assert value["kind"] in ("a", "b")
        assert len(value["tags"]) <= 3
        seen.add(json.dumps(value))
    assert len(seen) > 6
    grammars.close()


def test_a_grammar_taken_up_again_at_any_token_goes_on_as_before() -> None:
    grammars = GrammarCompiler(byte_tokenizer()[1])
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    whole = generate(grammars, grammar, seed=3)
    for cut in range(0, len(whole), 7):
        assert generate(grammars, grammar, seed=3, cut=cut) == whole
    grammars.close()


def test_a_regex_is_followed_to_the_letter() -> None:
    grammars = GrammarCompiler(byte_tokenizer()[1])
    tokenizer, _ = byte_tokenizer()
    for seed in range(5):
        text = tokenizer.decode(generate(grammars, LLMatcher.grammar_from_regex("(ab|cd){2}[0-9]{3}x"), seed))
        assert len(text) == 8
        assert text.endswith("x")
    grammars.close()


def test_a_broken_grammar_and_tokens_that_break_one_are_errors_of_that_request() -> None:
    grammars = GrammarCompiler(byte_tokenizer()[1])
    with pytest.raises(InvalidRequest, match="not valid"):
        grammars.matcher('{"grammars": [{"lark_grammar": "start: ("}]}', []).result()
    with pytest.raises(InvalidRequest, match="cannot be followed") as refused:
        grammars.matcher(LLMatcher.grammar_from_regex("[0-9]+"), [ord("x")]).result()
    assert "\n" not in str(refused.value)
    grammars.close()


@pytest.mark.parametrize("seed", range(8))
def test_the_number_that_is_crossed_is_the_one_that_sorting_finds(seed: int) -> None:
    """Of numbers whose bits are all ones, all zeros or random, so that each digit has its first and last value."""
    rng = np.random.default_rng(seed)
    digits = rng.choice([0, 1, 511, 1022, 1023], (40, 3))
    digits[:, 0] = rng.choice([0, 900, 1015, 1016], 40)  # below 2
    bits = (digits @ [1 << 20, 1 << 10, 1]).astype(np.int32)
    row, amounts = torch.from_numpy(bits.view(np.float32)), torch.from_numpy(rng.random(40) + 0.01)
    total = float(amounts.sum())
    for goal in (total * rng.random(20)).tolist():
        least, above = crossing(row, amounts, goal)
        over = {float(number): float(amounts[row > number].sum()) for number in row}
        assert least == min(number for number, more in over.items() if more < goal)
        assert above == pytest.approx(over[least], abs=1e-9)


def test_masks_that_take_too_long_end_their_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(byte_tokenizer()[1])
    slow, quick = (grammars.matcher(LLMatcher.grammar_from_regex(f"[a-z]{{{n}}}"), []).result() for n in (90, 91))
    mask = np.zeros(264 // 32 + 1, np.int32)
    now_s = 0.0

    def first(mask: npt.NDArray[np.int32]) -> int:
        return int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax())

    monkeypatch.setattr("edgemoe.engine.grammar.time.thread_time", lambda: now_s)
    real = LLMatcher.unsafe_compute_mask_ptr

    class Slow:
        """A matcher whose masks take half a second."""

        def unsafe_compute_mask_ptr(self, *at: int) -> None:
            nonlocal now_s
            now_s += 0.5
            real(matcher, *at)

        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

    matcher, slow._matcher = slow._matcher, Slow()
    for _ in range(2):
        slow.fill(mask)
        slow.accept(first(mask))
    with pytest.raises(InvalidRequest, match="too complex: after 2 tokens") as refused:
        slow.fill(mask)
    assert refused.value.code == "invalid_grammar"
    for _ in range(80):
        quick.fill(mask)
        quick.accept(first(mask))
    grammars.close()


def test_grammars_that_nobody_follows_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.engine.grammar.CACHED_BYTES", 10 << 20)
    grammars = GrammarCompiler(byte_tokenizer()[1])

    def matcher(n: int, megabytes: int) -> GrammarMatcher:
        grammar = str(LLMatcher.grammar_from_regex(f"[a-z]{{{n}}}"))
        return grammars.matcher(grammar, [], GrammarTrial(digest_of(grammar), 0.1, megabytes << 20)).result()

    for n in range(1, 20):
        matcher(n, 3)
        assert grammars.bytes <= 10 << 20
    running = [matcher(n, 8) for n in range(20, 25)]
    assert grammars.bytes >= 40 << 20, "those of running requests stay"
    del running
    gc.collect()
    matcher(30, 40)  # the newest is kept, however large
    assert grammars.bytes == 40 << 20
    grammars.close()


def test_all_compiled_grammars_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgemoe.engine.grammar.BUDGET_BYTES", 10 << 20)
    grammars = GrammarCompiler(byte_tokenizer()[1])

    def matcher(n: int, megabytes: int) -> GrammarMatcher:
        grammar = str(LLMatcher.grammar_from_regex(f"[a-z]{{{n}}}"))
        return grammars.matcher(grammar, [], GrammarTrial(digest_of(grammar), 0.1, megabytes << 20)).result()

    for n in range(1, 20):
        matcher(n, 3)  # of requests that are over
        assert grammars.bytes <= 10 << 20
    kept = [matcher(n, 2) for n in range(20, 24)]
    with pytest.raises(InvalidRequest, match="too large"):
        matcher(30, 4)
    kept.append(matcher(31, 1))
    assert grammars.bytes <= 10 << 20
    grammars.close()
