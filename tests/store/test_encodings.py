"""Stores whose weights are in 4 or 8 bits, and checkpoints that others have quantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import quantised
from support.old_store import make_version_1
from support.quantised import ABOUT_FP8, Quantise, compressed, is_expert, is_projection

from edgemoe.encodings.codec import pack as encode
from edgemoe.encodings.codec import unpack
from edgemoe.errors import CheckpointError, ConfigError, StoreError, UnsupportedModel
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import JOURNAL, MANIFEST, Manifest, spec_of, verify_weights
from edgemoe.store.packer import ensure_store, pack
from edgemoe.store.quantisation_config import check_method
from edgemoe.store.reader import ExpertStore
from edgemoe.types.encoding import ENCODINGS

Make = Callable[..., Path]
SHAPE = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
Floats = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture
def source(checkpoint: Make, tmp_path: Path) -> Path:
    """A checkpoint with one tensor for each expert's matrix; the test may change it."""
    return shutil.copytree(checkpoint(**SHAPE), tmp_path / "source")


def expert_of(store: Path, layer: int, expert: int) -> tuple[Floats, Floats]:
    """Returns gate and up, and down, of an expert as the store has them."""
    manifest = Manifest.load(store)
    geometry = spec_of(manifest).geometry
    room = bytearray(geometry.expert_bytes(layer))
    with ExpertStore(store, manifest) as opened:
        opened.read_into(layer, expert, memoryview(room))
    encoding, (rows, columns) = geometry.encoding(layer), geometry.gate_up_shape
    split = rows * encoding.row_bytes(columns)
    data = np.frombuffer(room, np.uint8)
    gate_up = unpack(data[:split].reshape(rows, -1), encoding, columns)
    down = data[split : len(data) - geometry.bias_bytes].reshape(geometry.hidden, -1)
    return gate_up, unpack(down, geometry.down_encoding(layer), geometry.width)


def meant_expert(meant: dict[str, torch.Tensor], layer: int, expert: int) -> tuple[Floats, Floats]:
    name = f"model.layers.{layer}.mlp.experts.{expert}"
    gate, up, down = (meant[f"{name}.{part}_proj.weight"].float().numpy() for part in ("gate", "up", "down"))
    return np.concatenate([gate, up]), down


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_experts_are_stored_as_the_reference_encodes_them(source: Path, tmp_path: Path, name: str) -> None:
    manifest = pack(source, tmp_path / "store", wanted=WantedEncodings.parse(name, "keep"))
    plain = load_file(source / "model.safetensors")
    for layer in range(3):
        assert manifest.layers[layer].encoding == name
        verify_weights(tmp_path / "store", manifest.layers[layer])
        for found, weights in zip(expert_of(tmp_path / "store", layer, 5), meant_expert(plain, layer, 5), strict=True):
            encoding = ENCODINGS[name]
            np.testing.assert_array_equal(found, unpack(encode(weights, encoding), encoding, weights.shape[1]))


def test_layers_may_have_encodings_of_their_own(source: Path, tmp_path: Path) -> None:
    manifest = pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int4,first=int8,2=bf16", "keep"))
    assert [layer.encoding for layer in manifest.layers] == ["int8", "int4", "bfloat16"]
    geometry = spec_of(manifest).geometry
    assert [layer.experts[0].bytes for layer in manifest.layers] == [geometry.expert_bytes(layer) for layer in range(3)]


def test_dense_matrices_are_encoded_and_norms_and_gates_are_not(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "store", wanted=WantedEncodings.parse("keep", "int8"))
    plain, stored = load_file(source / "model.safetensors"), load_file(tmp_path / "store" / "dense.safetensors")
    for name, tensor in stored.items():
        matrix = name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))
        assert (tensor.dtype == torch.uint8) == matrix, name
        if matrix:
            expected = encode(plain[name].numpy(), ENCODINGS["int8"])
            np.testing.assert_array_equal(tensor.numpy(), expected)
        else:
            assert torch.equal(tensor, plain[name])


