"""Families with windows: a cache that keeps everything gives the same tokens, and few blocks are held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.drafting import drafting
from support.engine_kit import Drive, Model, prompt
from support.family_kit import family_model
from support.gate import in_gate
from support.kept import KERNELS
from support.tiny_models import FAMILIES, SIZES

from edgemoe.families.config import spec_from_config
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.store.manifest import DENSE
from edgemoe.types.step import BLOCK_TOKENS, EntryKind, least_blocks, most_kept

LENGTHS, TOKENS = [5, 150, 40], 70
WAYS = ("kernels", "torch")  # that compute attention
GATE = ("gpt_oss", "gemma4_text", "cohere2_moe")  # sinks; layers of two sizes; parallel blocks


class Windowed(NamedTuple):
    """A tiny model of a family whose attention is computed in one way, and the tokens that it should give."""

    model: Model
    expected: list[list[int]]

    @property
    def window(self) -> int:
        return self.model.spec.kv_layout.window

    @property
    def least(self) -> int:
        return least_blocks(self.window)


FOUND = [
    "qwen2_moe",
    "gpt_oss",
    "gemma4_text",
    "cohere2_moe",
    "laguna",
    "mellum",
    "granitemoe_swa",
    "afmoe",
    "exaone_moe",
]


def windowed_families() -> list[str]:
    """Returns the families of the table whose tiny models have windows."""
    found = []
    for name, (config_class, model_class, own) in FAMILIES.items():
        config = config_class(**{**SIZES, **own}).to_dict() | {"architectures": [model_class.__name__]}
        if spec_from_config(config).kv_layout.window:
            found.append(name)
    return found


def test_these_are_all_families_with_windows() -> None:
    assert set(windowed_families()) == set(FOUND)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


def checkpoint(family: str, directory: Path) -> Path:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **own})).eval()
    for name, values in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.endswith((".scale", "expert_scale", "scalar", "bias", "sinks")):
            values.data += 0.1 * torch.randn_like(values)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(
    scope="module",
    params=in_gate(FOUND, GATE),
)
def both(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Windowed]]:
    """A family's model by each way, with the tokens of a cache that keeps all tokens in all layers."""
    folder = tmp_path_factory.mktemp(request.param)
    with family_model(checkpoint(request.param, folder / "hf"), folder / "store", kernels, 99) as model:
        made = {}
        for way in WAYS:
            decoder = Decoder.load(model.spec, folder / "store" / DENSE, "cpu", kernels if way == "kernels" else None)
            spoiled = model._replace(decoder=decoder, cache=partial(spoiled_cache, model.cache))
            made[way] = Windowed(spoiled, answers(spoiled, keep_all=True))
        yield made


