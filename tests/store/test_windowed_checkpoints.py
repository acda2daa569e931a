"""Checkpoints of gpt-oss and Gemma 4 as they are published: parts in other words, another order and other types."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from support.checkpoints import gemma_that_sees, mxfp4_checkpoint, tiny_checkpoint

from edgemoe.encodings.codec import unpack
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import spec_of
from edgemoe.store.packer import pack
from edgemoe.types.encoding import MXFP4


def test_a_gemma_that_takes_images_has_the_weights_of_its_text_model(tmp_path: Path) -> None:
    plain = tiny_checkpoint("gemma4_text", tmp_path / "plain", stacked=True)
    stores = tmp_path / "a", tmp_path / "b"
    sources = plain, gemma_that_sees(tmp_path / "hf")
    specs = [spec_of(pack(source, store)) for source, store in zip(sources, stores, strict=True)]
    assert specs[0].attention == specs[1].attention
    for one in sorted(stores[0].rglob("*.safetensors")):
        ours, theirs = load_file(one), load_file(stores[1] / one.relative_to(stores[0]))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_store_in_another_type_than_its_text_model_s_is_read_as_packed(tmp_path: Path) -> None:
    source = gemma_that_sees(tmp_path / "hf")  # says float32, twice
    manifest = pack(source, tmp_path / "store", wanted=WantedEncodings(experts="bfloat16", dense="bfloat16"))
    assert spec_of(manifest).dtype == manifest.dtype == "bfloat16"


def test_mxfp4_is_kept_to_the_bit_with_gate_before_up(tmp_path: Path) -> None:
    model = mxfp4_checkpoint(tmp_path / "hf")
    pack(tmp_path / "hf", tmp_path / "store")
    for number, file in enumerate(sorted((tmp_path / "store" / "experts").iterdir())):
        stored, experts = load_file(file), model.model.layers[number].mlp.experts
        for expert in range(6):
            gate_up, down = (stored[f"experts.{expert}.{part}_proj"].numpy() for part in ("gate_up", "down"))
            both, last = experts.gate_up_proj[expert].T, experts.down_proj[expert].T
            assert torch.equal(torch.from_numpy(unpack(gate_up, MXFP4, 32)), torch.cat([both[::2], both[1::2]]))
            assert torch.equal(torch.from_numpy(unpack(down, MXFP4, 32)), last)
            first, second = experts.gate_up_proj_bias[expert], experts.down_proj_bias[expert]
            assert torch.equal(stored[f"experts.{expert}.biases"], torch.cat([first[::2], first[1::2], second]))
