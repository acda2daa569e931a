"""Checkpoints in others' formats, whose weights mean the same in a store: exactly in bfloat16, else nearly."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from store.test_encodings import expert_of, meant_expert
from support.quantised import (
    Quantise,
    awq,
    compressed,
    gptq,
    is_expert,
    is_projection,
    mxfp4_packed,
    nvfp4,
    quantise,
    with_zeros,
)

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.catalog import spec_at
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import Manifest
from edgemoe.store.packer import pack

Make = Callable[..., Path]
SHAPE = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
ASYMMETRIC = partial(compressed, "pack-quantized", type="int", strategy="group", group_size=32, symmetric=False)
BITS4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ROUND = {**BITS4, "quant_method": "auto-round"}
FORMATS: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "AWQ": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "GPTQ": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
    "GPTQ in 2 bits": (gptq(2, 32), {"quant_method": "gptq", "bits": 2, "group_size": 32}),
    "GPTQ in 3 bits": (gptq(3, 32), {"quant_method": "gptq", "bits": 3, "group_size": 32}),
    "GPTQ in 8 bits": (gptq(8, 32), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "GPTQ reordered": (gptq(4, 16, reordered=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "GPTQ of version 2": (gptq(4, 32, less=0), {**BITS4, "checkpoint_format": "gptq_v2"}),
    "AutoRound": (gptq(4, 32), {**ROUND, "packing_format": "auto_round:auto_gptq"}),
    "AutoRound of its own": (gptq(4, 32, less=0), {**ROUND, "packing_format": "auto_round"}),
    "AutoRound as AWQ": (awq(32), {**ROUND, "packing_format": "auto_round:auto_awq"}),
    "zero points": (with_zeros(4, 32), ASYMMETRIC(num_bits=4)),
    "zero points in 8 bits": (with_zeros(8, 32), ASYMMETRIC(num_bits=8)),
    "zero points, reordered": (with_zeros(4, 16, reordered=True), ASYMMETRIC(num_bits=4, actorder="group")),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "NVFP4 of compressed-tensors": (
        partial(nvfp4, of_modelopt=False),
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "MXFP4 of compressed-tensors": (
        mxfp4_packed,
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
}


@pytest.fixture
def source(checkpoint: Make, tmp_path: Path) -> Path:
    """A checkpoint with one tensor for each expert's matrix; the test may change it."""
    return shutil.copytree(checkpoint(**SHAPE), tmp_path / "source")


