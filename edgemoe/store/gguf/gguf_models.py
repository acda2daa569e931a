"""Derives config.json from a GGUF's metadata, and names its tensors for each family.

GGUF's architectures and keys are mapped to transformers' names. Constants of a family that no file states stand here,
such as qwen3moe's renormalised gates. Sources: gguf-py's constants, llama.cpp's models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.store.gguf.gguf_file import GgufModel, Value

Json = dict[str, Any]
FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
MOST_LAYERS = 1 << 12
SIGMOID_GATES = 2  # expert_gating_func


class GgufMetadata:
    """Reads values of the architecture's own section, checked."""

    def __init__(self, model: GgufModel) -> None:
        self._model, self.architecture = model, model.architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number that is not negative. Raises CheckpointError."""
        found = self.get(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise CheckpointError(f"{self._where(key)} must be a whole number, not {_shown(found)}")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a number, as short as its float32 can be written. Raises CheckpointError."""
        found = self.get(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not np.isfinite(found):
            raise CheckpointError(f"{self._where(key)} must be a number, not {_shown(found)}")
        return float(str(np.float32(found)))

    def each_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Returns a whole number for each layer, where one may be said for all. Raises CheckpointError."""
        found = self.get(key)
        if not isinstance(found, np.ndarray):
            return [self.integer(key, default)] * layers
        if len(found) < layers or found.dtype.kind not in "iub" or found[:layers].min(initial=0) < 0:
            raise CheckpointError(f"{self._where(key)} must have {layers} whole numbers, not {_shown(found)}")
        return [int(each) for each in found[:layers]]

    def get(self, key: str) -> Value | None:
        """Returns the value of a key of the architecture's section, None if it is not set."""
        return self._model.metadata.get(f"{self.architecture}.{key}")

    def has(self, tensor: str) -> bool:
        """Returns whether the file has a tensor."""
        return tensor in self._model.tensors

    def _where(self, key: str) -> str:
        return f"{self._model.files[0]}: {self.architecture}.{key}"


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]


