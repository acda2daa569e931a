"""Tiny random checkpoints as transformers writes them, and parts of stores, for tests that read real files.

`from checkpoints import tiny_checkpoint` works in every test folder: pytest puts `tests/` on the path.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

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
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 20, "sliding_window": None},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 20, "head_dim": 12, "norm_topk_prob": True},
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> transformers.PreTrainedModel:
    """A random model of `family` ("mixtral" | "qwen3_moe") in evaluation mode; `overrides` go into its config."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILY_SIZES[family], **overrides})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


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
    """The same store, but only the `present` experts [L, E] are listed in it."""
    shutil.copytree(store, directory, copy_function=os.link)
    (directory / "manifest.json").unlink()
    manifest = Manifest.load(store)
    layers = tuple(
        msgspec.structs.replace(layer, experts=tuple(e for e in layer.experts if present[n, e.expert]))
        for n, layer in enumerate(manifest.layers)
    )
    msgspec.structs.replace(manifest, layers=layers).save(directory)
    return directory
