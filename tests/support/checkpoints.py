"""Tiny random checkpoints as transformers writes them, and parts of stores, for tests that read real files.

`from checkpoints import tiny_checkpoint` works in every test folder: pytest puts `tests/` on the path.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors.torch import save_file

from edgemoe.store.manifest import Manifest
from edgemoe.types.arrays import BoolArray

transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 16,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
    "head_dim": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "intermediate_size": 40,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 20, "sliding_window": None},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 20, "head_dim": 12, "norm_topk_prob": True},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "q_lora_rank": 12, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 12},
    "gpt_oss": {"num_local_experts": 6, "intermediate_size": 32, "head_dim": 12, "sliding_window": 20},
    "gemma4_text": {
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "enable_moe_block": True,
        "intermediate_size": 24,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "head_dim": 12,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_next": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA,
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 16,
        "moe_intermediate_size": 20,
        "intermediate_size": 24,
        "num_dense_layers": 0,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 16,
        "intermediate_size": 20,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 16,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
        "n_routed_experts": 16,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-9,
    },
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """Makes a random model of `family`, of FAMILY_SIZES, in evaluation mode; `overrides` go into its config."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILY_SIZES[family], **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "sinks", "layer_scalar", "router.scale", "expert_scale")):  # all alike at first
            tensor.data += 0.1 * torch.randn_like(tensor)
    return model


def tiny_checkpoint(
    family: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    stacked: bool = False,
    sharded: bool = False,
    *,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Saves `tiny_model(...)` to `directory` and returns it.

    `stacked` writes one tensor for all experts of a layer (transformers 5), else one per expert and projection;
    `sharded` writes several files with an index.
    """
    model = tiny_model(family, dtype, seed=seed, **overrides)
    shard_size = "40KB" if sharded else "10GB"
    model.save_pretrained(directory, max_shard_size=shard_size, save_original_format=not stacked)
    return directory


def partial_store(store: Path, directory: Path, present: BoolArray) -> Path:
    """Links a store into `directory`; its manifest lists only the `present` experts [L, E]."""
    shutil.copytree(store, directory, copy_function=os.link)
    (directory / "manifest.json").unlink()
    manifest = Manifest.load(store)
    layers = tuple(
        msgspec.structs.replace(layer, experts=tuple(e for e in layer.experts if present[n, e.expert]))
        for n, layer in enumerate(manifest.layers)
    )
    msgspec.structs.replace(manifest, layers=layers).save(directory)
    return directory


def mxfp4_checkpoint(directory: Path) -> transformers.PreTrainedModel:
    """Saves a random gpt-oss as it is published, with experts in MXFP4; returns the model of the same weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes seconds to import

    model = tiny_model("gpt_oss")
    generator, state = torch.Generator().manual_seed(5), model.state_dict()
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(layer.mlp.experts, name)  # [E, columns, rows]
            experts, columns, rows = stack.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
            stack.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            full = next(key for key, value in state.items() if value.data_ptr() == stack.data_ptr())
            del state[full]
            state |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _save(
        directory, {**_config(model), "architectures": ["GptOssForCausalLM"], "quantization_config": quantized}, state
    )
    return model


def gemma_that_sees(directory: Path) -> Path:
    """Saves `tiny_model("gemma4_text")` as it is published: within a model that takes images, too."""
    model = tiny_model("gemma4_text")
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in model.state_dict().items()}
    del state["lm_head.weight"]
    eyes = {"model.vision_tower.patch_embedder.weight": torch.ones(3), "model.embed_vision.weight": torch.ones(3)}
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "float32"}
    _save(directory, {**config, "text_config": _config(model), "vision_config": {"hidden_size": 3}}, {**state, **eyes})
    return directory


def _config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return {**json.loads(model.config.to_json_string(use_diff=False)), "dtype": "float32"}


def _save(directory: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
