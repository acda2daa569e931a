"""Tiny random checkpoints of all families, and a way to run them all resident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.store.manifest import DENSE, spec_of
from edgemoe.store.packer import pack
from edgemoe.store.row_table import open_row_table
from edgemoe.types.experts import SILU, Activation
from edgemoe.types.step import BLOCK_TOKENS, Batch, StateUse, first_kept


class Lazy:
    """A class of transformers, imported for its first object. Importing the classes of all families takes seconds."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(transformers, self.__name__)(*arguments, **options)


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 80,
    "routed_scaling_factor": 1.5,
}
INDEXER: dict[str, Any] = {
    "q_lora_rank": 24,
    "index_topk": 24,
    "index_n_heads": 16,  # with few heads many scores are 0, and transformers breaks ties at random
    "index_head_dim": 12,
}
GROWING: dict[str, Any] = {  # queries grow with the position, each 24 tokens
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 64.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    "partial_rotary_factor": 8 / 28,
}
GATED_DELTA: dict[str, Any] = {
    "initializer_range": 0.08,  # from .2 on transformers' own chunks and single steps differ by more than 1e-4
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "head_dim": 32,
}
GLM_ROUTER: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "intermediate_size": 72,
    "routed_scaling_factor": 1.5,
    "head_dim": 32,
    "n_group": 4,
    "topk_group": 2,
}
WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 20,
    "num_experts": 8,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "intermediate_size": 72,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}


def _with_vision(config: Callable[..., Any], vision: dict[str, Any] = VISION, **own: Any) -> Callable[..., Any]:
    """Returns a maker of configurations of a model with vision, whose decoder's are a section."""
    return lambda **text: config(text_config=text, vision_config=vision, **own)


