"""Decodes one shape in every kind of layer, each family beside the plain one in interleaved rounds.

    python -m tools.bench.families [--families qwen3_next,glm4_moe] [--experts keep,int4] [--dense int8]

`per_byte` is the family's time for each byte of weights and states that its step moves, relative to the plain family's.
`own_ms` is the compute thread's own CPU time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from statistics import median
from typing import Any

from edgemoe.jit.env import WORKER_ENV

os.environ.update(WORKER_ENV)  # before anything loads torch

import torch

from edgemoe.cli.plan.measure import ResidentModel, random_decoder, resident_tiers, with_encodings
from edgemoe.experts.build import ExpertTiers
from edgemoe.families.config import spec_from_config
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.store.layout import ENCODING_NAMES, KEEP
from edgemoe.types.experts import ExpertGeometry

PLAIN = "qwen3_moe"
CONTEXT, PAUSE_S = 64, 0.03  # tokens in the cache before timing starts; between contenders
SHAPE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "dtype": "bfloat16",
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 64),
}
DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 512,
}
GROUPED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4}
LATENT = {
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 16,
}
KINDS = ["sliding_attention", "full_attention"] * 8
# The architecture and the settings of one family for each kind of layer; the other families decode as one of these.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", DELTA),
    "glm4_moe": ("Glm4MoeForCausalLM", {**GROUPED, "use_qk_norm": True}),
    "gpt_oss": ("GptOssForCausalLM", {"intermediate_size": 512, "sliding_window": 128}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**GROUPED, **LATENT}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "top_k_experts": 8,
            "intermediate_size": 512,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "global_head_dim": 64,
            "num_global_key_value_heads": 4,
            "layer_types": KINDS,
            "sliding_window": 128,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": dict.fromkeys(KINDS[:2], SHAPE["rope_parameters"]),
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "intermediate_size": 512,
            "shared_intermediate_size": 512,
            "attention_multiplier": 0.125,
            "layer_types": (["mamba"] * 3 + ["attention"]) * 4,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {"num_dense_layers": 1, "layer_types": (["conv"] * 3 + ["full_attention"]) * 4, "conv_L_cache": 3},
    ),
    "olmoe": ("OlmoeForCausalLM", {"intermediate_size": 512}),
    "flex_olmo": ("FlexOlmoForCausalLM", {"intermediate_size": 512}),
    "afmoe": (
        "AfmoeForCausalLM",
        {"num_dense_layers": 1, "num_shared_experts": 1, "layer_types": KINDS, "sliding_window": 128},
    ),
    "cohere2_moe": (
        "Cohere2MoeForCausalLM",
        {"intermediate_size": 512, "num_shared_experts": 1, "layer_types": KINDS, "sliding_window": 128},
    ),
}


class Contenders:
    """Makes models of random weights, at most two geometries of experts at a time."""

    def __init__(self, threads: int, layers: int, dense: str) -> None:
        self._kernels, self._layers, self._dense = Kernels(threads, bf16=True), layers, dense
        self._tiers: dict[ExpertGeometry, ExpertTiers] = {}

    def make(self, family: str, encoding: str) -> ResidentModel:
        """Returns a family's model whose experts have this encoding."""
        architecture, own = FAMILIES[family]
        config = {**SHAPE, **own, "architectures": [architecture], "num_hidden_layers": self._layers}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: self._layers]
        spec = spec_from_config(config)
        names = (spec.dtype if each == KEEP else ENCODING_NAMES[each] for each in (encoding, self._dense))
        spec = with_encodings(spec, *names)
        if spec.geometry not in self._tiers:
            for other in list(self._tiers)[1:]:
                del self._tiers[other]
            gc.collect()  # tiers refer to each other in circles
            self._tiers[spec.geometry] = resident_tiers(spec, self._kernels)
        return ResidentModel(spec, self._kernels, random_decoder(spec, self._kernels), self._tiers[spec.geometry])

    def drop(self) -> None:
        """Frees the memory of all experts."""
        self._tiers.clear()
        gc.collect()


def measure(args: argparse.Namespace, models: dict[str, ResidentModel], batch: int) -> dict[str, list[float]]:
    """Returns for each model the medians of milliseconds, the thread's own milliseconds, and megabytes of a step."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in models}
    for model in models.values():
        model.begin(batch, CONTEXT + (args.rounds + 1) * args.steps)
        model.feed(torch.randint(0, SHAPE["vocab_size"], (batch, CONTEXT)))
    for round_ in range(-1, args.rounds):  # the first one is not counted
        steps = torch.randint(0, SHAPE["vocab_size"], (args.steps, batch, 1))
        for name, model in models.items():
            time.sleep(PAUSE_S)
            began_s = time.thread_time()
            seconds, step_bytes = model.decode(steps)
            own_s = (time.thread_time() - began_s) / args.steps
            step_bytes += 2 * batch * model.spec.state_bytes  # read and written
            taken[name] += [(seconds * 1e3, own_s * 1e3, step_bytes / 1e6)] if round_ >= 0 else []
    return {name: [median(values) for values in zip(*rounds, strict=True)] for name, rounds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="default all")
    parser.add_argument("--experts", default=f"{KEEP},int4", help="encodings; default %(default)s")
    parser.add_argument("--dense", default=KEEP, help="the encoding of dense weights; default %(default)s")
    parser.add_argument("--batches", default="1,8", help="sequences decoded at once; default %(default)s")
    for name, value in {"layers": 16, "rounds": 7, "steps": 8, "threads": len(os.sched_getaffinity(0))}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    args = parser.parse_args()
    torch.manual_seed(0)
    contenders = Contenders(args.threads, args.layers, args.dense)
    for encoding in args.experts.split(","):
        contenders.drop()
        plain = contenders.make(PLAIN, encoding)
        for family in args.families.split(","):
            if family == PLAIN:
                continue
            models = {PLAIN: plain, family: contenders.make(family, encoding)}
            for batch in map(int, args.batches.split(",")):
                found = measure(args, models, batch)
                (base_ms, base_own, base_mb), (ms, own, mb) = found[PLAIN], found[family]
                line = {"family": family, "experts": encoding, "batch": batch, "step_mb": round(mb, 1)}
                line |= {"ms": round(ms, 2), "own_ms": round(own, 2), "plain_ms": round(base_ms, 2)}
                line |= {"plain_own_ms": round(base_own, 2), "plain_mb": round(base_mb, 1)}
                line["per_byte"] = round(ms / mb / (base_ms / base_mb), 2)
                line["own_per_byte"] = round(own / mb / (base_own / base_mb), 2)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