@pytest.fixture(params=[WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def windowed(request: pytest.FixtureRequest, both: dict[str, Windowed]) -> Windowed:
    return both[request.param]


def spoiled_cache(make: Callable[..., object], blocks: int, window_blocks: int = 0) -> object:
    """Returns a cache none of whose numbers is one before it is written, but for the window's block of zeros."""
    cache = make(blocks, window_blocks=window_blocks)
    for pool in (cache, cache.windows):  # type: ignore[attr-defined]
        if pool is not None:
            pool.data[1:] = 0xFF
    return cache


def answers(model: Model, **settings: Any) -> list[list[int]]:
    """Returns the answers to prompts of LENGTHS, which join one by one."""
    return ask(Drive(model=model, **settings))


def submit(drive: Drive, tokens: Sequence[int], name: str, most: int, **others: Any) -> None:
    """Submits a prompt whose answer is drawn, because greedy answers of random models repeat themselves."""
    drive.submit(tokens, name, temperature=1.0, max_tokens=most, **others)


def ask(drive: Drive) -> list[list[int]]:
    for length in LENGTHS:
        submit(drive, prompt(length, length, 96), f"r{length}", TOKENS)
        drive.step()
    drive.run()
    return [drive.tokens(f"r{length}") for length in LENGTHS]


def test_metrics_tell_the_blocks_of_windows(windowed: Windowed) -> None:
    drive = Drive(model=windowed.model)
    before = drive.engine.metrics()
    submit(drive, prompt(40, 40, 96), "r", TOKENS)
    drive.step()
    during = drive.engine.metrics()
    held, count = "edgemoe_kv_window_blocks_referenced", "edgemoe_kv_window_blocks"
    assert before[held] < during[held] <= during[count] == before[count]
    drive.run()
    assert drive.engine.metrics()[held] == before[held]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step_tokens": 16},
        {"blocks": 20, "preemption": "recompute", "output_reserve": 0.0},
        {"blocks": 20, "preemption": "park", "output_reserve": 0.0},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_cache_that_keeps_all(windowed: Windowed, settings: dict[str, Any]) -> None:
    drive = Drive(model=windowed.model, **settings)
    assert ask(drive) == windowed.expected
    if way := settings.get("preemption"):
        assert drive.engine.scheduler.paused_total["park" if way == "park" else "recompute"] > 0


@pytest.mark.parametrize("few", [False, True])
def test_drafts_change_no_token(windowed: Windowed, few: bool) -> None:
    """Drafts come from the right answer with some tokens changed, so that some are accepted and others are not."""
    window_blocks, right = windowed.least if few else 0, windowed.expected[1]
    drive = Drive(model=windowed.model, window_blocks=window_blocks, drafts="lookup")
    with drafting():
        said = [token if place % 9 else (token + 1) % 96 for place, token in enumerate(right, start=1)]
        submit(drive, prompt(150, 150, 96), "r150", TOKENS, expected=said)
        drive.run()
    assert drive.tokens("r150") == right
    speculation = drive.engine.speculation
    assert speculation is not None
    assert speculation.accepted > 0
    assert speculation.rejected > 0


@pytest.mark.parametrize("preemption", ["park", "recompute"])
@pytest.mark.parametrize("more", [0, 3])
def test_as_few_blocks_as_one_sequence_needs_serve_several(windowed: Windowed, preemption: str, more: int) -> None:
    blocks = windowed.least + more
    settings = {"preemption": preemption, "output_reserve": 0.0, "window_blocks": blocks}
    assert answers(windowed.model, **settings) == windowed.expected


def test_a_sequence_holds_its_window_alone(windowed: Windowed) -> None:
    drive = Drive(model=windowed.model, window_blocks=windowed.least)
    submit(drive, prompt(150, 150, 96), "r150", TOKENS)
    held = 0
    while drive.step():
        windows = drive.engine.blocks._windows
        assert windows is not None
        held = max(held, windows.count - 1 - windows.free)
    assert drive.tokens("r150") == windowed.expected[1]
    assert held <= most_kept(windowed.window) + 1


def test_a_prompt_that_is_asked_again_is_not_computed_again(windowed: Windowed) -> None:
    drive = Drive(model=windowed.model)
    for attempt in range(2):
        submit(drive, prompt(150, 150, 96), f"a{attempt}", TOKENS)
        drive.run()
        assert drive.tokens(f"a{attempt}") == windowed.expected[1]
    assert drive.engine.scheduler.prefix_tokens["hit"] == 149 // BLOCK_TOKENS * BLOCK_TOKENS
    further = prompt(150, 150, 96) + windowed.expected[1]
    submit(drive, further, "on", 20)
    drive.run()
    assert drive.engine.scheduler.prefix_tokens["hit"] == (149 // 16 + (len(further) - 1) // 16) * BLOCK_TOKENS
    assert drive.tokens("on") == answer_alone(windowed, further)


def answer_alone(windowed: Windowed, tokens: Sequence[int]) -> list[int]:
    """Returns 20 tokens of an engine that keeps everything."""
    alone = Drive(model=windowed.model, keep_all=True)
    submit(alone, tokens, "alone", 20)
    alone.run()
    return alone.tokens("alone")


def test_a_prefix_without_its_window_is_computed_again_once(windowed: Windowed) -> None:
    """A third prompt that branches where the second one did finds the window that the second one left there."""
    drive, text = Drive(model=windowed.model, window_blocks=windowed.least), prompt(300, 300, 96)
    tokens = {}
    for name in ("first", "second", "third"):
        asked = text if name == "first" else text[:80] + prompt(70, 7 if name == "second" else 8, 96)
        submit(drive, asked, name, 20)
        drive.run()
        tokens[name] = asked, drive.tokens(name), drive.engine.scheduler.prefix_tokens["hit"]
    assert [hits for _, _, hits in tokens.values()] == [0, 0, 80]
    assert all(answer == answer_alone(windowed, asked) for asked, answer, _ in tokens.values())


def test_another_engine_goes_on_where_one_died(windowed: Windowed) -> None:
    drive = Drive(model=windowed.model)
    submit(drive, prompt(150, 150, 96), "r150", TOKENS, emitted=windowed.expected[1][:30], attempt=2)
    drive.run()
    assert drive.tokens("r150") == windowed.expected[1][30:]


def test_a_prefix_is_handed_over_with_its_last_window(windowed: Windowed) -> None:
    source, target = Drive(model=windowed.model), Drive(model=windowed.model)
    submit(source, prompt(150, 150, 96), "r150", 1)
    source.run()
    giving, taking = source.engine.prefixes, target.engine.prefixes
    keys = taking.keys(prompt(150, 150, 96), b"")
    wanted = [*((n, EntryKind.BLOCK) for n in range(len(keys)))]
    wanted += [(n, EntryKind.WINDOW) for n in taking.needed_windows(len(keys))]
    for n, kind in wanted:
        entry = giving.read(keys[n], kind)
        assert entry is not None
        assert taking.take_in(keys[: n + 1], entry.data, kind)
    assert taking.with_window(keys) == len(keys)
    submit(target, prompt(150, 150, 96), "r150", TOKENS)
    target.run()
    assert target.tokens("r150") == windowed.expected[1]
    assert target.engine.scheduler.prefix_tokens["hit"] == len(keys) * BLOCK_TOKENS
