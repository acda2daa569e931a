"""Writes tiny GGUF files of every family, by the library of the format's authors.

Names come from gguf's own tables. The conversion of weights follows llama.cpp's converters; a slow test compares the
result with theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from support.gguf_quants import quantised
from support.tiny_models import FAMILIES, SIZES

Floats = NDArray[np.float32]
ARCHITECTURES = {
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "granitemoe": "granitemoe",
    "dots1": "dots1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "lfm2_moe": "lfm2moe",
    "nemotron_h": "nemotron_h_moe",
}
NEVER: dict[str, dict[str, Any]] = {  # settings that no GGUF of the architecture can hold
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"]},  # no dense layers
    "qwen2_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},  # alpha goes into the base
}


def gguf_checkpoint(family: str, folder: Path, vocab: int, **sizes: Any) -> Path:
    """Saves a tiny random model of a family, each expert by itself, with a tokenizer of `vocab` tokens or fewer."""
    config_class, model_class, own = FAMILIES[family]
    config = config_class(
        **{**SIZES, **own, "vocab_size": vocab, "max_position_embeddings": 1024, **NEVER.get(family, {}), **sizes}
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks", "layer_scalar", "router.scale", "expert_scale")):  # all alike at first
            tensor.data += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder, save_original_format=True)
    return folder


def write_gguf(family: str, checkpoint: Path, path: Path, kind: str | Callable[[str], str] = "F32") -> Path:
    """Writes a checkpoint as one GGUF file whose experts are of `kind`; all else is float32.

    A function tells the type of each matrix by its name in the file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, family, config)
    _tokens(writer, checkpoint, config)
    table = gguf.get_tensor_name_map(_number_of(architecture), config["num_hidden_layers"])
    for name, weights in _tensors(family, config, load_file(checkpoint / "model.safetensors")):
        called = name if name.startswith("blk.") or name == "rope_freqs.weight" else _named(table, name)
        own = kind if isinstance(kind, str) else kind(called)
        is_chosen = re.search(r"ffn_\w+_exps\.weight", called) or not isinstance(kind, str)
        value_type = gguf.GGMLQuantizationType[own if is_chosen and weights.ndim > 1 else "F32"]
        block = gguf.GGML_QUANT_SIZES[value_type][0]
        if value_type.name == "F32" or weights.shape[-1] % block:
            writer.add_tensor(called, np.ascontiguousarray(weights, np.float32))
        else:
            rows = quantised(np.ascontiguousarray(weights, np.float32), value_type.name)
            writer.add_tensor(called, rows, raw_dtype=value_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _number_of(architecture: str) -> gguf.MODEL_ARCH:
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _named(table: gguf.TensorNameMap, name: str) -> str:
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    experts = next(
        config[key]
        for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if key in config
    )
    chosen = config.get("num_experts_per_tok")
    if family == "gemma4_text":
        chosen = config["top_k_experts"]
    if family in ("ernie4_5_moe", "hunyuan_v1_moe"):
        chosen = config["moe_k" if family == "ernie4_5_moe" else "moe_topk"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    eps = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    writer.add_layer_norm_rms_eps(next(config[key] for key in eps if config.get(key)))
    writer.add_rope_freq_base(full.get("rope_theta", 1e4))
    writer.add_expert_count(experts)
    writer.add_expert_used_count(chosen)
    writer.add_expert_feed_forward_length(width)
    if config.get("head_dim") and family != "granitemoe":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    _OWN.get(family, lambda *_: None)(writer, config)


def _delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_array(
        f"{writer.arch}.attention.recurrent_layers", [each == "linear_attention" for each in config["layer_types"]]
    )
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def _gemma(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    wide = _wide(config)
    own = config.get("per_layer_config") or {}
    narrow = config.get("num_global_key_value_heads") or own[str(slides.index(False))]["num_key_value_heads"]
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_head_count_kv([config["num_key_value_heads"] if each else narrow for each in slides])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _wide(config: dict[str, Any]) -> int:
    """Returns the elements of a head in the layers of Gemma that see everything."""
    own = config.get("per_layer_config") or {}
    width: int = config.get("global_head_dim") or own[str(config["layer_types"].index("full_attention"))]["head_dim"]
    return width


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _shared(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace") or 0)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config["norm_topk_prob"]))
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _shared(writer, config)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _glm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _shared(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _ernie(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def _lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    is_full = [each == "full_attention" for each in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] if each else 0 for each in is_full])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds = config["layers_block_type"]
    _shared(writer, config)
    writer.add_feed_forward_length([config["moe_intermediate_size"] if each == "moe" else 0 for each in kinds])
    writer.add_head_count_kv([config["num_key_value_heads"] if each == "full_attention" else 0 for each in kinds])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])


_OWN: dict[str, Any] = {
    "nemotron_h": _nemotron,
    "olmoe": lambda writer, config: writer.add_clamp_kqv(config["clip_qkv"]) if config["clip_qkv"] else None,
    "qwen2_moe": lambda writer, config: writer.add_expert_shared_feed_forward_length(
        config["shared_expert_intermediate_size"]
    ),
    "qwen3_next": _delta,
    "qwen3_5_moe_text": _delta,
    "gemma4_text": _gemma,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _latent,
    "glm4_moe": _glm,
    "minimax_m2": lambda writer, config: writer.add_rope_dimension_count(config["rotary_dim"]),
    "granitemoe": _granite,
    "dots1": _shared,
    "hunyuan_v1_moe": lambda writer, config: writer.add_expert_shared_feed_forward_length(config["intermediate_size"]),
    "ernie4_5_moe": _ernie,
    "lfm2_moe": _lfm2,
}


def _tokens(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    file = checkpoint / "tokenizer.json"
    vocab: dict[str, int] = json.loads(file.read_text())["model"]["vocab"] if file.is_file() else {}
    added = {each["content"]: each["id"] for each in json.loads(file.read_text())["added_tokens"]} if vocab else {}
    by_id = {number: token for token, number in {**vocab, **added}.items()}
    names = [by_id.get(number, f"[PAD{number}]") for number in range(config["vocab_size"])]
    kinds = [3 if name in added else 1 if number in by_id else 5 for number, name in enumerate(names)]
    merges = json.loads(file.read_text())["model"]["merges"] if vocab else []
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    template = checkpoint / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def _tensors(family: str, config: dict[str, Any], state: dict[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """Yields tensors under transformers' names, or GGUF's own, changed as the converter of the family does."""
    state = dict(state)
    yield from _experts(state)
    if family == "gemma4_text":
        half = _wide(config) // 2
        yield "rope_freqs.weight", np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32)
    for name, weights in state.items():
        layer = re.match(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name)
        base, part = (f"blk.{layer[1]}", layer[2]) if layer else ("", name)
        if family in ("mixtral", "granitemoe", "nemotron_h") and part.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            weights = weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        if family in ("qwen3_next", "qwen3_5_moe_text"):
            yield from _of_delta(family, config, base, part, name, weights)
        elif part.endswith("kv_b_proj.weight"):
            plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
            parts = weights.reshape(-1, plain + value, weights.shape[1])
            yield f"{base}.attn_k_b.weight", parts[:, :plain].swapaxes(1, 2)
            yield f"{base}.attn_v_b.weight", parts[:, plain:]
        elif part in ("router.scale", "router.per_expert_scale"):
            yield f"{base}.{'ffn_gate_inp' if part == 'router.scale' else 'ffn_down_exps'}.scale", weights
        elif part.endswith("conv.conv.weight") or part == "mixer.conv1d.weight":
            yield name, weights[:, 0]
        elif part in ("mixer.A_log", "mixer.D"):
            yield f"{base}.ssm_{'a' if part == 'mixer.A_log' else 'd'}", _of_mamba(part, weights)
        elif part == "mixer.dt_bias":
            yield f"{base}.ssm_dt.bias", weights
        elif part == "mixer.norm.weight":
            yield name, weights.reshape(config["n_groups"], -1)
        elif part.endswith(("sinks", "layer_scalar")):
            yield f"{name}.weight", weights
        elif part.endswith(("e_score_correction_bias", "expert_bias")):
            yield f"{base}.exp_probs_b.bias", weights
        else:
            yield name, weights


def _of_mamba(part: str, weights: Floats) -> Floats:
    return (-np.exp(weights) if part == "mixer.A_log" else weights).reshape(-1, 1)


def _of_delta(
    family: str, config: dict[str, Any], base: str, part: str, name: str, weights: Floats
) -> Iterator[tuple[str, Floats]]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each = values // keys

    def dealt(weights: Floats, dim: int) -> Floats:
        if family == "qwen3_next":
            return weights
        return weights.reshape(keys, each, dim, *weights.shape[1:]).swapaxes(0, 1).reshape(weights.shape)

    if part.endswith("A_log"):
        yield f"{base}.ssm_a", -np.exp(dealt(weights, 1))
    elif part.endswith("dt_bias"):
        yield f"{base}.ssm_dt.bias", dealt(weights, 1)
    elif part.endswith("conv1d.weight"):
        rows = weights[:, 0]
        held = 2 * keys * key_dim
        yield f"{base}.ssm_conv1d.weight", np.concatenate([rows[:held], dealt(rows[held:], value_dim)])
    elif part.endswith("in_proj_qkvz.weight"):
        cuts = np.cumsum([key_dim, key_dim, each * value_dim])
        parts = np.split(weights.reshape(keys, -1, weights.shape[1]), cuts, axis=1)
        q, k, v, z = (part.reshape(-1, weights.shape[1]) for part in parts)
        yield f"{base}.attn_qkv.weight", np.concatenate([q, k, v])
        yield f"{base}.attn_gate.weight", z
    elif part.endswith("in_proj_qkv.weight"):
        held = 2 * keys * key_dim
        yield f"{base}.attn_qkv.weight", np.concatenate([weights[:held], dealt(weights[held:], value_dim)])
    elif part.endswith("in_proj_z.weight"):
        yield f"{base}.attn_gate.weight", dealt(weights, value_dim)
    elif part.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        yield f"{base}.ssm_{'alpha' if '_a.' in part else 'beta'}.weight", dealt(weights, 1)
    elif part.endswith("linear_attn.out_proj.weight"):
        yield f"{base}.ssm_out.weight", dealt(weights.T, value_dim).T
    elif part.endswith("norm.weight") and "linear_attn" not in part:
        yield name, weights + np.float32(1)
    else:
        yield name, weights


def _experts(state: dict[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """Takes experts out of the tensors and yields them as stacks."""
    found: dict[tuple[str, str], dict[int, Floats]] = {}
    ours = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for name in list(state):
        one = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", name)
        stack = re.fullmatch(
            r"model\.layers\.(\d+)\.(mlp\.experts\.|experts\.|block_sparse_moe\.)(\w+?)(_bias|\.weight)?", name
        )
        if one and one[3] in ours:
            found.setdefault((one[1], ours[one[3]]), {})[int(one[2])] = state.pop(name)
        elif stack and stack[3] in ("gate_up_proj", "down_proj", "input_linear", "output_linear"):
            yield from _stack(stack[1], stack[3], stack[4] == "_bias", state.pop(name), name)
    for (layer, part), experts in found.items():
        yield f"blk.{layer}.ffn_{part}_exps.weight", np.stack([experts[number] for number in sorted(experts)])


def _stack(layer: str, part: str, is_bias: bool, weights: Floats, name: str) -> Iterator[tuple[str, Floats]]:
    ending = "bias" if is_bias else "weight"
    of_gpt_oss = ".mlp.experts." in name  # whose stacks are turned, gate and up taking turns
    if of_gpt_oss and not is_bias:
        weights = weights.swapaxes(1, 2)
    if part in ("down_proj", "output_linear"):
        yield f"blk.{layer}.ffn_down_exps.{ending}", weights
    elif part == "gate_up_proj" and not of_gpt_oss:
        yield f"blk.{layer}.ffn_gate_up_exps.{ending}", weights
    else:
        half = weights.shape[1] // 2
        gate, up = (weights[:, ::2], weights[:, 1::2]) if of_gpt_oss else (weights[:, :half], weights[:, half:])
        yield f"blk.{layer}.ffn_gate_exps.{ending}", gate
        yield f"blk.{layer}.ffn_up_exps.{ending}", up
