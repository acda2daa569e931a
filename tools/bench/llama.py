"""llama.cpp in a process of its own, on a random model of the same shape, controlled by its parent.

Started by `tools.bench.decode --llama q4_0`; it needs `pip install llama-cpp-python gguf`. All matrices but the gates
have one type, and equal shapes share their values in all layers. The process has its own copy of the weights.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.oracle import serve

MOST_TOKENS = 2048  # of one call
SEQUENCES, CONTEXT = 16, 640


class Model:
    """One model, and its cache."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        model = llama_cpp.llama_model_default_params()
        model.use_mmap = False
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_seq_max = SEQUENCES * CONTEXT, SEQUENCES
        context.n_batch = context.n_ubatch = MOST_TOKENS
        context.n_threads = context.n_threads_batch = threads
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._batch = llama_cpp.llama_batch_init(MOST_TOKENS, 0, SEQUENCES)
        self._length = 0

    def begin(self, tokens: list[list[int]]) -> None:
        """Empties the cache and reads prompts."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        self._length = 0
        self.feed(tokens)

    def feed(self, tokens: list[list[int]]) -> None:
        """Feeds one step of tokens [batch, n]."""
        batch, count, n = self._batch, len(tokens), len(tokens[0])
        batch.n_tokens = count * n
        for sequence, row in enumerate(tokens):
            for k, token in enumerate(row):
                at = sequence * n + k
                batch.token[at], batch.pos[at], batch.logits[at] = token, self._length + k, k == n - 1
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        self._length += n
        if self._api.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode")
        for sequence in range(count):
            self._api.llama_get_logits_ith(self._context, (sequence + 1) * n - 1)


class Server:
    """Makes a model of each type at its first use."""

    def __init__(self, config: dict[str, Any], threads: int) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        self._config, self._threads = config, threads
        self._models: dict[str, Model] = {}

    def begin(self, implementation: str, tokens: list[list[int]]) -> None:
        """Reads prompts [batch, n] into an empty cache."""
        if implementation not in self._models:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / "model.gguf"
                write(path, self._config, implementation)
                self._models[implementation] = Model(path, self._threads)
        self._models[implementation].begin(tokens)

    def prompt(self, implementation: str, tokens: list[list[int]]) -> float:
        """Returns the seconds of a prompt [1, n] from an empty cache."""
        start = time.perf_counter()
        self.begin(implementation, tokens)
        return time.perf_counter() - start

    def write(self, implementation: str, path: str) -> None:
        """Writes the GGUF file of a model of this type."""
        write(Path(path), self._config, implementation)

    def decode(self, implementation: str, steps: list[list[list[int]]]) -> float:
        """Returns the mean seconds of a step; each is [batch, 1]."""
        start = time.perf_counter()
        for step in steps:
            self._models[implementation].feed(step)
        return (time.perf_counter() - start) / len(steps)


def write(path: Path, config: dict[str, Any], kind: str) -> None:
    """Writes a GGUF file of random weights."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    width, head = config["moe_intermediate_size"], config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(width)
    writer.add_expert_feed_forward_length(width)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    made: dict[tuple[str, tuple[int, ...]], Any] = {}
    for name, shape in shapes(config).items():
        own = kind if len(shape) > 1 and "gate_inp" not in name else "f32"
        if (own, shape) not in made:
            made[own, shape] = weights(shape, own)
        writer.add_tensor(name, made[own, shape], raw_dtype=gguf.GGMLQuantizationType[own.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor."""
    hidden, width, experts = (config[name] for name in ("hidden_size", "moe_intermediate_size", "num_local_experts"))
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_q_norm": (config["head_dim"],),
        "attn_k_norm": (config["head_dim"],),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate_inp": (experts, hidden),
        "ffn_gate_exps": (experts, width, hidden),
        "ffn_up_exps": (experts, width, hidden),
        "ffn_down_exps": (experts, hidden, width),
    }
    vocab = (config["vocab_size"], hidden)
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": vocab, "output_norm.weight": (hidden,)}
    found |= {} if config["tie_word_embeddings"] else {"output.weight": vocab}
    for number in range(config["num_hidden_layers"]):
        found |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def weights(shape: tuple[int, ...], kind: str) -> Any:
    """Draws random weights; a stack repeats one matrix, and vectors are 1."""
    import gguf

    if len(shape) == 1:
        return np.ones(shape, np.float32)
    matrix = np.random.default_rng(0).standard_normal(shape[-2:], np.float32) * np.float32(0.02)
    if kind == "f32":
        return matrix
    rows = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind.upper()])
    return np.ascontiguousarray(np.broadcast_to(rows, (*shape[:-2], *rows.shape)))


if __name__ == "__main__":
    serve(Server)
