"""Checkpoints under publishers' names give the same store as transformers' own, and parts of other models stay out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import tiny_checkpoint
from support.tiny_models import FAMILIES, SIZES

from edgemoe.errors import UnsupportedModel
from edgemoe.store.packer import pack

Tensors = dict[str, torch.Tensor]


def published_qwen(tensors: Tensors) -> Tensors:
    """Turns the stacks of experts, as Qwen3-VL-MoE is published."""
    return {
        name: each.transpose(1, 2).contiguous() if ".mlp.experts." in name else each for name, each in tensors.items()
    }


def published_kimi(tensors: Tensors) -> Tensors:
    """Names the decoder's layers as Kimi-K2.5 is published."""
    return {name.replace("model.blocks.", "model.layers."): each for name, each in tensors.items()}


@pytest.mark.parametrize(("family", "published"), [("qwen3_vl_moe", published_qwen), ("kimi_k25", published_kimi)])
def test_published_checkpoints_pack_to_the_same_experts(
    family: str, published: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(0)
    checkpoint = tmp_path / "checkpoint"
    model_class(config_class(**{**SIZES, **own, "num_hidden_layers": 2})).save_pretrained(checkpoint)
    ours = pack(checkpoint, tmp_path / "ours")
    file = checkpoint / "model.safetensors"
    before = load_file(file)
    after = published(before)
    assert any(name not in before or after[name].shape != before[name].shape for name in after)
    save_file(after, file, {"format": "pt"})
    theirs = pack(checkpoint, tmp_path / "theirs")
    found, wanted = ([entry.xxh3_128 for layer in store.layers for entry in layer.experts] for store in (theirs, ours))
    assert found == wanted


@pytest.mark.parametrize(
    ("stated", "extra", "taken"),
    [
        (2, ("3.norm.weight", "4.norm.weight"), True),
        (1, ("3.norm.weight", "4.norm.weight"), False),
        (0, ("3.enorm.weight", "3.norm.weight", "7.eh_proj.weight", "7.norm.weight"), True),
        (0, ("3.norm.weight",), False),
    ],
)
def test_layers_for_predicting_tokens_are_left_out_by_their_count_or_their_tensors(
    stated: int, extra: tuple[str, ...], taken: bool, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", num_nextn_predict_layers=stated)
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    added = {f"model.layers.{name}": torch.ones(4) for name in extra}
    save_file({**tensors, **added, "model.mtp_block.0.norm.weight": torch.ones(4)}, file, {"format": "pt"})
    if taken:
        pack(checkpoint, tmp_path / "store")
        return
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.\d\.norm"):
        pack(checkpoint, tmp_path / "store")
