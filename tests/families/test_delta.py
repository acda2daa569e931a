"""Configurations of gated delta nets, and the refused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import GATED_DELTA, SIZES, tiny_checkpoint

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.families.state_mechanisms import DeltaHeads
from edgemoe.store.packer import pack


def spec_of(**changes: Any) -> ModelSpec:
    return spec_from_config({"architectures": ["Qwen3NextForCausalLM"], **SIZES, **GATED_DELTA, **changes})


def test_a_state_is_a_tail_and_a_matrix_for_each_head_in_each_delta_layer() -> None:
    spec = spec_of()
    channels = 2 * 2 * 16 + 4 * 12
    assert spec.state_layers == (0, 2)
    assert spec.state_bytes == 2 * 4 * (3 * channels + 4 * 16 * 12)
    assert [row.key_bytes > 0 for row in spec.kv_layout.rows] == [False, True, False]


def test_every_fourth_layer_is_attention_where_nothing_is_said() -> None:
    spec = spec_of(layer_types=None, num_hidden_layers=8)
    assert [isinstance(each.heads, DeltaHeads) for each in spec.attention] == [True, True, True, False] * 2
    often = spec_of(layer_types=None, num_hidden_layers=8, full_attention_interval=2)
    assert often.state_layers == (0, 2, 4, 6)


def test_sizes_that_a_configuration_leaves_out_are_those_of_transformers() -> None:
    usual = transformers.Qwen3NextConfig()
    keys = [key for key in usual.to_dict() if key.startswith("linear_")]
    assert len(keys) == 5
    assert spec_of(**dict.fromkeys(keys)) == spec_of(**{key: getattr(usual, key) for key in keys})


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"layer_types": ["linear_attention"] * 3}, UnsupportedModel, "no full_attention"),
        ({"layer_types": ["full_attention", "mamba", "full_attention"]}, UnsupportedModel, "'mamba'"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "must name 3 layers"),
        ({"layer_types": 3}, CheckpointError, "must name 3 layers"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim = 1"),
        ({"linear_conv_kernel_dim": 65}, CheckpointError, "linear_conv_kernel_dim = 65"),
        ({"linear_num_key_heads": 3}, CheckpointError, "must be a multiple"),
        ({"linear_value_head_dim": 1 << 33}, CheckpointError, "states of more than"),
    ],
)
def test_impossible_configurations_are_refused_by_name(
    changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        spec_of(**changes)


def test_layers_for_predicting_several_tokens_are_skipped_and_others_are_not(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3_next", tmp_path / "checkpoint")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    some = tensors["model.norm.weight"].clone()
    save_file({**tensors, "mtp.norm.weight": some}, file, {"format": "pt"})
    pack(checkpoint, tmp_path / "store")
    save_file({**tensors, "model.other.weight": some}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.other\.weight"):
        pack(checkpoint, tmp_path / "other")
