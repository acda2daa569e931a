"""The engine with keys and values in int8: the same tokens however prompts are cut, kept, paused and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.checkpoints import tiny_checkpoint
from support.engine_kit import Model
from support.family_kit import check_goes_on, check_prefix_is_reused, drive_all, family_model
from support.kept import KERNELS

from edgemoe.kernels.cpu.runtime import Kernels

LENGTHS, TOKENS = [5, 90, 40], 32
MADE = ["qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v3"]  # fused; windows and sinks; two kinds of layers; latents


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=MADE)
def model(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    checkpoint = tiny_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint") / "hf", stacked=True)
    with family_model(checkpoint, tmp_path_factory.mktemp("store"), kernels, 18, kv_int8=True) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return drive_all(model, LENGTHS, TOKENS)


@pytest.mark.parametrize(
    "settings",
    [
        {"step_tokens": 16},
        {"blocks": 10, "output_reserve": 0.0, "preemption": "park"},
        {"blocks": 10, "output_reserve": 0.0, "preemption": "recompute"},
    ],
    ids=str,
)
def test_tokens_are_the_same_in_chunks_and_after_a_pause(
    model: Model, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    assert drive_all(model, LENGTHS, TOKENS, **settings) == expected


def test_a_prompt_that_the_prefix_cache_has_gives_the_same_tokens(model: Model, expected: list[list[int]]) -> None:
    check_prefix_is_reused(model, expected[1])


def test_another_engine_goes_on_where_one_died(model: Model, expected: list[list[int]]) -> None:
    for length, whole in zip(LENGTHS, expected, strict=True):
        check_goes_on(model, length, whole, 20)
