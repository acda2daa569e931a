"""Judges the trained network and writes it as a Hugging Face checkpoint."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.demo_model import tokens
from tools.demo_model.demo_network import HeadLoss, Network, Shape

PROMPTS = (
    "What is a mixture of experts?", "What is the capital of France?", "Tell me a story about a fox.",
    "Why is the sky blue?", "What is 7 + 5?", "Write a Python function that reverses a string.",
    "How do you say thank you in French?", "Explain how a cache works.", "Hello!", "Who wrote Hamlet?",
)  # fmt: skip
ROWS, ROW_TOKENS = 8, 512  # per domain, held out


def judge(network: Network, domains: dict[str, tokens.Domain], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns held-out loss per domain (nats per token), divergence of routing between domains, and sample answers."""
    network.eval()
    loss, counts = {}, []
    layers: Any = network.layers
    for name, domain in domains.items():
        if name == "drill":  # questions of the domain "chat"
            continue
        rng = np.random.default_rng(1)
        rows = torch.from_numpy(np.stack([domain.row(rng, ROW_TOKENS, held_out=True) for _ in range(ROWS)]))
        with torch.no_grad():
            hidden, _ = network(rows[:, :-1])
            total = HeadLoss.apply(hidden.flatten(0, 1), network.embed_tokens.weight, rows[:, 1:].flatten())
        loss[name] = round(float(total) / rows[:, 1:].numel(), 4)
        counts.append([np.bincount(b.mlp.ids.flatten(), minlength=network.shape.experts) for b in layers])
    return {
        "loss": {**loss, "mean": round(sum(loss.values()) / len(loss), 4)},
        "divergence_bits": divergence(np.array(counts, dtype=np.float64)),
        "samples": {prompt: answer(network, tokenizer, prompt) for prompt in PROMPTS},
    }


def divergence(counts: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Returns the Jensen-Shannon divergence (0 to 1 bit) of routing between domains, per layer, from counts [D, L,
    E].
    """
    p = counts / counts.sum(-1, keepdims=True)
    pairs = [jensen_shannon(p[a], p[b]) for a, b in combinations(range(len(p)), 2)]  # each [L]
    return {
        "mean_per_layer": np.mean(pairs, 0).round(4).tolist(),
        "max_per_layer": np.max(pairs, 0).round(4).tolist(),
        "mean": round(float(np.mean(pairs)), 4),
    }


def jensen_shannon(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    def entropy(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return -np.sum(x * np.log2(np.maximum(x, 1e-12)), -1)

    result: npt.NDArray[np.float64] = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return result


def answer(network: Network, tokenizer: Tokenizer, prompt: str, limit: int = 120) -> str:
    """Returns the greedy answer to one question."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text).ids
    start = len(ids)
    with torch.no_grad():
        while len(ids) - start < limit:
            hidden, _ = network(torch.tensor([ids]))
            token = int(network.logits(hidden[0, -1]).argmax())
            if token in (tokens.IM_END, tokens.END_OF_TEXT):
                break
            ids.append(token)
    return str(tokenizer.decode(ids[start:]))


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "num_experts": shape.experts, "num_experts_per_tok": shape.top_k, "moe_intermediate_size": shape.width,
        "intermediate_size": shape.width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "hidden_act": "silu", "rms_norm_eps": shape.rms_eps, "rope_theta": shape.rope_theta, "rope_scaling": None,
        "max_position_embeddings": shape.context_tokens, "tie_word_embeddings": True, "attention_bias": False,
        "attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False, "use_cache": True,
        "bos_token_id": None, "eos_token_id": tokens.IM_END, "pad_token_id": tokens.END_OF_TEXT,
    }  # fmt: skip


def write(network: Network, tokenizer: Tokenizer, directory: Path, report: dict[str, Any]) -> None:
    """Writes the checkpoint to `directory`, with training.json beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(network.to_checkpoint(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    tokens.save(tokenizer, directory, network.shape.context_tokens)
    generation = {
        "do_sample": True, "temperature": 0.3, "top_p": 0.9, "top_k": 20,
        "eos_token_id": [tokens.IM_END, tokens.END_OF_TEXT], "pad_token_id": tokens.END_OF_TEXT,
    }  # fmt: skip
    for name, value in (("config.json", config(network.shape)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    text = json.dumps(report, ensure_ascii=False, separators=(",", ":"))
    (directory.parent / "training.json").write_text(text.replace("},{", "},\n{") + "\n")
