"""The engine over families with windows or latent attention, in tiers smaller than the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import mxfp4_checkpoint, tiny_checkpoint, tiny_model
from support.engine_kit import Drive, Model, prompt
from support.kept import KERNELS
from support.tiers_kit import running

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.policy.baselines import LRU
from edgemoe.store.consistency import spec_of
from edgemoe.store.manifest import DENSE
from edgemoe.store.packer import pack
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier, padded

LENGTHS, TOKENS = [5, 90], 64
MADE = ["gpt_oss", "gpt_oss in MXFP4", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    made = Kernels(1, bf16=False, directory=KERNELS)
    yield made
    made.close()


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The oracle, and a checkpoint of it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "hf"
    if request.param.endswith("MXFP4"):
        return mxfp4_checkpoint(directory), directory
    return tiny_model(request.param), tiny_checkpoint(request.param, directory, stacked=True)


@pytest.fixture(scope="module", params=["resident", "two experts"])
def model(
    request: pytest.FixtureRequest,
    checkpoint: tuple[Any, Path],
    kernels: Kernels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    directory = tmp_path_factory.mktemp("store")
    manifest = pack(checkpoint[1], directory)
    spec = spec_of(manifest)
    geometry, policy = spec.geometry, LRU(spec.geometry.layers, spec.geometry.experts)
    slots = 18 if request.param == "resident" else 2
    memory = TierMemory(slots * padded(manifest.entry(0, 0).bytes), ())
    with ExpertStore(directory, manifest) as store:
        tiers = ExpertTiers(geometry, store, memory, {Tier.RAM: policy, Tier.VRAM: policy}, kernels)
        with running(tiers):
            decoder = Decoder.load(spec, directory / DENSE, "cpu", kernels)
            yield Model(decoder, tiers.experts, spec, partial(KVCache, spec.kv_layout))


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


def drive_all(model: Model, **settings: Any) -> Drive:
    drive = Drive(model=model, **settings)
    for length in LENGTHS:
        drive.submit(prompt(length, length, 96), f"r{length}", max_tokens=TOKENS)
        drive.step()
    drive.run()
    return drive


@pytest.mark.parametrize("settings", [{"step_tokens": 16}, {"blocks": 12, "output_reserve": 0.0}], ids=str)
def test_tokens_are_those_of_transformers(model: Model, expected: list[list[int]], settings: dict[str, Any]) -> None:
    drive = drive_all(model, **settings)
    assert [drive.tokens(f"r{length}") for length in LENGTHS] == expected


def test_a_prompt_that_the_prefix_cache_has_gives_the_same_tokens(model: Model, expected: list[list[int]]) -> None:
    drive = Drive(model=model)
    for attempt in (1, 2):
        drive.submit(prompt(90, 90, 96), f"r{attempt}", max_tokens=TOKENS)
        drive.run()
        assert drive.tokens(f"r{attempt}") == expected[1]
    assert drive.engine.scheduler.prefix_tokens["hit"] == 80


def test_another_engine_goes_on_where_one_died(model: Model, expected: list[list[int]]) -> None:
    for length, whole in zip(LENGTHS, expected, strict=True):
        drive = Drive(model=model)
        drive.submit(prompt(length, length, 96), emitted=whole[:30], attempt=2, max_tokens=TOKENS)
        drive.run()
        assert drive.tokens() == whole[30:]
