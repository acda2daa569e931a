"""Published configurations of families with latent attention, and refused ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.mechanisms import LatentHeads, planned_tokens
from edgemoe.families.spec import KVRow, RouterSpec, dense_shapes

V2_LITE = {  # DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = V2_LITE | {  # DeepSeek-V3
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},  # type: ignore[operator]
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


SMALL_4 = {  # the decoder of Mistral-Small-4, as its converter writes it
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "model_type": "mistral4",
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 131072,
}
WITH_IMAGES = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "mistral3",
    "text_config": SMALL_4,
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}


@pytest.mark.parametrize("config", [WITH_IMAGES, {**SMALL_4, "architectures": ["Mistral4ForCausalLM"]}])
def test_mistral_small_4_as_published(config: dict[str, Any]) -> None:
    spec = spec_from_config(config)
    heads, rope = spec.attention[0].heads, spec.attention[0].rope
    assert isinstance(heads, LatentHeads)
    assert (heads.growth, heads.growth_tokens, planned_tokens(spec), spec.chosen) == (0.1, 8192, 8192, 0)
    assert rope is not None
    assert (rope.dims, rope.attention_factor, spec.context_tokens) == (64, 1.0, 1 << 20)
    assert spec.router == RouterSpec(128, 4, renormalise=True, least_mass=1e-20, group_score="top2")
    each = math.prod(spec.geometry.gate_up_shape) + math.prod(spec.geometry.down_shape)
    dense = sum(math.prod(shape) for shape in dense_shapes(spec).values())
    assert (dense + spec.geometry.count * each) / 1e9 == pytest.approx(119, abs=0.5)


def test_a_dense_mistral_with_images_is_refused_as_dense() -> None:
    dense = {name: each for name, each in SMALL_4.items() if "expert" not in name} | {"model_type": "mistral"}
    with pytest.raises(UnsupportedModel, match="Mistral3ForConditionalGeneration is a dense model"):
        spec_from_config(WITH_IMAGES | {"text_config": dense})


def test_queries_that_would_grow_are_refused_where_the_architecture_has_no_such_factor() -> None:
    for config in (V2_LITE, V3):
        rope = config["rope_scaling"] | {"llama_4_scaling_beta": 0.1}  # type: ignore[operator]
        with pytest.raises(UnsupportedModel, match=r"llama_4_scaling_beta = 0\.1 is not read"):
            spec_from_config(config | {"rope_scaling": rope})


def test_queries_without_a_factor_of_the_position_do_not_grow() -> None:
    plain = {name: each for name, each in SMALL_4["rope_parameters"].items() if name != "llama_4_scaling_beta"}  # type: ignore[attr-defined]
    spec = spec_from_config(SMALL_4 | {"rope_parameters": plain})
    assert planned_tokens(spec) == 0


def test_deepseek_v2_lite_as_published() -> None:
    spec = spec_from_config(V2_LITE)
    heads = spec.attention[0].heads
    assert isinstance(heads, LatentHeads)
    assert (heads.count, heads.query_rank, heads.rank, heads.key, heads.dim, heads.value) == (16, 0, 512, 192, 64, 128)
    assert heads.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert spec.router == RouterSpec(64, 6, float32=True)
    assert spec.expert_layers == tuple(range(1, 27))
    assert (spec.feed_forward.dense_width, spec.feed_forward.shared_width) == (10944, 2816)
    assert spec.kv_layout.rows[1] == KVRow(1, 576, 512, "bfloat16", values_in_keys=True, offset=16 * 576 * 2)
    assert spec.kv_bytes_per_token == 27 * 576 * 2


def test_deepseek_v3_as_published() -> None:
    spec = spec_from_config(V3)
    assert spec.router == RouterSpec(
        256,
        8,
        score="sigmoid",
        float32=True,
        selection_bias=True,
        renormalise=True,
        least_mass=1e-20,
        scale=2.5,
        groups=8,
        top_groups=4,
        group_score="top2",
    )
    assert spec.geometry.layers == 58
    assert spec.context_tokens == 163840


def test_groups_of_deepseek_v2_count_where_its_method_says_so() -> None:
    grouped = V2_LITE | {"n_group": 8, "topk_group": 3}
    assert spec_from_config(grouped).router.groups == 1
    router = spec_from_config(grouped | {"topk_method": "group_limited_greedy"}).router
    assert (router.groups, router.top_groups, router.group_score) == (8, 3, "max")


def test_layers_of_glm_flash_are_dense_as_its_list_or_its_count_says() -> None:
    flash = V3 | {"architectures": ["Glm4MoeLiteForCausalLM"], "num_hidden_layers": 4}
    assert spec_from_config(flash | {"first_k_dense_replace": None}).feed_forward.dense_layers == {0}
    assert spec_from_config(flash | {"first_k_dense_replace": 2}).feed_forward.dense_layers == {0, 1}
    listed = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    assert spec_from_config(flash | listed).feed_forward.dense_layers == {0, 2}
    for types in (["dense"], [["dense"], ["sparse"], "dense", "sparse"]):
        with pytest.raises(CheckpointError, match="mlp_layer_types"):
            spec_from_config(flash | {"mlp_layer_types": types})


@pytest.mark.parametrize("config", [V2_LITE, V3], ids=["v2-lite", "v3"])
def test_shapes_equal_transformers(config: dict[str, Any]) -> None:
    small = config | {"num_hidden_layers": 4, "vocab_size": 64}
    theirs = transformers.AutoConfig.for_model(**small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dense_shapes(spec_from_config(small)) == {n: s for n, s in found.items() if ".mlp.experts." not in n}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"v_head_dim": 256}, "v_head_dim"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ],
)
def test_unsupported_features_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_from_config(V2_LITE | change)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": 511},
        {"kv_lora_rank": 1 << 15},
        {"qk_nope_head_dim": None},
        {"rope_scaling": [1]},
        {"rope_scaling": "yarn"},
        {"n_group": 256, "topk_group": 8},  # groups are chosen by their two best experts
        {"n_group": 64, "topk_group": 1},  # groups of four experts each, though eight experts are needed
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        spec_from_config(V3 | change)


def test_without_shared_experts_in_the_configuration_there_are_none() -> None:
    spec = spec_from_config({key: value for key, value in V2_LITE.items() if key != "n_shared_experts"})
    assert spec.feed_forward.shared_width == 0
