"""Checkpoints in fp8 whose stacks of experts have one scale for each expert, as Mistral-Small-4 is published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from store.test_encodings import expert_of
from support.quantised import Tensors, quantise
from support.tiny_models import FAMILIES, SIZES, Lazy

from edgemoe.errors import CheckpointError
from edgemoe.store.packer import pack

LIMIT = 448.0
ABOUT = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}
EXPERTS = "model.language_model.layers.1.mlp.experts"


def one_scale(name: str, weight: torch.Tensor, stored: Tensors) -> torch.Tensor:
    """Scales a matrix, or each matrix of a stack, as a whole. Has scales of activations, too."""
    stack = weight.ndim == 3
    scales = weight.abs().amax((1, 2) if stack else (0, 1), keepdim=stack) / LIMIT
    codes = (weight / scales).to(torch.float8_e4m3fn)
    stored[name], stored[f"{name}_scale_inv"] = codes, scales
    stored[f"{name}_activation_scale" if stack else f"{name.removesuffix('weight')}activation_scale"] = torch.ones(())
    return codes.float() * scales


def is_quantised(name: str) -> bool:
    return "language_model" in name and name.removesuffix(".weight").endswith("_proj")


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Tensors]:
    """A tiny model with images, under its publisher's names, and the weights that it stands for."""
    config_class, _, own = FAMILIES["mistral4"]
    text = config_class(**{**SIZES, **own, "num_hidden_layers": 2})
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = Lazy("PixtralVisionConfig")(**sizes, image_size=32, patch_size=16)
    whole = Lazy("Mistral3Config")(text_config=text, vision_config=vision, image_token_id=10, tie_word_embeddings=False)
    torch.manual_seed(0)
    checkpoint = tmp_path / "checkpoint"
    Lazy("Mistral3ForConditionalGeneration")(whole).save_pretrained(checkpoint)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for saved, theirs in (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")):
        tensors = {name.replace(saved, theirs): each for name, each in tensors.items()}
    save_file(tensors, file)
    return checkpoint, quantise(checkpoint, one_scale, ABOUT, is_quantised)


def test_codes_are_kept_and_every_expert_has_its_scale(published: tuple[Path, Tensors], tmp_path: Path) -> None:
    checkpoint, meant = published
    manifest = pack(checkpoint, tmp_path / "store")
    assert manifest.layers[0].encoding == "fp8"
    stacks = meant[f"{EXPERTS}.gate_up_proj"], meant[f"{EXPERTS}.down_proj"]
    for expert in range(len(stacks[0])):
        for found, wanted in zip(expert_of(tmp_path / "store", 0, expert), stacks, strict=True):
            np.testing.assert_array_equal(found, wanted[expert].numpy())
    dense = load_file(tmp_path / "store/dense.safetensors")["model.layers.0.self_attn.q_b_proj.weight"]
    theirs = meant["model.language_model.layers.0.self_attn.q_b_proj.weight"]
    torch.testing.assert_close(dense.float(), theirs.to(dense.dtype).float(), rtol=2.0**-7, atol=1e-6)


def test_scales_of_another_number_of_experts_are_refused(published: tuple[Path, Tensors], tmp_path: Path) -> None:
    file = published[0] / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{EXPERTS}.down_proj_scale_inv"] = tensors[f"{EXPERTS}.down_proj_scale_inv"][:-1].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="down_proj_scale_inv of shape"):
        pack(published[0], tmp_path / "store")
