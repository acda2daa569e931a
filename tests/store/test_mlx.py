"""Checkpoints of MLX, whose weights are the same in a store, or nearly, and the loss is told."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from store.test_encodings import expert_of, meant_expert
from support.mlx_files import MlxFormat, convert
from support.tiny_models import FAMILIES, SIZES

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.table import FAMILIES as TABLE
from edgemoe.store.catalog import spec_at
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import DENSE
from edgemoe.store.mlx_weights import BITS, GROUPS
from edgemoe.store.packer import pack
from edgemoe.store.quantisation_config import MLX_ARCHITECTURES

Make = Callable[..., Path]
HELD = {  # (bits, group) -> the encoding in the store
    **{(bits, group): "a4_64" for bits in (2, 3, 4) for group in (64, 128)},
    **{(bits, 32): "q4_1" for bits in (2, 3, 4)},
    **{(5, group): "q5_1" for group in GROUPS},
    **{(6, group): "a6_64" for group in (64, 128)},
    **{(8, group): "a8_64" for group in (64, 128)},
    **{(bits, 32): "int8" for bits in (6, 8)},  # with a loss
}
NAMES = [TABLE[architecture].name for architecture in MLX_ARCHITECTURES]


@pytest.fixture
def source(checkpoint: Make, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    return shutil.copytree(checkpoint(**wide), tmp_path / "source")


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_size_of_codes_and_groups_keeps_its_weights_or_tells_the_loss(
    bits: int, group: int, dtype: torch.dtype, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meant = convert(source, MlxFormat(bits, group, dtype))
    with caplog.at_level(logging.WARNING):
        manifest = pack(source, tmp_path / "store")
    encoding = HELD[bits, group]
    assert {layer.encoding for layer in manifest.layers} == {encoding} == set(spec_at(source).encodings)
    is_exact = encoding != "int8"
    assert ("experts in mlx are re-encoded in int8" in caplog.text) == (not is_exact)
    assert "no numbers of float16" not in caplog.text
    for expert in (0, 5):
        for found, wanted in zip(expert_of(tmp_path / "store", 1, expert), meant_expert(meant, 1, expert), strict=True):
            if is_exact:
                np.testing.assert_array_equal(found, wanted)
            else:
                assert np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("family", NAMES)
def test_a_conversion_is_the_same_store_as_the_weights_that_it_means(family: str, tmp_path: Path) -> None:
    config, model, sizes = FAMILIES[family]
    widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    wide: dict[str, Any] = {**SIZES, **sizes, **{name: 64 for name in widths if name in sizes}}
    torch.manual_seed(0)
    model(config(**wide)).save_pretrained(tmp_path / "plain", save_original_format=True)
    converted = shutil.copytree(tmp_path / "plain", tmp_path / "mlx")
    meant = convert(converted, MlxFormat(4, 32, torch.float16), family)
    save_file(meant, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    plain = pack(tmp_path / "plain", tmp_path / "plain-store")
    made = pack(converted, tmp_path / "store", wanted=WantedEncodings.parse("keep", "f32"))
    assert {layer.encoding for layer in made.layers} == {"q4_1"}
    for layer, entry in enumerate(plain.layers):
        for expert in range(len(entry.experts)):
            both = (expert_of(tmp_path / name, layer, expert) for name in ("store", "plain-store"))
            for found, wanted in zip(*both, strict=True):
                np.testing.assert_array_equal(found, wanted)
    dense = [load_file(tmp_path / name / DENSE) for name in ("store", "plain-store")]
    assert dense[0].keys() == dense[1].keys()
    for name, wanted in dense[1].items():
        torch.testing.assert_close(dense[0][name].float(), wanted.float(), rtol=0, atol=0, msg=name)


def test_layers_may_have_codes_of_their_own_size(source: Path, tmp_path: Path) -> None:
    """As in mixed recipes: the configuration names modules with other sizes, and the tensors tell."""
    other = shutil.copytree(source, tmp_path / "other")
    meant, finer = convert(source, MlxFormat(4, 64)), convert(other, MlxFormat(8, 64))
    tensors, fine = (load_file(each / "model.safetensors") for each in (source, other))
    chosen = [name for name in tensors if ".layers.2." in name and ".down_proj." in name]
    save_file({**tensors, **{name: fine[name] for name in chosen}}, source / "model.safetensors", {"format": "mlx"})
    manifest = pack(source, tmp_path / "store")
    assert [layer.encoding for layer in manifest.layers] == ["a4_64", "a4_64", "a4_64+a8_64"]
    np.testing.assert_array_equal(expert_of(tmp_path / "store", 2, 1)[0], meant_expert(meant, 2, 1)[0])
    assert not np.array_equal(meant_expert(meant, 2, 1)[1], meant_expert(finer, 2, 1)[1])


def changed(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, source / "model.safetensors")


STACK = "model.layers.1.mlp.switch_mlp.up_proj"
BAD: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "no biases": lambda tensors: tensors.pop(f"{STACK}.biases"),
    "scales of fewer groups": lambda tensors: tensors.update({f"{STACK}.scales": tensors[f"{STACK}.scales"][..., :1]}),
    "words that are cut": lambda tensors: tensors.update({f"{STACK}.weight": tensors[f"{STACK}.weight"][..., 1:]}),
    "an expert too few": lambda tensors: tensors.update({f"{STACK}.weight": tensors[f"{STACK}.weight"][1:]}),
}


@pytest.mark.parametrize("fault", BAD)
def test_mismatched_tensors_are_refused_by_name(fault: str, source: Path, tmp_path: Path) -> None:
    convert(source, MlxFormat())
    changed(source, BAD[fault])
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.switch_mlp\.up_proj"):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store" / "dense.safetensors").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("base", [STACK, "model.layers.1.self_attn.q_proj"], ids=["experts", "dense"])
@pytest.mark.parametrize("part", ["scales", "biases"])
def test_factors_that_are_not_finite_are_refused_by_name(
    part: str, base: str, value: float, source: Path, tmp_path: Path
) -> None:
    convert(source, MlxFormat())
    changed(source, lambda tensors: tensors[f"{base}.{part}"].view(-1)[:1].fill_(value))
    with pytest.raises(CheckpointError, match=re.escape(base) + ".* not numbers or infinite"):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_other_modes_are_refused_by_name(mode: str, source: Path) -> None:
    convert(source, MlxFormat(), mode=mode)
    with pytest.raises(UnsupportedModel, match=f"MLX in the mode {mode}"):
        spec_at(source)


def test_a_family_whose_tensors_mlx_changes_is_refused_by_name(source: Path) -> None:
    convert(source, MlxFormat())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["GptOssForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="MLX of GptOssForCausalLM"):
        spec_at(source)