FAMILIES: dict[str, tuple[Callable[..., Any], Lazy, dict[str, Any]]] = {
    "qwen3_moe": (
        Lazy("Qwen3MoeConfig"),
        Lazy("Qwen3MoeForCausalLM"),
        {"num_experts": 8, "moe_intermediate_size": 48, "head_dim": 32, "norm_topk_prob": True},
    ),
    "mixtral": (
        Lazy("MixtralConfig"),
        Lazy("MixtralForCausalLM"),
        {"num_local_experts": 6, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "deepseek_v2": (
        Lazy("DeepseekV2Config"),
        Lazy("DeepseekV2ForCausalLM"),
        {
            **LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": (
        Lazy("DeepseekV3Config"),
        Lazy("DeepseekV3ForCausalLM"),
        {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe_lite": (
        Lazy("Glm4MoeLiteConfig"),
        Lazy("Glm4MoeLiteForCausalLM"),
        {**LATENT, "q_lora_rank": 24, "v_head_dim": 28},
    ),
    "deepseek_v32": (
        Lazy("DeepseekV32Config"),
        Lazy("DeepseekV32ForCausalLM"),
        {**LATENT, **INDEXER, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ),
    "glm_moe_dsa": (
        Lazy("GlmMoeDsaConfig"),
        Lazy("GlmMoeDsaForCausalLM"),
        {**LATENT, **INDEXER, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "gpt_oss": (
        Lazy("GptOssConfig"),
        Lazy("GptOssForCausalLM"),
        {"num_local_experts": 6, "intermediate_size": 48, "head_dim": 16, "sliding_window": 20},
    ),
    "gemma4_text": (
        Lazy("Gemma4TextConfig"),
        Lazy("Gemma4ForCausalLM"),
        {
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "intermediate_size": 40,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_next": (Lazy("Qwen3NextConfig"), Lazy("Qwen3NextForCausalLM"), GATED_DELTA),
    "qwen3_5_moe_text": (Lazy("Qwen3_5MoeTextConfig"), Lazy("Qwen3_5MoeForCausalLM"), GATED_DELTA),
    "qwen3_5_moe": (
        _with_vision(Lazy("Qwen3_5MoeConfig")),
        Lazy("Qwen3_5MoeForConditionalGeneration"),
        GATED_DELTA,
    ),
    "olmoe": (
        Lazy("OlmoeConfig"),
        Lazy("OlmoeForCausalLM"),
        {"num_experts": 8, "intermediate_size": 48, "clip_qkv": 0.5},
    ),
    "qwen2_moe": (
        Lazy("Qwen2MoeConfig"),
        Lazy("Qwen2MoeForCausalLM"),
        {
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "sliding_window": 24,
            "intermediate_size": 72,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "glm4_moe": (
        Lazy("Glm4MoeConfig"),
        Lazy("Glm4MoeForCausalLM"),
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "intermediate_size": 72,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "head_dim": 32,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "minimax_m2": (
        Lazy("MiniMaxM2Config"),
        Lazy("MiniMaxM2ForCausalLM"),
        {"num_local_experts": 8, "intermediate_size": 48, "head_dim": 32, "rotary_dim": 16},
    ),
    "granitemoe": (
        Lazy("GraniteMoeConfig"),
        Lazy("GraniteMoeForCausalLM"),
        {
            "num_local_experts": 8,
            "intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
        },
    ),
    "dots1": (
        Lazy("Dots1Config"),
        Lazy("Dots1ForCausalLM"),
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "intermediate_size": 72,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "hunyuan_v1_moe": (
        Lazy("HunYuanMoEV1Config"),
        Lazy("HunYuanMoEV1ForCausalLM"),
        {
            "num_experts": 8,
            "intermediate_size": 48,
            "head_dim": 16,
            "moe_topk": 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0},
        },
    ),
    "ernie4_5_moe": (
        Lazy("Ernie4_5_MoeConfig"),
        Lazy("Ernie4_5_MoeForCausalLM"),
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48, "intermediate_size": 72},
    ),
    "qwen3_vl_moe": (
        _with_vision(Lazy("Qwen3VLMoeConfig"), {**VISION, "deepstack_visual_indexes": []}),
        Lazy("Qwen3VLMoeForConditionalGeneration"),
        {
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "head_dim": 32,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4]},
        },
    ),
    "glm4v_moe": (
        _with_vision(Lazy("Glm4vMoeConfig")),
        Lazy("Glm4vMoeForConditionalGeneration"),
        {
            **GLM_ROUTER,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "solar_open": (Lazy("SolarOpenConfig"), Lazy("SolarOpenForCausalLM"), GLM_ROUTER),
    "kimi_k25": (
        _with_vision(
            Lazy("Kimi_K25Config"),
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            tie_word_embeddings=False,
        ),
        Lazy("Kimi_K25ForConditionalGeneration"),
        {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ),
    "granitemoeshared": (
        Lazy("GraniteMoeSharedConfig"),
        Lazy("GraniteMoeSharedForCausalLM"),
        {"num_local_experts": 8, "intermediate_size": 48, "shared_intermediate_size": 40, "attention_multiplier": 0.2},
    ),
    "flex_olmo": (
        Lazy("FlexOlmoConfig"),
        Lazy("FlexOlmoForCausalLM"),
        {"num_experts": 8, "intermediate_size": 48, "pad_token_id": None},
    ),
    "hy_v3": (
        Lazy("HYV3Config"),
        Lazy("HYV3ForCausalLM"),
        {"num_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 72, "head_dim": 32},
    ),
    "exaone_moe": (Lazy("ExaoneMoeConfig"), Lazy("ExaoneMoeForCausalLM"), WINDOWED),
    "mellum": (Lazy("MellumConfig"), Lazy("MellumForCausalLM"), WINDOWED),
    "laguna": (
        Lazy("LagunaConfig"),
        Lazy("LagunaForCausalLM"),
        {
            **WINDOWED,
            "num_attention_heads_per_layer": [4, 2, 6],
            "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 3.0,
        },
    ),
    "afmoe": (
        Lazy("AfmoeConfig"),
        Lazy("AfmoeForCausalLM"),
        {**WINDOWED, "mup_enabled": True, "route_scale": 2.0},
    ),
    "granitemoe_swa": (
        Lazy("GraniteMoeSWAConfig"),
        Lazy("GraniteMoeSWAForCausalLM"),
        {
            "num_local_experts": 8,
            "intermediate_size": 48,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.2,
            "sliding_window": 20,
            "layer_rope_theta": [0, 1e4, 5e4],
        },
    ),
    "lfm2_moe": (
        Lazy("Lfm2MoeConfig"),
        Lazy("Lfm2MoeForCausalLM"),
        {
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "intermediate_size": 72,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "pad_token_id": None,
        },
    ),
    "granitemoehybrid": (
        Lazy("GraniteMoeHybridConfig"),
        Lazy("GraniteMoeHybridForCausalLM"),
        {
            "initializer_range": 0.08,
            "num_local_experts": 8,
            "intermediate_size": 48,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_head": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron_h": (
        Lazy("NemotronHConfig"),
        Lazy("NemotronHForCausalLM"),
        {
            "initializer_range": 0.08,
            "layers_block_type": ["linear_attention", "moe", "mlp", "full_attention", "moe", "linear_attention"],
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 32,
            "intermediate_size": 72,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_min": 1e-9,  # which bounds transformers' prompts, and not its single steps
        },
    ),
    "cohere2_moe": (
        Lazy("Cohere2MoeConfig"),
        Lazy("Cohere2MoeForCausalLM"),
        {
            **WINDOWED,
            "intermediate_size": 48,
            "num_shared_experts": 1,
            "logit_scale": 0.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 72,
        },
    ),
    "mistral4": (
        Lazy("Mistral4Config"),
        Lazy("Mistral4ForCausalLM"),
        {**LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "rope_parameters": GROWING},
    ),
}
GRAPHED = tuple(family for family in FAMILIES if family not in ("deepseek_v32", "glm_moe_dsa"))  # on GPUs
IN_ONE_PLAN: dict[str, dict[str, Any]] = {  # sizes with which all steps of short tests run as plans
    "deepseek_v32": {"index_topk": 128},
    "glm_moe_dsa": {"index_topk": 128},
    "mistral4": {"rope_parameters": {**GROWING, "original_max_position_embeddings": 128}},
}
DISTINCT = (  # one family of each kind of layer: the gate's tests that are dear run these
    *("qwen3_moe", "olmoe", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_5_moe", "glm4_moe", "minimax_m2"),
    *("afmoe", "lfm2_moe", "granitemoehybrid", "cohere2_moe", "nemotron_h", "glm_moe_dsa"),
)


class ResidentExperts:
    """The definition, slowly: every expert in memory, token by token in float32 or more."""

    lookahead, places, slots = range(0), None, None

    def __init__(self, store: Path, activation: Activation = SILU) -> None:
        self._activation = activation
        self._layers = [load_file(file) for file in sorted((store / "experts").iterdir())]
        self.hints: list[tuple[int, torch.Tensor]] = []
        self.ids: list[torch.Tensor] = []

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, out = self._layers[layer], torch.zeros(hidden.shape, dtype=torch.float32)
        self.ids.append(ids.clone())
        for expert in ids.unique().tolist():
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            parts = ("gate_up" if self._activation.inputs == 2 else "up", "down")
            gate_up, down = (experts[f"experts.{expert}.{part}_proj"].float() for part in parts)
            first, last = experts.get(f"experts.{expert}.biases", torch.zeros(len(gate_up) + len(down))).split(
                [len(gate_up), len(down)]
            )
            products = (hidden[tokens].float() @ gate_up.T + first).chunk(self._activation.inputs, dim=-1)
            output = self._activated(*products) @ down.T + last
            out.index_add_(0, tokens, output * weights[tokens, places, None])
        return out

    def _activated(self, *products: torch.Tensor) -> torch.Tensor:
        """Applies the activation by its definition."""
        kind, alpha, limit = self._activation
        if kind == "relu2":
            return products[0].clamp(min=0) ** 2
        gate, up = products
        if kind == "gelu_tanh":
            return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
        if kind == "clamped_swiglu":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * gate / (1 + torch.exp(-alpha * gate))
        return gate / (1 + torch.exp(-gate)) * up

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        raise AssertionError("these experts have no slots")

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        self.hints.append((layer, probs))


@dataclass
class Tiny:
    """A random checkpoint: the oracle, and our decoder of it."""

    model: Any  # transformers'
    spec: ModelSpec
    decoder: Decoder
    experts: ResidentExperts
    store: Path

    @torch.inference_mode()
    def reference(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits of all positions, [T, V]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.float()

    def greedy(self, prompt: list[int], chosen: list[int]) -> list[int]:
        """Returns transformers' choice after the prompt and after each of the `chosen` tokens but the last.

        The choices equal `chosen` if and only if transformers' greedy continuation does, and cost it one step.
        """
        return self.reference([*prompt, *chosen[:-1]])[len(prompt) - 1 :].argmax(1).tolist()


def load_tiny(model: Any, checkpoint: Path, store: Path, kernels: dict[bool, Kernels] | None) -> Tiny:
    """Packs a checkpoint and loads it."""
    spec = spec_of(pack(checkpoint, store))
    table = open_row_table(spec, store, cache_bytes=1)
    decoder = Decoder.load(spec, store / DENSE, kernels=kernels and kernels[spec.dtype == "bfloat16"], table=table)
    return Tiny(model, spec, decoder, ResidentExperts(store, spec.feed_forward.activation), store)


class Session:
    """Sequences that grow step by step, over a cache whose blocks are dealt out in no particular order."""

    def __init__(self, tiny: Tiny, sequences: int = 1, blocks: int = 64) -> None:
        self._tiny, self.kv, self.device = tiny, KVCache.of(tiny.spec, blocks, 4 * sequences + 2), "cpu"
        self._windows: list[list[int]] = [[] for _ in range(sequences)]
        self._free_windows = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(1)).add(1).tolist()
        self._slots = [0] * sequences
        self._free_slots = list(range(1, 4 * sequences + 2)) if tiny.spec.state_layers else []
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: list[list[int]] = [[] for _ in range(sequences)]
        self._lengths = [0] * sequences

    def step(self, *chunks: list[int], rows: list[int] | None = None) -> torch.Tensor:
        """Appends a chunk to each sequence (none where empty); logits of all new tokens, or of `rows`."""
        positions: list[int] = []
        for s, chunk in enumerate(chunks):
            positions += range(self._lengths[s], self._lengths[s] + len(chunk))
            self._lengths[s] += len(chunk)
            while len(self._tables[s]) * BLOCK_TOKENS < self._lengths[s]:
                self._tables[s].append(self._free.pop())
                self._windows[s].append(self._free_windows.pop())
        present = [s for s, chunk in enumerate(chunks) if chunk]
        batch = Batch(
            tokens=torch.tensor([token for chunk in chunks for token in chunk], device=self.device),
            positions=torch.tensor(positions, device=self.device),
            query_lens=[len(chunks[s]) for s in present],
            context_lens=[self._lengths[s] for s in present],
            block_tables=[self._tables[s] for s in present],
            logit_rows=torch.tensor(
                range(len(positions)) if rows is None else rows, dtype=torch.int64, device=self.device
            ),
            decode=all(len(chunks[s]) == 1 for s in present),
            states=[self._next_state(s, len(chunks[s])) for s in present if self._free_slots],
            window_tables=[list(self._windows[s]) for s in present if self.kv.windows is not None],
        )
        logits = self._tiny.decoder.forward(batch, self.kv, self._tiny.experts)
        self._forget_passed(present)
        return logits

    def _forget_passed(self, present: list[int]) -> None:
        """Gives the blocks that no window reaches any more to others; the block of zeros stands for them."""
        window = self._tiny.spec.kv_layout.window
        for s in present if window else ():
            for place in range(first_kept(self._lengths[s], window)):
                if block := self._windows[s][place]:
                    self._free_windows.append(block)
                    self._windows[s][place] = 0

    def _next_state(self, s: int, tokens: int) -> StateUse:
        """Moves a sequence's state to another slot; slots come round in turn."""
        use = StateUse(self._slots[s], [(tokens, self._free_slots.pop(0))])
        if use.read:
            self._free_slots.append(use.read)
        self._slots[s] = use.writes[0][1]
        return use