def test_rows_that_do_not_fit_keep_their_type_and_that_is_said(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = pack(checkpoint(), tmp_path, wanted=WantedEncodings.parse("int4", "int8"))  # experts of width 20
    assert manifest.encodings == ("", "", "", "int8")
    assert "experts of layer 2 cannot be encoded so" in caplog.text
    assert "layers.0.self_attn.o_proj.weight cannot be encoded so" in caplog.text  # 4 heads of 12


def test_encodings_are_part_of_the_digest_and_of_the_stores_name(source: Path, tmp_path: Path) -> None:
    wanted = [WantedEncodings(), *(WantedEncodings.parse(*each) for each in (("int4", "keep"), ("keep", "int8")))]
    stores = [ensure_store(source, tmp_path / "stores", wanted=each) for each in wanted]
    assert len({Manifest.load(store).digest for store in stores}) == len({store.name for store in stores}) == 3
    assert [ensure_store(source, tmp_path / "stores", wanted=each) for each in wanted] == stores


def test_a_pack_begun_in_other_encodings_starts_again(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int8", "keep"))
    text = (tmp_path / "store" / MANIFEST).read_text()
    (tmp_path / "store" / MANIFEST).unlink()
    journal = {"version": 2, "source": json.loads(text)["source"], "encodings": ["int8"] * 3 + [""]}
    (tmp_path / "store" / JOURNAL).write_text(json.dumps(journal))
    again = pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int4", "keep"))
    assert again == pack(source, tmp_path / "other", wanted=WantedEncodings.parse("int4", "keep"))
    with pytest.raises(StoreError, match="in other encodings"):
        pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int8", "keep"))


def test_a_store_of_version_1_is_found_and_served_as_it_is(source: Path, tmp_path: Path) -> None:
    new = ensure_store(source, tmp_path)
    old = new.rename(new.with_name(new.name.replace("-v2-", "-v1-")))
    make_version_1(old)
    assert ensure_store(source, tmp_path) == old
    manifest = Manifest.load(old)
    assert manifest.version == 1
    assert not spec_of(manifest).geometry.encodings
    assert pack(source, old).digest == manifest.digest  # packing again makes it one of version 2


@pytest.mark.parametrize(
    ("experts", "dense"),
    [
        ("int5", "keep"),
        ("int4,int8", "keep"),
        ("int4,last", "keep"),
        ("int4,٣=int8", "keep"),
        ("keep", "fp8"),
        ("", ""),
    ],
)
def test_an_encoding_that_there_is_not_is_refused(experts: str, dense: str) -> None:
    with pytest.raises(ConfigError, match=r"--experts|--dense"):
        WantedEncodings.parse(experts, dense)


def test_a_layer_that_there_is_not_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer 3"):
        pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int4,3=int8", "keep"))
    assert not (tmp_path / "store").exists()


# --- checkpoints that others have quantised

QUANTISED: dict[str, tuple[Quantise, dict[str, Any], str]] = {
    "fp8 in blocks": (quantised.block_fp8, ABOUT_FP8, "fp8"),
    "fp8 by rows": (quantised.row_fp8, compressed("float-quantized", num_bits=8, type="float"), "fp8"),
    "int8 by rows": (quantised.row_int8, compressed("int-quantized", num_bits=8, type="int"), "int8"),
    "int8 packed": (quantised.packed(8, 32), compressed("pack-quantized", num_bits=8, type="int"), "int8"),
    "int4 packed": (quantised.packed(4, 32), compressed("pack-quantized", num_bits=4, type="int"), "int4"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_kept_exactly(source: Path, tmp_path: Path, kind: str) -> None:
    how, about, encoding = QUANTISED[kind]
    meant = quantised.quantise(source, how, about, is_projection)
    manifest = pack(source, tmp_path / "store")
    assert {*manifest.encodings} == {encoding}
    for expert in range(6):
        for found, wanted in zip(expert_of(tmp_path / "store", 1, expert), meant_expert(meant, 1, expert), strict=True):
            np.testing.assert_array_equal(found, wanted)
    name = "model.layers.2.self_attn.o_proj.weight"
    stored = load_file(tmp_path / "store" / "dense.safetensors")[name].numpy()
    np.testing.assert_array_equal(unpack(stored, ENCODINGS[encoding], 64), meant[name].numpy())


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_reencoded_on_request(source: Path, tmp_path: Path, kind: str) -> None:
    how, about, _ = QUANTISED[kind]
    meant = quantised.quantise(source, how, about, is_projection)
    pack(source, tmp_path / "store", wanted=WantedEncodings.parse("bf16", "bf16"))
    for found, wanted in zip(expert_of(tmp_path / "store", 0, 2), meant_expert(meant, 0, 2), strict=True):
        np.testing.assert_array_equal(found, torch.from_numpy(wanted).to(torch.bfloat16).float().numpy())


def test_mxfp4_is_kept_as_transformers_reads_it(checkpoint: Make, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes seconds to import

    source = shutil.copytree(checkpoint(stacked=True, **SHAPE), tmp_path / "source")
    meant = quantised.quantise(source, quantised.mxfp4, {"quant_method": "mxfp4"}, is_expert)
    manifest = pack(source, tmp_path / "store")
    assert manifest.encodings == ("mxfp4",) * 3 + ("",)
    tensors = load_file(source / "model.safetensors")
    for part, found in zip(("gate_up_proj", "down_proj"), expert_of(tmp_path / "store", 2, 4), strict=True):
        name = f"model.layers.2.mlp.experts.{part}"
        theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
        np.testing.assert_array_equal(found, theirs[4].T.numpy())
        np.testing.assert_array_equal(found, meant[name][4].numpy())


def test_a_scale_that_is_no_number_is_refused_by_name_before_a_byte_is_written(
    checkpoint: Make, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint(stacked=True, **SHAPE), tmp_path / "source")
    quantised.quantise(source, quantised.mxfp4, {"quant_method": "mxfp4"}, is_expert)
    tensors, name = load_file(source / "model.safetensors"), "model.layers.2.mlp.experts.down_proj_scales"
    tensors[name][3, 1, 0] = 255
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has a scale that is no number"):
        pack(source, tmp_path / "store")
    assert not list((tmp_path / "store").glob("**/*.safetensors*"))


@pytest.mark.parametrize(
    ("about", "named"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq with the format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with 4 bits of version gemv"),
        ({"quant_method": "awq", "bits": 3}, "awq with 3 bits"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "the packing auto_round:exllamav2"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "the algorithm W4A8_AWQ"),
        ({"quant_method": "exl3", "bits": 4}, "exl3"),
        (compressed("marlin-24"), "marlin-24"),
        (compressed("pack-quantized", actorder="other"), "reordered in a way that is not known"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ],
)
def test_unreadable_weights_are_refused_by_name_before_a_byte_is_written(
    source: Path, tmp_path: Path, about: dict[str, Any], named: str
) -> None:
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": about}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=named):
        pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize(
    ("about", "named"),
    [
        ({"config_groups": ["x"]}, "config_groups must"),
        ({"config_groups": {"a": "x"}}, "config_groups.a must"),
        ({"config_groups": {"a": {"weights": "x"}}}, "config_groups.a.weights must"),
        ({"sparsity_config": "x"}, "sparsity_config must"),
    ],
)
def test_a_value_in_place_of_a_table_is_refused_by_name(method: str, about: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"{named} be a table, not "):
        check_method({"quantization_config": {"quant_method": method, **about}})


def test_scales_of_too_small_groups_are_refused_and_reencoded(source: Path, tmp_path: Path) -> None:
    quantised.quantise(source, quantised.packed(4, 16), compressed("pack-quantized", num_bits=4), is_expert)
    with pytest.raises(UnsupportedModel, match="--experts int8"):
        pack(source, tmp_path / "store")
    assert pack(source, tmp_path / "store", wanted=WantedEncodings.parse("int8", "keep")).encodings[:3] == ("int8",) * 3


def test_a_layer_is_the_same_however_its_number_is_written() -> None:
    wanted = WantedEncodings.parse("int4,02=int8", "keep")
    assert wanted == WantedEncodings.parse("int4,2=int8", "keep")
    assert [wanted.of_layer(layer, 4) for layer in range(4)] == ["int4", "int4", "int8", "int4"]


@pytest.mark.parametrize("end", ["first", "last"])
def test_the_only_layer_is_the_first_and_the_last(end: str) -> None:
    assert WantedEncodings.parse(f"int4,{end}=int8", "keep").of_layer(0, 1) == "int8"


def test_a_wanted_encoding_names_each_layer() -> None:
    wanted = replace(WantedEncodings.parse("int4,last=int8", "keep"))
    assert [wanted.of_layer(layer, 4) for layer in range(4)] == ["int4", "int4", "int4", "int8"]
    assert wanted.label == "int4-last-int8"
