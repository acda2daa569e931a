"""Configurations of gpt-oss and Gemma 4, as published and as transformers 5 writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.mechanisms import root_of_hidden
from edgemoe.families.read import FULL, SLIDING
from edgemoe.families.spec import LayerInputs, dense_shapes, row_tables
from edgemoe.store.layout import precision
from edgemoe.store.pieces import expert_recipes
from edgemoe.types.experts import Activation

GPT_OSS: dict[str, Any] = {  # openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
}


def _gemma(**changes: Any) -> dict[str, Any]:
    return {**GEMMA, "text_config": {**GEMMA["text_config"], **changes}}


def test_gpt_oss_has_windows_sinks_and_biases() -> None:
    spec = spec_from_config(GPT_OSS)
    assert [each.heads.window for each in spec.attention[:4]] == [128, 0, 128, 0]
    assert all(each.heads.sinks and each.heads.qkv_bias and each.heads.o_bias for each in spec.attention)
    assert spec.geometry.activation == Activation("clamped_swiglu", 1.702, 7.0)
    assert spec.geometry.bias_bytes == 4 * 3 * 2880
    assert spec.context_tokens == 131072
    unsaid = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert spec_from_config(unsaid).attention == spec.attention


@pytest.mark.parametrize("within", ["float32", "float16"])
def test_the_type_that_is_said_for_the_whole_model_is_that_of_the_text_model(within: str) -> None:
    assert spec_from_config(_gemma(dtype=within)).dtype == "bfloat16"
    assert precision(_gemma(dtype=within)) == "bfloat16"


def test_the_type_that_the_text_model_alone_says_is_its_type() -> None:
    assert precision({**_gemma(dtype="float32"), "dtype": None}) == "float32"


def test_experts_of_gpt_oss_are_turned_and_their_rows_sorted() -> None:
    spec = spec_from_config(GPT_OSS)
    recipe = list(expert_recipes(spec, 3, lambda _: True))[7]
    gate, up = recipe.gate_up
    assert (gate.source, gate.shape, gate.index) == ("model.layers.3.mlp.experts.gate_up_proj", (32, 2880, 5760), (7,))
    assert gate.transposed
    assert (gate.rows, up.rows) == (range(0, 5760, 2), range(1, 5760, 2))
    assert recipe.down[0].transposed
    assert [part.source.rsplit(".", 1)[1] for part in recipe.biases] == ["gate_up_proj_bias"] * 2 + ["down_proj_bias"]
    assert [part.count for part in recipe.biases] == [2880, 2880, 2880]


def test_layers_of_gemma_differ_in_heads_windows_and_rotary_embedding() -> None:
    spec = spec_from_config(GEMMA)
    sliding, full = spec.attention[0], spec.attention[5]
    assert [each is full or each == full for each in spec.attention] == [n % 6 == 5 for n in range(30)]
    assert (sliding.heads.kv_count, sliding.heads.dim, sliding.heads.window) == (8, 256, 1024)
    assert (full.heads.kv_count, full.heads.dim, full.heads.window) == (2, 512, 0)
    assert full.heads.v_is_k
    assert not sliding.heads.v_is_k
    assert full.rope is not None
    assert (full.rope.kind, full.rope.share, full.rope.dims) == ("proportional", 0.25, 512)
    assert spec.block.embedding == 53.0  # the root of 2816 as a bfloat16
    shapes = dense_shapes(spec)
    assert shapes["model.layers.5.self_attn.k_proj.weight"] == (1024, 2816)
    assert "model.layers.5.self_attn.v_proj.weight" not in shapes
    assert shapes["model.layers.4.self_attn.v_proj.weight"] == (2048, 2816)
    rows = spec.kv_layout.rows
    assert (rows[0].kv_heads, rows[0].key_width, rows[5].kv_heads, rows[5].key_width) == (8, 256, 2, 512)


def test_gemma_is_read_the_same_as_transformers_5_writes_it() -> None:
    text = json.loads(transformers.Gemma4TextConfig(**GEMMA["text_config"]).to_json_string())
    written = {**text, "architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    assert "per_layer_config" in written
    ours, theirs = spec_from_config(GEMMA), spec_from_config(written)
    assert theirs.attention == ours.attention
    assert (theirs.router, theirs.feed_forward, theirs.block) == (ours.router, ours.feed_forward, ours.block)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_moe_block", False),
        ("num_kv_shared_layers", 4),
        ("use_bidirectional_attention", "all"),
        ("hidden_activation", "relu"),
    ],
)
def test_other_gemmas_are_refused_by_their_features(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        spec_from_config(_gemma(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["full_attention"] * 29),
        ("layer_types", ["full_attention"] * 29 + ["linear_attention"]),
        ("layer_types", ["full_attention"] * 29 + ["sliding_attention"]),
        ("layer_types", 7),
        ("rope_parameters", {"rope_theta": 1e4}),
        ("per_layer_config", ["full_attention"]),
        ("per_layer_config", {"5": 512}),
        ("per_layer_config", {"5": {"head_dim": -1}}),
        ("global_head_dim", 0),
        ("hidden_size_per_layer_input", -1),
        ("hidden_size_per_layer_input", 1 << 20),
        ("hidden_size_per_layer_input", "256"),
    ],
)
def test_nonsense_of_gemma_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="head_dim" if value == {"5": {"head_dim": -1}} else key):
        spec_from_config(_gemma(**{key: value}))


def test_per_layer_embeddings_of_gemma_are_a_table_of_rows() -> None:
    spec = spec_from_config(_gemma(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144))
    assert spec.layer_inputs == LayerInputs(262144, 256, 16.0)
    assert row_tables(spec) == {"model.embed_tokens_per_layer.weight": (262144, spec.layers * 256)}
    assert "model.embed_tokens_per_layer.weight" not in dense_shapes(spec)
    assert row_tables(spec_from_config(_gemma())) == {}
    for tokens in (None, 0, spec.vocab - 1, 1 << 25):
        with pytest.raises(CheckpointError, match="vocab_size_per_layer_input"):
            spec_from_config(_gemma(hidden_size_per_layer_input=256, vocab_size_per_layer_input=tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_factor_of_gemmas_embedding_is_rounded_as_torch_rounds(dtype: str) -> None:
    for hidden in range(64, 8192, 64):
        rounded = torch.tensor(hidden**0.5, dtype=torch.float64).to(torch.float32).to(getattr(torch, dtype))
        found = root_of_hidden({"hidden_size": hidden, "dtype": dtype})
        assert (rounded.item() if dtype == "bfloat16" else hidden**0.5) == found, hidden


@pytest.mark.parametrize("tokens", [32768, 131072])
@pytest.mark.parametrize("config", [GPT_OSS, GEMMA], ids=["gpt_oss", "gemma"])
def test_layers_with_windows_keep_little_more_than_these(config: dict[str, Any], tokens: int) -> None:
    spec = spec_from_config(config)
    needed = 0
    for each in spec.attention:
        seen = min(tokens, each.heads.window or tokens)
        needed += seen * 2 * spec.dtype_bytes * each.heads.kv_count * each.heads.dim
    held = spec.kv_layout.held_bytes(tokens)
    assert needed < held < 1.05 * needed
