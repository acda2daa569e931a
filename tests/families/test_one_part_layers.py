"""Nemotron-H: each layer is one part alone, and experts have no gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import tiny_checkpoint
from support.published import CONFIGURATIONS

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.store.packer import pack

PUBLISHED: dict[str, Any] = json.loads(CONFIGURATIONS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"].read_text())
LETTERS = {"M": "mamba", "E": "moe", "*": "attention"}


def test_the_published_pattern_gives_each_layer_one_part() -> None:
    spec = spec_from_config(PUBLISHED)
    kinds = {"M": "mamba", "*": "dense", "E": "none"}
    pattern = PUBLISHED["hybrid_override_pattern"]
    assert [each.heads.mechanism for each in spec.attention] == [kinds[letter] for letter in pattern]
    assert spec.expert_layers == tuple(layer for layer, letter in enumerate(pattern) if letter == "E")
    assert all(each.rope is None for each in spec.attention)
    assert spec.geometry.gate_up_shape == (1856, 2688)  # up rows alone
    assert spec.geometry.expert_bytes(0) == 2 * (2 * 1856 * 2688)


def test_listed_parts_say_the_same_as_a_pattern() -> None:
    listed = {key: value for key, value in PUBLISHED.items() if key != "hybrid_override_pattern"}
    listed["layers_block_type"] = [LETTERS[letter] for letter in PUBLISHED["hybrid_override_pattern"]]
    assert spec_from_config(listed) == spec_from_config(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hybrid_override_pattern": "ME*X"}, "'X'"),
        ({"hybrid_override_pattern": "MEME"}, "no layer is attention"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ],
    ids=str,
)
def test_a_variant_is_refused_by_name(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        spec_from_config({**PUBLISHED, **changes})


@pytest.mark.parametrize("pattern", [7, "", "M*" * 3000, "M*"], ids=["number", "empty", "long", "no experts"])
def test_an_impossible_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(CheckpointError, match=r"layers_block_type|no layer has experts"):
        spec_from_config({**PUBLISHED, "hybrid_override_pattern": pattern})


def test_published_names_are_packed_and_layers_for_more_tokens_left_out(tmp_path: Path) -> None:
    source = tiny_checkpoint("nemotron_h", tmp_path / "checkpoint")
    tensors = load_file(source / "model.safetensors")
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight" in tensors
    save_file({**tensors, "mtp.layers.0.norm.weight": torch.ones(8)}, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    letters = {"linear_attention": "M", "full_attention": "*", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    manifest = pack(source, tmp_path / "store")
    for number, layer in enumerate((1, 3, 5)):
        packed = load_file(tmp_path / "store" / manifest.layers[number].file)
        for part in ("up_proj", "down_proj"):
            name = f"backbone.layers.{layer}.mixer.experts.3.{part}.weight"
            assert torch.equal(packed[f"experts.3.{part}"], tensors[name])
    dense = load_file(tmp_path / "store" / "dense.safetensors")
    assert torch.equal(dense["model.layers.0.mamba.A_log"], tensors["backbone.layers.0.mixer.A_log"])
