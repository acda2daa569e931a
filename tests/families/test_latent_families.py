"""Published configurations of families with latent attention, and refused ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.mechanisms import LatentHeads
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
