"""GGUF's blocks in affine rows have the weights that the library of the format's authors decodes, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.gguf_files import gguf_checkpoint, write_gguf
from support.gguf_quants import random_blocks

from edgemoe.encodings.codec import unpack
from edgemoe.store.gguf.gguf_values import BLOCK_TYPES, affine_rows
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import spec_of
from edgemoe.store.packer import pack
from edgemoe.types.encoding import pair_of

MIX = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q6_K"}  # of half of the layers in Q4_K_M


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_keep_their_weights(kind: str) -> None:
    rows = random_blocks(kind, 9, 5)
    wanted = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    for encoding in BLOCK_TYPES[kind].encodings:
        kept = affine_rows(rows, kind, encoding)
        np.testing.assert_array_equal(unpack(kept, encoding, wanted.shape[1]), wanted)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_rows_take_about_the_bytes_of_blocks(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert BLOCK_TYPES[kind].block_bytes == size
    columns = 10 * block
    assert BLOCK_TYPES[kind].encodings[0].row_bytes(columns) <= 1.03 * columns / block * size


def _kind(name: str) -> str:
    if name.startswith("blk.1.") and "down" in name:
        return "Q4_K"
    return next((kind for part, kind in MIX.items() if part in name), "F32")


def test_each_matrix_of_a_mixed_recipe_keeps_its_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 3, "num_experts": 3}
    checkpoint = gguf_checkpoint("qwen3_moe", tmp_path / "hf", 300, **sizes)
    path = write_gguf("qwen3_moe", checkpoint, tmp_path / "m.gguf", _kind)
    manifest = pack(path, tmp_path / "store")
    assert [layer.encoding for layer in manifest.layers] == ["q4_k+q6_k", "q4_k", "q4_k+q6_k"]
    assert spec_of(manifest).geometry.encoding_name(0) == "q4_k+q6_k"
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for number, layer in enumerate(manifest.layers):
        gate_up, down = pair_of(layer.encoding)
        held = load_file(tmp_path / "store" / layer.file)
        for expert in range(3):
            wanted = {
                part: gguf.dequantize(tensor.data[expert], tensor.tensor_type)
                for part in ("gate", "up", "down")
                for tensor in [tensors[f"blk.{number}.ffn_{part}_exps.weight"]]
            }
            found = unpack(held[f"experts.{expert}.gate_up_proj"], gate_up, 256)
            np.testing.assert_array_equal(found, np.concatenate([wanted["gate"], wanted["up"]]))
            np.testing.assert_array_equal(unpack(held[f"experts.{expert}.down_proj"], down, 512), wanted["down"])


def test_a_mix_is_asked_for_by_two_names() -> None:
    wanted = WantedEncodings.parse("q4_k+q6_k,last=q6_k", "f32")
    assert (wanted.of_layer(0, 4), wanted.of_layer(3, 4), wanted.dense) == ("q4_k+q6_k", "q6_k", "float32")
    assert wanted.label == "q4_k+q6_k-last-q6_k-dense-float32"