Own = Callable[[GgufMetadata, Json], Json]  # makes the keys of one family, which replace the common ones


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture of GGUF."""

    architecture: str  # as transformers calls it
    own: Own
    turned: bool = False  # queries and keys lie pair by pair
    offset: bool = False  # one has been added to norms
    tiled: bool = False  # value heads of delta nets take turns between key heads


def config_of(model: GgufModel) -> Json:
    """Returns the config.json that says the same. Raises UnsupportedModel and CheckpointError."""
    family, meta = family_of(model), GgufMetadata(model)
    layers = meta.integer("block_count") - meta.integer("nextn_predict_layers", 0)
    if not 0 < layers <= MOST_LAYERS:
        raise CheckpointError(f"{model.files[0]}: {layers} layers are impossible")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{model.files[0]}: the matrix token_embd.weight is missing; is this a language model?")
    config: Json = {
        "architectures": [family.architecture],
        "dtype": _dtype(model),
        "vocab_size": embedding.shape[0],
        "hidden_size": meta.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": meta.each_layer("attention.head_count", layers)[0],
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.real("rope.freq_base", 1e4),
        "tie_word_embeddings": not meta.has("output.weight"),
        "num_experts": meta.integer("expert_count", 0),
        "num_experts_per_tok": meta.integer("expert_used_count", 0),
    }
    if not config["num_experts"]:
        what = f"a dense {model.architecture}: it has no experts, and edgemoe serves Mixture-of-Experts models"
        raise UnsupportedModel(f"{model.files[0]} is {what}")
    config["num_key_value_heads"] = max(
        meta.each_layer("attention.head_count_kv", layers, config["num_attention_heads"])
    )
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = model.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int):
            config[f"{name}_token_id"] = token
    for name, key in (
        ("head_dim", "attention.key_length"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("intermediate_size", "feed_forward_length"),
    ):
        if meta.get(key) is not None:
            config[name] = max(meta.each_layer(key, layers))
    return {**config, **_scaling(meta, config), **family.own(meta, config)}


def family_of(model: GgufModel) -> GgufFamily:
    """Returns the family of a file. Raises UnsupportedModel."""
    family = GGUF_FAMILIES.get(model.architecture)
    if family is None:
        have = ", ".join(sorted(GGUF_FAMILIES))
        called = model.architecture[:80] or "no architecture that it names"
        raise UnsupportedModel(f"{model.files[0]} is a GGUF of {called}, which cannot be read; supported are {have}")
    return family


def _dtype(model: GgufModel) -> str:
    matrices = {tensor.dtype for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices == {"F32"} else "bfloat16"


def _scaling(meta: GgufMetadata, config: Mapping[str, Any]) -> Json:
    """Returns how rotary embedding is stretched."""
    kind = meta.get("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rotary embedding stretched by {_shown(kind)} is not supported; linear and yarn are")
    scaling: Json = {"rope_type": kind, "factor": meta.real("rope.scaling.factor")}
    if kind == "yarn":
        context = config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length", context)
        for name in ("beta_fast", "beta_slow"):
            if meta.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = meta.real(f"rope.scaling.yarn_{name}")
        if meta.get("rope.scaling.yarn_log_multiplier") is not None:  # DeepSeek's mscale_all_dim, a tenth of it
            spread = round(10 * meta.real("rope.scaling.yarn_log_multiplier"), 6)
            scaling |= {"mscale": spread, "mscale_all_dim": spread}
    return {"rope_scaling": scaling}


def _dense_layers(meta: GgufMetadata, config: Mapping[str, Any]) -> list[int]:
    """Returns the layers that have one dense network in place of experts."""
    return [n for n in range(config["num_hidden_layers"]) if not meta.has(f"blk.{n}.ffn_down_exps.weight")]


def _rotary_share(meta: GgufMetadata, config: Mapping[str, Any]) -> float:
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return meta.integer("rope.dimension_count", width) / max(1, width)


def _mixtral(meta: GgufMetadata, config: Json) -> Json:
    return {"num_local_experts": config["num_experts"], "sliding_window": None}


def _olmoe(meta: GgufMetadata, config: Json) -> Json:
    clip = meta.real("attention.clamp_kqv", 0.0)
    return {"norm_topk_prob": False, **({"clip_qkv": clip} if clip else {})}


def _qwen(renormalise: bool) -> Own:
    def own(meta: GgufMetadata, config: Json) -> Json:
        shared = meta.integer("expert_shared_feed_forward_length", 0)
        return {
            "norm_topk_prob": renormalise,
            "mlp_only_layers": _dense_layers(meta, config),
            **({"shared_expert_intermediate_size": shared} if shared else {}),
            **({"use_sliding_window": False} if not renormalise else {}),
        }

    return own


def _delta(meta: GgufMetadata, config: Json) -> Json:
    layers, heads = config["num_hidden_layers"], meta.integer("ssm.time_step_rank")
    every = meta.integer("full_attention_interval", 4) or 4
    is_linear = [(n + 1) % every != 0 for n in range(layers)]
    if meta.get("attention.recurrent_layers") is not None:
        is_linear = [bool(each) for each in meta.each_layer("attention.recurrent_layers", layers)]
    return {
        **_qwen(renormalise=True)(meta, config),
        "layer_types": [LINEAR if each else FULL for each in is_linear],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": meta.integer("ssm.group_count"),
        "linear_key_head_dim": meta.integer("ssm.state_size"),
        "linear_value_head_dim": meta.integer("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": meta.integer("ssm.conv_kernel"),
        "partial_rotary_factor": _rotary_share(meta, config),
    }


def _gemma(meta: GgufMetadata, config: Json) -> Json:
    layers = config["num_hidden_layers"]
    slides = meta.each_layer("attention.sliding_window_pattern", layers)
    kv_heads = meta.each_layer("attention.head_count_kv", layers)
    full = [n for n in range(layers) if not slides[n]]
    for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        if meta.integer(key, 0):
            raise UnsupportedModel(f"gemma4 with {key} = {meta.integer(key)} is not supported")
    wide = meta.integer("attention.key_length")
    soft_cap = meta.real("final_logit_softcapping", 0.0)
    return {
        "top_k_experts": config["num_experts_per_tok"],
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": soft_cap or None,
        "head_dim": meta.integer("attention.key_length_swa", wide),
        "global_head_dim": wide,
        "num_key_value_heads": max((kv_heads[n] for n in range(layers) if slides[n]), default=max(kv_heads)),
        "num_global_key_value_heads": max((kv_heads[n] for n in full), default=max(kv_heads)),
        "attention_k_eq_v": bool(full) and not any(meta.has(f"blk.{n}.attn_v.weight") for n in full),
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": [SLIDING if each else FULL for each in slides],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": meta.real("rope.freq_base_swa", 1e4)},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": config["rope_theta"]},
        },
    }


def _gpt_oss(meta: GgufMetadata, config: Json) -> Json:
    scaling = _scaling(meta, config).get("rope_scaling", {})
    return {
        "num_local_experts": config["num_experts"],
        "intermediate_size": config.get("moe_intermediate_size") or config.get("intermediate_size"),
        "sliding_window": meta.integer("attention.sliding_window", 0) or None,
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        **({"rope_scaling": {**scaling, "truncate": False}} if scaling else {}),
    }


def _shared(meta: GgufMetadata, config: Json) -> Json:
    """Returns the keys of families with DeepSeek's router and shared experts."""
    return {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": meta.integer("expert_shared_count", 0),
        "first_k_dense_replace": len(_dense_layers(meta, config)),
        "routed_scaling_factor": meta.real("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(meta.get("expert_weights_norm")),
        "n_group": meta.integer("expert_group_count", 1) or 1,
        "topk_group": meta.integer("expert_group_used_count", 1) or 1,
    }


def _is_sigmoid(meta: GgufMetadata, config: Mapping[str, Any]) -> bool:
    gates = meta.get("expert_gating_func")
    if gates is not None:
        return gates == SIGMOID_GATES
    return any(meta.has(f"blk.{n}.exp_probs_b.bias") for n in range(config["num_hidden_layers"]))


def _deepseek(meta: GgufMetadata, config: Json) -> Json:
    turning = meta.integer("rope.dimension_count")
    key = meta.integer("attention.key_length_mla", 0) or meta.integer("attention.key_length")
    value = meta.integer("attention.value_length_mla", 0) or meta.integer("attention.value_length")
    own = {
        **_shared(meta, config),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": meta.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": key - turning,
        "v_head_dim": value,
        "head_dim": turning,
    }
    if _is_sigmoid(meta, config):
        return {**own, "scoring_func": "sigmoid"}
    method = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
    return {**own, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _glm(meta: GgufMetadata, config: Json) -> Json:
    last = config["num_hidden_layers"] - 1
    return {
        **_shared(meta, config),
        "partial_rotary_factor": _rotary_share(meta, config),
        "use_qk_norm": meta.has(f"blk.{last}.attn_q_norm.weight"),
        "attention_bias": meta.has(f"blk.{last}.attn_q.bias"),
    }


def _minimax(meta: GgufMetadata, config: Json) -> Json:
    return {
        "num_local_experts": config["num_experts"],
        "intermediate_size": config.get("moe_intermediate_size") or config.get("intermediate_size"),
        "rotary_dim": meta.integer("rope.dimension_count"),
    }


def _granite(meta: GgufMetadata, config: Json) -> Json:
    return {
        "num_local_experts": config["num_experts"],
        "attention_multiplier": meta.real("attention.scale", 1.0),
        "embedding_multiplier": meta.real("embedding_scale", 1.0),
        "residual_multiplier": meta.real("residual_scale", 1.0),
        "logits_scaling": meta.real("logit_scale", 1.0),
    }


def _hunyuan(meta: GgufMetadata, config: Json) -> Json:
    width = config["moe_intermediate_size"]
    shared = meta.integer("expert_shared_feed_forward_length", 0)
    return {
        "moe_topk": config["num_experts_per_tok"],
        "intermediate_size": width,
        "num_shared_expert": shared // max(1, width),
        "use_qk_norm": True,
    }


def _ernie(meta: GgufMetadata, config: Json) -> Json:
    return {
        "moe_num_experts": config["num_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": meta.integer("expert_shared_count", 0),
        "moe_layer_start_index": meta.integer("leading_dense_block_count", 0),
        "moe_layer_interval": meta.integer("interleave_moe_layer_step", 1),
    }


def _lfm2(meta: GgufMetadata, config: Json) -> Json:
    layers = config["num_hidden_layers"]
    kv_heads = meta.each_layer("attention.head_count_kv", layers)
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": [FULL if each else CONV for each in kv_heads],
        "conv_L_cache": meta.integer("shortconv.l_cache", 3),
        "num_dense_layers": len(_dense_layers(meta, config)),
        "use_expert_bias": any(meta.has(f"blk.{n}.exp_probs_b.bias") for n in range(layers)),
        "routed_scaling_factor": meta.real("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": True,
    }


def _nemotron(meta: GgufMetadata, config: Json) -> Json:
    layers, heads = config["num_hidden_layers"], meta.integer("ssm.time_step_rank")
    marks = {"ssm_in": LINEAR, "attn_q": FULL, "ffn_down_exps": "moe"}  # tensors of a kind of layer
    return {
        **_shared(meta, config),
        "layers_block_type": [
            next((kind for mark, kind in marks.items() if meta.has(f"blk.{n}.{mark}.weight")), "mlp")
            for n in range(layers)
        ],
        "layer_norm_epsilon": meta.real(
            "attention.layer_norm_rms_epsilon", meta.real("attention.layer_norm_epsilon", 1e-5)
        ),
        "moe_shared_expert_intermediate_size": meta.integer("expert_shared_feed_forward_length", 0),
        "moe_latent_size": meta.integer("moe_latent_size", 0),
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.integer("ssm.inner_size") // max(1, heads),
        "ssm_state_size": meta.integer("ssm.state_size"),
        "n_groups": meta.integer("ssm.group_count"),
        "conv_kernel": meta.integer("ssm.conv_kernel"),
        "use_conv_bias": any(meta.has(f"blk.{n}.ssm_conv1d.bias") for n in range(layers)),
        "use_bias": any(meta.has(f"blk.{n}.ssm_in.bias") for n in range(layers)),
    }


GGUF_FAMILIES: dict[str, GgufFamily] = {  # general.architecture -> family
    "llama": GgufFamily("MixtralForCausalLM", _mixtral, turned=True),
    "olmoe": GgufFamily("OlmoeForCausalLM", _olmoe),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", _qwen(renormalise=False)),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _qwen(renormalise=True)),
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", _delta, offset=True),
    "qwen35moe": GgufFamily("Qwen3_5MoeForCausalLM", _delta, offset=True, tiled=True),
    "gemma4": GgufFamily("Gemma4ForCausalLM", _gemma),
    "gpt-oss": GgufFamily("GptOssForCausalLM", _gpt_oss),
    "deepseek2": GgufFamily("DeepseekV3ForCausalLM", _deepseek),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", _glm),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", _minimax),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", _granite, turned=True),
    "dots1": GgufFamily("Dots1ForCausalLM", _shared),
    "hunyuan-moe": GgufFamily("HunYuanMoEV1ForCausalLM", _hunyuan),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", _ernie),
    "lfm2moe": GgufFamily("Lfm2MoeForCausalLM", _lfm2),
    "nemotron_h_moe": GgufFamily("NemotronHForCausalLM", _nemotron, turned=True),
}
