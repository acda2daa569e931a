"""Configurations as transformers 4 and 5 write them, and refused ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.mechanisms import THETA, read_rope
from edgemoe.families.read import SLIDING
from edgemoe.families.spec import (
    AttentionHeads,
    BlockSpec,
    FeedForwardSpec,
    LayerAttention,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    TensorNames,
    dense_shapes,
)
from edgemoe.families.table import FAMILIES, REFUSED, Family
from edgemoe.model.attention import frequencies

QWEN4 = {  # Qwen3-30B-A3B, as transformers 4 wrote it
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL4 = {  # Mixtral-8x7B-v0.1
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_qwen3_30b_as_published() -> None:
    spec = spec_from_config(QWEN4)
    assert spec == ModelSpec(
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        vocab=151936,
        hidden=2048,
        dtype="bfloat16",
        context_tokens=40960,
        names=TensorNames(),
        attention=(LayerAttention(AttentionHeads(32, 4, 128, qk_norm="head"), RopeSpec(1e6, 128)),) * 48,
        router=RouterSpec(128, 8, renormalise=True),
        feed_forward=FeedForwardSpec(768, dense_width=6144),
        block=BlockSpec(1e-6),
    )
    assert spec.geometry.expert_bytes(0) == 3 * 2048 * 768 * 2
    assert spec.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2


def test_mixtral_8x7b_as_published() -> None:
    spec = spec_from_config(MIXTRAL4)
    assert spec.attention == (LayerAttention(AttentionHeads(32, 8, 128), RopeSpec(1e6, 128)),) * 32
    assert (spec.feed_forward, spec.router) == (FeedForwardSpec(14336), RouterSpec(8, 2, renormalise=True))


@pytest.mark.parametrize("config", [QWEN4, MIXTRAL4], ids=["qwen3", "mixtral"])
def test_transformers_5_spells_the_same_model_otherwise(config: dict[str, Any]) -> None:
    loaded = transformers.AutoConfig.for_model(**config)
    rewritten = loaded.to_dict() | {"architectures": config["architectures"]}
    assert "rope_parameters" in rewritten
    assert "num_local_experts" in rewritten
    assert spec_from_config(rewritten) == spec_from_config(config)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "LagunaForCausalLM", "HYV3ForCausalLM"])
def test_two_names_of_one_number_that_differ_are_refused(architecture: str) -> None:
    config = {**QWEN4, "architectures": [architecture], "num_experts": 128, "num_local_experts": 64}
    with pytest.raises(CheckpointError, match=r"num_(local_)?experts = \d+ and num_(local_)?experts = \d+ contradict"):
        spec_from_config(config)


@pytest.mark.parametrize("config", [QWEN4, MIXTRAL4], ids=["qwen3", "mixtral"])
def test_shapes_equal_transformers(config: dict[str, Any]) -> None:
    small = config | {"num_hidden_layers": 2, "vocab_size": 100}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**small))
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    spec = spec_from_config(small)
    names, geometry = spec.names.experts(1), spec.geometry
    assert theirs[names.gate_up] == (geometry.experts, *geometry.gate_up_shape)
    assert theirs[names.down] == (geometry.experts, *geometry.down_shape)
    assert dense_shapes(spec) == {name: shape for name, shape in theirs.items() if ".experts." not in name}


def test_names_of_older_checkpoints_are_known() -> None:
    mixtral = FAMILIES["MixtralForCausalLM"].names
    assert mixtral.spellings("model.layers.3.mlp.gate.weight") == (
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.block_sparse_moe.gate.weight",
    )
    assert (
        mixtral.spellings(mixtral.experts(0).separate(7)[2])[-1]
        == "model.layers.0.block_sparse_moe.experts.7.w2.weight"
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        YARN,
        YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.7},
        YARN | {"factor": 1.0},
    ],
)
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    config = QWEN4 | {"rope_scaling": rope}
    spec = spec_from_config(config)
    loaded = transformers.AutoConfig.for_model(**config)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](loaded, torch.device("cpu"))
    ours = spec.attention[0].rope
    assert ours is not None
    torch.testing.assert_close(frequencies(ours), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


def test_hunyuans_dynamic_alpha_turns_as_in_transformers() -> None:
    dynamic = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    sizes = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("hunyuan_v1_moe", rope_parameters=dynamic, **sizes)
    rope, context_tokens = read_rope(config.to_dict(), {}, head_dim=64)
    torch.testing.assert_close(frequencies(rope), HunYuanMoEV1RotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)
    assert (rope.attention_factor, context_tokens) == (1.0, config.max_position_embeddings)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Dots1ForCausalLM"])
def test_without_layer_types_windows_are_on_transformers_layers(architecture: str) -> None:
    config = {
        **QWEN4,
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].name,
        "shared_expert_intermediate_size": 64,
        "n_routed_experts": 128,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    kinds = transformers.AutoConfig.for_model(**config).layer_types
    windows = [each.heads.window for each in spec_from_config(config).attention]
    assert windows == [4096 * (kind == SLIDING) for kind in kinds]
    assert {*windows} == {0, 4096}
    with pytest.raises(UnsupportedModel, match="layer_types"):
        spec_from_config({**config, "layer_types": [["full_attention"]] * 48})


@pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES.values() if "gemma" not in each.name and not each.section],
    ids=lambda each: each.name,
)
def test_a_theta_that_is_not_said_is_that_of_transformers(family: Family) -> None:
    assert family.rope.get("theta", THETA) == CONFIG_MAPPING[family.name].default_theta


def test_yarn_extends_the_context() -> None:
    assert spec_from_config(QWEN4 | {"rope_scaling": YARN}).context_tokens == 131072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt_neox"}, "gpt_neox"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        *(({"architectures": [name]}, re.escape(REFUSED[name])) for name in REFUSED),
    ],
)
def test_unsupported_features_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_from_config(QWEN4 | change)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": -1},
        {"hidden_size": "many"},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": True},
        {"num_experts_per_tok": 129},
        {"num_key_value_heads": 5},
        {"head_dim": 63},
        {"head_dim": 65, "partial_rotary_factor": 0.5},
        {"rms_norm_eps": float("nan")},
        {"architectures": "Qwen3MoeForCausalLM"},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear"}},
        {"partial_rotary_factor": 0.01},
        {"partial_rotary_factor": 1.5},
        {"decoder_sparse_step": 100},
        {"mlp_only_layers": "all"},
        {"mlp_only_layers": [0], "intermediate_size": None},
        {"norm_topk_prob": "maybe"},
        {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}},
        {"num_experts": (1 << 15) + 1},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        spec_from_config(QWEN4 | change)


def test_two_tables_of_the_rotary_embedding_must_say_the_same() -> None:
    given = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match=r"rope_parameters = .*default.* and rope_scaling = .*yarn"):
        spec_from_config(QWEN4 | {"rope_parameters": given, "rope_scaling": YARN})
    for whole in (YARN, YARN | {"rope_theta": 1e6}):
        assert spec_from_config(QWEN4 | {"rope_parameters": whole, "rope_scaling": YARN}).context_tokens == 131072


def test_a_window_is_that_of_every_layer() -> None:
    spec = spec_from_config(QWEN4 | {"use_sliding_window": True, "sliding_window": 4096})
    assert {attention.heads.window for attention in spec.attention} == {4096}
    assert spec_from_config(QWEN4 | {"sliding_window": 4096}) == spec_from_config(QWEN4)


def test_a_window_as_long_as_the_context_changes_nothing() -> None:
    assert spec_from_config(MIXTRAL4 | {"sliding_window": 32768}) == spec_from_config(MIXTRAL4)


def test_a_window_as_long_as_the_context_was_before_yarn_extended_it_is_one() -> None:
    config = MIXTRAL4 | {"sliding_window": 32768, "rope_scaling": YARN}
    assert transformers.AutoConfig.for_model(**config).sliding_window == 32768
    spec = spec_from_config(config)
    assert ({each.heads.window for each in spec.attention}, spec.context_tokens) == ({32768}, 131072)
    assert spec_from_config({**config, "sliding_window": 131072}).attention[0].heads.window == 0


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("vocab_size", 1 << 24),
        ("hidden_size", 1 << 20),
        ("moe_intermediate_size", 1 << 22),
        ("intermediate_size", 1 << 22),
        ("shared_expert_intermediate_size", 1 << 22),
        ("max_position_embeddings", 1 << 31),
        ("num_hidden_layers", 1 << 10),
    ],
)
def test_sizes_are_bounded_so_that_no_configuration_asks_for_endless_memory(key: str, most: int) -> None:
    config = {**QWEN4, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 64}
    assert spec_from_config({**config, key: most})
    for value in (most + 2, 10**30, 10**400):
        with pytest.raises(CheckpointError, match=r"impossible|positive number"):
            spec_from_config({**config, key: value})
