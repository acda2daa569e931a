"""The engine with keys and values in int8: the same tokens however prompts are cut, kept, paused and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import tiny_checkpoint
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
    store: Path = tmp_path_factory.mktemp("store")
    manifest = pack(checkpoint, store)
    spec = replace(spec_of(manifest), kv_int8=True)
    policy = LRU(spec.geometry.layers, spec.geometry.experts)
    memory = TierMemory(18 * padded(manifest.entry(0, 0).bytes), ())
    with ExpertStore(store, manifest) as opened:
        tiers = ExpertTiers(spec.geometry, opened, memory, {Tier.RAM: policy, Tier.VRAM: policy}, kernels)
        with running(tiers):
            decoder = Decoder.load(spec, store / DENSE, "cpu", kernels)
            yield Model(decoder, tiers.experts, spec, partial(KVCache, spec.kv_layout))


def drive_all(model: Model, **settings: Any) -> list[list[int]]:
    drive = Drive(model=model, **settings)
    for length in LENGTHS:
        drive.submit(prompt(length, length, 96), f"r{length}", max_tokens=TOKENS)
        drive.step()
    drive.run()
    if way := settings.get("preemption"):
        assert drive.engine.scheduler.paused_total[way] > 0
    return [drive.tokens(f"r{length}") for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return drive_all(model)


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
    assert drive_all(model, **settings) == expected


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
        drive.submit(prompt(length, length, 96), emitted=whole[:20], attempt=2, max_tokens=TOKENS)
        drive.run()
        assert drive.tokens() == whole[20:]
