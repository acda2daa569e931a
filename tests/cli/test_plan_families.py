"""`edgemoe plan` measures every family of the table, in both types and in every encoding that a store can have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.gate import RARE_ENCODINGS
from support.kept import KERNELS
from support.tiny_models import FAMILIES as TINY
from support.tiny_models import SIZES
from support.turns import by_turns

from edgemoe.cli.plan import measure as rates
from edgemoe.cli.plan.speed import PACKINGS, ModelVariant, find_model
from edgemoe.experts.compiled_parts import TIERS
from edgemoe.families.spec import ModelSpec
from edgemoe.families.table import FAMILIES
from edgemoe.jit.object_cache import link
from edgemoe.kernels.cpu import expert_math
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.types.encoding import ENCODINGS

DTYPES = ("float32", "bfloat16")
GATE = {
    "qwen3_moe",
    "gpt_oss",
    "gemma4",
    "deepseek_v3",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
}
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
WITHIN = {"gemma4": "gemma4_text"}  # whose configuration is a section of another one's


def tiny_config(family: str, dtype: str) -> dict[str, Any]:
    """Returns the config.json of a tiny model, whose rows fit every encoding."""
    make, _, sizes = TINY[WITHIN.get(family, family)]
    wide = {name: 64 for name in WIDTHS if name in sizes}
    config = json.loads(make(**{**SIZES, **sizes, **wide}).to_json_string(use_diff=False))
    if family in WITHIN:
        config = {"model_type": family, "text_config": config}
    architecture = next(each.architecture for each in FAMILIES.values() if each.name == family)
    return {**config, "architectures": [architecture], "dtype": dtype}


def tiny_spec(family: str, dtype: str, directory: Path) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(tiny_config(family, dtype)))
    return find_model(str(directory), directory).spec


def check(variants: list[ModelVariant], kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(rates, "BUDGET_S", 0.1)
    monkeypatch.setattr(expert_math, "TRIED_TOKENS", (1, 64))
    monkeypatch.setattr(rates, "FILL_S", 200.0)  # codes of encodings may be compiled meanwhile
    measured = rates.measure_layers(variants, kernels, 2, 20, said.append, math.inf)
    for variant, times in zip(variants, measured, strict=True):
        assert min(times.decode_s, times.batch_s, times.prompt_s) > 0, (variant.label, times.why)
    assert len(said) == len(variants)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    made = Kernels(1, request.param == "bfloat16", KERNELS)
    link(TIERS.codes, KERNELS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        pytest.param(*each.values, marks=() if each.values[1] in GATE and not each.marks else pytest.mark.slow)
        for each in by_turns(DTYPES, dict.fromkeys(family.name for family in FAMILIES.values()))
    ],
    indirect=["kernels"],
)
def test_every_family_is_measured_in_all_encodings_that_it_can_have(
    family: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(family, kernels.dtype.name, tmp_path)
    variants = list(find_model(str(tmp_path), tmp_path).variants())
    usual = [spec.dtype, *(experts for experts, _ in PACKINGS)]
    assert [each.spec.geometry.encoding_name(0) for each in variants] == usual
    check(variants, kernels, monkeypatch)


@pytest.mark.parametrize(
    ("kernels", "family", "encoding"),
    [
        pytest.param(*each.values[0], each.values[1], marks=each.marks)
        for each in by_turns(
            product(DTYPES, ["qwen3_moe", "qwen3_5_moe_text", "gpt_oss"]),  # fused, not fused, with biases
            [name for name in ENCODINGS if name not in DTYPES],
            RARE_ENCODINGS,
        )
    ],
    indirect=["kernels"],
)
def test_every_encoding_is_measured(
    family: str, encoding: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(family, kernels.dtype.name, tmp_path)
    variants = []
    for dense in ("", encoding) if encoding in ("int4", "int8") else ("",):
        encoded = replace(spec, encodings=(encoding,) * spec.geometry.layers, dense_encoding=dense)
        variants.append(ModelVariant(f"{encoding} {dense}", encoded, ""))
    check(variants, kernels, monkeypatch)
