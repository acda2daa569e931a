"""The engine over families with windows or latent attention, in tiers smaller than the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import mxfp4_checkpoint, tiny_checkpoint, tiny_model
from support.engine_kit import Model, prompt
from support.family_kit import check_goes_on, check_prefix_is_reused, drive_all, family_model
from support.kept import KERNELS
from support.turns import by_turns

from edgemoe.kernels.cpu.runtime import Kernels

LENGTHS, TOKENS = [5, 90], 64
SLOTS = (18, 2)  # experts in memory: all, or two
MADE = ["gpt_oss", "gpt_oss in MXFP4", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]

GATE = ("gpt_oss in MXFP4", "gemma4_text", "deepseek_v3")
SERVED = [
    pytest.param(one.values, marks=one.marks if one.values[1] in GATE else pytest.mark.slow)
    for one in by_turns(SLOTS, MADE)
]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(request: pytest.FixtureRequest) -> tuple[int, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(served: tuple[int, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The oracle, and a checkpoint of it."""
    directory, family = tmp_path_factory.mktemp("checkpoint") / "hf", served[1]
    if family.endswith("MXFP4"):
        return mxfp4_checkpoint(directory), directory
    return tiny_model(family), tiny_checkpoint(family, directory, stacked=True)


@pytest.fixture(scope="module")
def model(
    served: tuple[int, str], checkpoint: tuple[Any, Path], kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    with family_model(checkpoint[1], tmp_path_factory.mktemp("store"), kernels, served[0]) as made:
        yield made


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Any, Path]) -> list[list[int]]:
    """transformers' greedy tokens."""
    found = []
    for length in LENGTHS:
        ids = torch.tensor([prompt(length, length, 96)])
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": []}
        said = checkpoint[0].generate(ids, do_sample=False, max_new_tokens=TOKENS, **options)
        found.append(said[0, length:].tolist())
    return found


@pytest.mark.parametrize("settings", [{"step_tokens": 16}, {"blocks": 12, "output_reserve": 0.0}], ids=str)
def test_tokens_equal_transformers(model: Model, expected: list[list[int]], settings: dict[str, Any]) -> None:
    assert drive_all(model, LENGTHS, TOKENS, **settings) == expected


def test_a_prompt_that_the_prefix_cache_has_gives_the_same_tokens(model: Model, expected: list[list[int]]) -> None:
    check_prefix_is_reused(model, expected[1])


def test_another_engine_goes_on_where_one_died(model: Model, expected: list[list[int]]) -> None:
    for length, whole in zip(LENGTHS, expected, strict=True):
        check_goes_on(model, length, whole, 30)
