"""Runs steps of one token per sequence on the CPU: per layer one kernel call and one call to the experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.decode_layer import HEAD, LAYER, STEP
from edgemoe.kernels.cpu.intrinsics import place_of
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import block_tables, paged
from edgemoe.model.kv import KVCache
from edgemoe.model.rope import Rope
from edgemoe.model.scores import Scores
from edgemoe.model.weights import LayerWeights, Weights
from edgemoe.types.step import Batch, Experts

Record = npt.NDArray[Any]
IDS, WEIGHTS, DELTA = (place_of(STEP, name) for name in ("ids", "weights", "delta"))


class FusedDecoder:
    """Computes logits by the kernels. Fills the layers' records once, and the step's record at each step."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, rope: Rope) -> None:
        self._spec, self._weights, self._kernels, self._rope = spec, weights, kernels, rope
        self._scores = Scores(spec.head_dim**-0.5)
        self._step = self._sizes()
        self._layers = np.concatenate([self._layer_record(layer) for layer in weights.layers])
        self._addresses = [self._layers[i : i + 1].ctypes.data for i in range(spec.layers)]
        self._call = self._step.view(np.int64)  # the fields that change from layer to layer are set through this
        self._head = np.zeros(1, HEAD)
        self._head["step"], self._head["vocab"] = self._step.ctypes.data, spec.vocab
        self._head["norm"], self._head["weight"] = weights.norm.data_ptr(), weights.head.data_ptr()

    def _sizes(self) -> Record:
        step, spec = np.zeros(1, STEP), self._spec
        step["width"], step["eps"] = spec.hidden, spec.rms_eps
        step["heads"], step["kv_heads"], step["head_dim"] = spec.heads, spec.kv_heads, spec.head_dim
        step["experts"], step["k"], step["renormalise"] = spec.experts, spec.top_k, spec.norm_topk
        step["iota"], step["linear"] = self._kernels.iota, self._kernels.linear_record.ctypes.data
        return step

    def _layer_record(self, layer: LayerWeights) -> Record:
        record = np.zeros(1, LAYER)
        record["step"] = self._step.ctypes.data
        record["norm"], record["post_norm"] = layer.norm.data_ptr(), layer.post_norm.data_ptr()
        record["qkv"], record["o"], record["gate"] = (m.data_ptr() for m in (layer.qkv, layer.o, layer.gate))
        if layer.q_norm is not None and layer.k_norm is not None:
            record["q_norm"], record["k_norm"] = layer.q_norm.data_ptr(), layer.k_norm.data_ptr()
        return record

    def forward(self, batch: Batch, kv: KVCache, experts: Experts) -> torch.Tensor:
        """Computes what `Decoder.forward` does, for at most one token of each sequence."""
        spec, step, tokens = self._spec, self._step, len(batch.tokens)
        tables, contexts = block_tables(batch, list(range(tokens)))
        cos, sin = self._rope(batch.positions)
        residual = self._weights.embed[batch.tokens].float()
        hidden = torch.empty((tokens, spec.hidden), dtype=self._weights.embed.dtype)
        ids = torch.empty((spec.layers, tokens, spec.top_k), dtype=torch.int64)
        weights = torch.empty((spec.layers, tokens, spec.top_k), dtype=torch.float32)
        step["tokens"], step["delta"] = tokens, 0
        step["positions"], step["residual"] = batch.positions.data_ptr(), residual.data_ptr()
        step["cos"], step["sin"], step["hidden"] = cos.data_ptr(), sin.data_ptr(), hidden.data_ptr()
        self._begin(tokens, tables, contexts, kv)
        for layer, (chosen, shares) in enumerate(zip(ids.unbind(0), weights.unbind(0), strict=True)):
            self._call[IDS], self._call[WEIGHTS] = chosen.data_ptr(), shares.data_ptr()
            self._kernels.layer(self._addresses[layer])
            if experts.lookahead and batch.decode:
                self._hint(experts, layer, hidden)
            mixed = experts.forward(layer, hidden, chosen, shares).float()
            self._call[DELTA] = mixed.data_ptr()
        return self._logits(batch.logit_rows)

    def _begin(self, tokens: int, tables: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], kv: KVCache) -> None:
        """Writes the addresses of scratch memory, block tables and KV cache into the records."""
        spec, step, scratch = self._spec, self._step, self._kernels.scratch
        queries = spec.heads * spec.head_dim
        step["packed"] = scratch("step.packed", tokens * spec.hidden)
        step["qkv"] = scratch("step.qkv", tokens * (queries + 2 * spec.kv_heads * spec.head_dim))
        step["attended"] = scratch("step.attended", tokens * queries)
        step["mixed"] = scratch("step.mixed", tokens * spec.hidden)
        step["probs"] = scratch("step.probs", tokens * spec.experts)
        attention = self._kernels.attention_record(tokens, tables, contexts, paged(spec.heads, kv, 0, self._scores))
        attention["queries"] = scratch("step.queries", tokens * queries)
        attention["out"], attention["plain"] = step["attended"], 0
        step["attention"] = attention.ctypes.data
        for layer in range(spec.layers):
            pages = paged(spec.heads, kv, layer, self._scores)
            self._layers[layer]["keys"], self._layers[layer]["values"] = pages.keys, pages.values

    def _hint(self, experts: Experts, layer: int, hidden: torch.Tensor) -> None:
        """Applies the gates of the next layers to this layer's expert input, and passes the result to `experts`."""
        spec, tokens = self._spec, len(hidden)
        for ahead in range(layer + 1, min(layer + 1 + experts.lookahead, spec.layers)):
            logits = torch.empty((tokens, spec.experts), dtype=torch.float32)
            gate = self._weights.layers[ahead].gate.data_ptr()
            is_bf16 = self._kernels.bf16
            self._kernels.linear(gate, spec.experts, spec.hidden, hidden.data_ptr(), is_bf16, tokens, logits.data_ptr())
            experts.hint(ahead, logits.softmax(-1))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self._spec.vocab), dtype=torch.float32)
        head = self._head
        head["rows"], head["count"], head["logits"] = rows.data_ptr(), len(rows), logits.data_ptr()
        self._kernels.head(head.ctypes.data)
        return logits