@pytest.mark.parametrize("chosen", [is_expert, is_projection], ids=["experts", "all"])
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_mean_the_same(kind: str, chosen: Callable[[str], bool], source: Path, tmp_path: Path) -> None:
    how, about = FORMATS[kind]
    meant = quantise(source, how, about, chosen)
    pack(source, tmp_path / "store", wanted=WantedEncodings.parse("bf16", "bf16"))
    for expert in (0, 5):
        for found, wanted in zip(expert_of(tmp_path / "store", 1, expert), meant_expert(meant, 1, expert), strict=True):
            rounded = torch.from_numpy(wanted).to(torch.bfloat16).float().numpy()
            off = np.abs(found - rounded)
            assert off.max() <= 2.0**-8 * np.abs(wanted).max()  # a place of bfloat16, where a product was rounded
            assert (off > 0).mean() < 0.01
    dense = load_file(tmp_path / "store" / "dense.safetensors")["model.layers.0.self_attn.q_proj.weight"].float()
    torch.testing.assert_close(dense, meant["model.layers.0.self_attn.q_proj.weight"], rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_foreign_encodings_are_reencoded_and_the_loss_is_reported(
    kind: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how, about = FORMATS[kind]
    meant = quantise(source, how, about, is_expert)
    with caplog.at_level(logging.WARNING):
        manifest = pack(source, tmp_path / "store")
    encodings = {layer.encoding for layer in manifest.layers}
    exact = "NVFP4" not in kind and "reordered" not in kind
    usual = "mxfp4" if "MXFP4" in kind else "z8_32" if "8 bits" in kind else "z4_32"
    assert encodings == {usual if exact else "int4"}
    assert set(spec_at(source).encodings) == encodings
    assert ("are re-encoded in" in caplog.text) == (not exact)
    assert "no numbers of float16" not in caplog.text
    for found, wanted in zip(expert_of(tmp_path / "store", 0, 2), meant_expert(meant, 0, 2), strict=True):
        if exact:
            np.testing.assert_array_equal(found, wanted)
        assert np.square(found - wanted).mean() ** 0.5 <= 0.12 * np.square(wanted).mean() ** 0.5


WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 16}
BITS8 = {"quant_method": "gptq", "bits": 8, "desc_act": False}
GROUPS: dict[str, tuple[Quantise, dict[str, Any], str]] = {
    "AWQ, 128": (awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "z4_128"),
    "AWQ, 64": (awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, "z4_32"),
    "GPTQ, 128": (gptq(4, 128), {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, "z4_128"),
    "GPTQ, rows": (gptq(4, 4096), {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}, "z4_128"),
    "GPTQ, 8 bits, 128": (gptq(8, 128), {**BITS8, "group_size": 128}, "z8_128"),
    "zero points, 128": (with_zeros(4, 128), {**ASYMMETRIC(num_bits=4, group_size=128)}, "z4_128"),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_of_any_size_are_held_exactly_by_the_smallest_encoding(
    kind: str, checkpoint: Make, tmp_path: Path
) -> None:
    how, about, encoding = GROUPS[kind]
    source = shutil.copytree(checkpoint(**WIDE), tmp_path / "wide")
    meant = quantise(source, how, about, is_expert)
    manifest = pack(source, tmp_path / "store")
    assert {layer.encoding for layer in manifest.layers} == {encoding} == set(spec_at(source).encodings)
    for found, wanted in zip(expert_of(tmp_path / "store", 1, 3), meant_expert(meant, 1, 3), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_columns_in_an_order_of_their_own_are_exact_where_their_groups_lie_side_by_side(
    source: Path, tmp_path: Path
) -> None:
    """Files without reordered columns have their order, too."""
    about = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    meant = quantise(source, gptq(4, 32), about, is_expert)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qweight")]:
        columns = 8 * len(tensors[name])
        tensors[name.replace("qweight", "g_idx")] = (torch.arange(columns) // 32).to(torch.int32)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert {layer.encoding for layer in pack(source, tmp_path / "store").layers} == {"z4_32"}
    np.testing.assert_array_equal(expert_of(tmp_path / "store", 0, 1)[0], meant_expert(meant, 0, 1)[0])


def test_reordered_columns_that_the_configuration_denies_are_refused(source: Path, tmp_path: Path) -> None:
    quantise(source, gptq(4, 32, reordered=True), FORMATS["GPTQ"][1], is_expert)
    with pytest.raises(CheckpointError, match="has reordered columns, of which"):
        pack(source, tmp_path / "store")
    pack(source, tmp_path / "int8", wanted=WantedEncodings.parse("int8", "keep"))


@pytest.mark.parametrize(("factor", "is_told"), [(1.0, False), (2.0**-14, True)])
def test_scales_in_bfloat16_are_exact_or_counted(
    factor: float, is_told: bool, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def how(name: str, weight: torch.Tensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        small: dict[str, torch.Tensor] = {}
        codes = with_zeros(4, 32)(name, weight, small) / small[f"{name}_scale"].float().repeat_interleave(32, 1)
        scales = (small[f"{name}_scale"].float() * (factor if ".2.gate" in name else 1.0)).to(torch.bfloat16)
        stored |= {**small, f"{name}_scale": scales}
        return codes.round() * scales.float().repeat_interleave(32, 1)

    meant = quantise(source, how, ASYMMETRIC(num_bits=4), is_expert)
    with caplog.at_level(logging.WARNING):
        pack(source, tmp_path / "store")
    assert ("scales in bfloat16 are no numbers of float16" in caplog.text) == is_told
    off = np.abs(expert_of(tmp_path / "store", 0, 2)[0] - meant_expert(meant, 0, 2)[0])
    assert off.max() <= (16 * 2.0**-25 if is_told else 0)


def test_modelopt_says_beside_config_json_how_weights_are_quantised(source: Path, tmp_path: Path) -> None:
    quantise(source, nvfp4, {}, is_expert)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.input_scale"] = torch.ones(())
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert set(spec_at(source).encodings) == {"int4"}
    assert {layer.encoding for layer in pack(source, tmp_path / "store").layers} == {"int4"}
    said["quantization"]["quant_algo"] = "W4A8_AWQ"  # type: ignore[index]
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedModel, match="modelopt with the algorithm W4A8_AWQ cannot be read"):
        spec_at(source)


@pytest.mark.parametrize("section", ["text_config", "language_config"])
def test_quantisation_is_found_where_publishers_put_it(section: str, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    inner = {"quantization_config": {"quant_method": "exl3", "bits": 4}}
    (source / "config.json").write_text(json.dumps({**config, section: inner}))
    with pytest.raises(UnsupportedModel, match="weights quantised by exl3 cannot be read"):
        spec_at(source)


def test_experts_of_several_types_are_read_tensor_by_tensor(source: Path, tmp_path: Path) -> None:
    """As recipes have it that leave the first layer alone, and give down projections more bits."""
    about = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}

    def mixed(name: str, weight: torch.Tensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
        return gptq(8 if "down_proj" in name else 4, 32)(name, weight, stored)

    meant = quantise(source, mixed, about, lambda name: is_expert(name) and ".layers.0." not in name)
    manifest = pack(source, tmp_path / "kept")
    assert [layer.encoding or manifest.dtype for layer in manifest.layers] == ["float32", "z4_32+z8_32", "z4_32+z8_32"]
    pack(source, tmp_path / "int4", wanted=WantedEncodings.parse("int4", "keep"))
    assert {layer.encoding for layer in Manifest.load(tmp_path / "int4").layers} == {"int4"}
    found, wanted = expert_of(tmp_path / "kept", 0, 1)[1], meant_expert(meant, 0, 1)[1]
    np.testing.assert_array_equal(found, wanted)


BAD: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "scales of fewer groups than zero points": ("scales", lambda tensor: tensor[:1]),
    "zero points that are missing": ("qzeros", lambda tensor: tensor[:, :0]),
    "words that are cut": ("qweight", lambda tensor: tensor[:-1]),
    "groups that do not exist": ("g_idx", lambda tensor: tensor + 1000),
}


@pytest.mark.parametrize("fault", BAD)
def test_mismatched_weights_are_refused_by_name(fault: str, source: Path, tmp_path: Path) -> None:
    quantise(source, gptq(4, 16, reordered=True), FORMATS["GPTQ reordered"][1], is_expert)
    part, change = BAD[fault]
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.1.mlp.experts.4.up_proj.{part}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.4\.up_proj"):
        pack(source, tmp_path / "store")


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a change of a tensor's first number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "is missing": lambda _: None,
    "is cut": lambda tensor: tensor[:-1],
    "is of whole numbers": lambda tensor: tensor.long(),
    "is of float64": lambda tensor: tensor.double(),
    "has an infinity": first(float("inf")),
    "has no number": first(float("nan")),
    "has a negative number": first(-1),
}
SCALES = ("is missing", "is cut", "is of whole numbers", "is of float64", "has an infinity", "has no number")
PARTS: dict[str, dict[str, tuple[str, ...]]] = {  # the tensors of a matrix, and the faults that each may have
    "AWQ": {"scales": SCALES, "qzeros": ("is missing", "is cut", "is of whole numbers"), "qweight": ("is cut",)},
    "GPTQ": {"scales": SCALES, "qzeros": ("is missing", "is cut", "is of whole numbers"), "qweight": ("is cut",)},
    "GPTQ reordered": {"g_idx": ("is missing", "is cut", "is of float64", "has a negative number"), "scales": SCALES},
    "zero points": {
        "weight_scale": SCALES,
        "weight_zero_point": ("is missing", "is cut", "is of whole numbers"),
        "weight_packed": ("is missing", "is cut"),
    },
    "NVFP4": {"weight_scale": ("is missing", "is cut"), "weight_scale_2": ("is missing", *SCALES[2:])},
    "NVFP4 of compressed-tensors": {"weight_global_scale": ("is missing", *SCALES[2:])},
    "MXFP4 of compressed-tensors": {"weight_scale": ("is missing", "is cut", "is of float64")},
}


@pytest.mark.parametrize("matrix", ["mlp.experts.4.up_proj", "self_attn.q_proj"])
@pytest.mark.parametrize(
    ("kind", "part", "fault"),
    [(kind, part, fault) for kind, parts in PARTS.items() for part, faults in parts.items() for fault in faults],
)
def test_each_part_of_a_matrix_that_is_not_as_it_should_be_is_refused_by_name(
    kind: str, part: str, fault: str, matrix: str, source: Path, tmp_path: Path
) -> None:
    how, about = FORMATS[kind]
    quantise(source, how, about, is_projection)
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.1.{matrix}.{part}"
    changed = CHANGES[fault](tensors.pop(name).clone())
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModel), match=re.escape(f"model.layers.1.{matrix}")):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()
