"""Runs steps of one token per sequence on the CPU.

Where every expert is in memory that is one kernel call for all layers; else, per layer, one and one to the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.families.spec import AttentionHeads, BlockSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec
from edgemoe.kernels.cpu.decode_step import HEAD, LAYER, STEP, WHOLE_STEP
from edgemoe.kernels.cpu.runtime import EVERYTHING, Kernels, PagedCache
from edgemoe.model.attention import AttentionScores, paged, tables_and_contexts
from edgemoe.model.decoder_layers import DecoderLayer, DenseWeights, SerialLayer
from edgemoe.model.dense_attention import DenseAttention
from edgemoe.model.dense_weights import FEW_TOKENS, DenseMatrix
from edgemoe.model.kv import DTYPES, KVCache
from edgemoe.model.rope import RotaryEmbedding
from edgemoe.types.arrays import place_of
from edgemoe.types.step import Batch, ExpertExecutor, ExpertPlaces

Record = npt.NDArray[Any]
IDS, WEIGHTS, DELTA = (place_of(STEP, name) for name in ("ids", "weights", "delta"))


def is_plain(spec: ModelSpec) -> bool:
    """Returns whether the kernels have everything that the model's records ask for."""
    first, router, block = spec.attention[0], spec.router, spec.block
    heads, rope, feed_forward = first.heads, first.rope, spec.feed_forward
    known = AttentionHeads(
        heads.count, heads.kv_count, heads.dim, heads.qk_norm, False, heads.qkv_bias, heads.o_bias, sinks=heads.sinks
    )
    logit_bias, activation, expert_biases = router.logit_bias, feed_forward.activation, feed_forward.expert_biases
    return (
        all(
            attention.rope == rope and attention.heads == replace(known, window=attention.heads.window)
            for attention in spec.attention
        )
        and heads.qk_norm != "full"
        and isinstance(rope, RopeSpec)
        and rope.dims == heads.dim
        and router == RouterSpec(router.experts, router.top_k, logit_bias=logit_bias, renormalise=router.renormalise)
        and feed_forward
        == FeedForwardSpec(feed_forward.width, activation, expert_biases, dense_width=feed_forward.dense_width)
        and block == BlockSpec(block.eps, block.tied)
    )


class FusedDecoder:
    """Computes logits by the kernels. Fills the layers' records once, and the step's record at each step."""

    def __init__(self, spec: ModelSpec, weights: DenseWeights, kernels: Kernels, rope: RotaryEmbedding) -> None:
        self._spec, self._weights, self._kernels, self._rope = spec, weights, kernels, rope
        self._heads, self._gates = spec.attention[0].heads, weights.gates
        self._scores = AttentionScores(
            self._heads.dim**-0.5, max(attention.heads.window or EVERYTHING for attention in spec.attention)
        )
        self._vectors: list[torch.Tensor] = []  # float32, of which records have addresses
        self._matrices: list[Record] = []
        self._step = self._sizes()
        self._layers = np.concatenate([self._layer_record(layer) for layer in weights.layers])
        self._addresses = [self._layers[i : i + 1].ctypes.data for i in range(spec.layers)]
        self._call = self._step.view(np.int64)  # the fields that change from layer to layer are set through this
        self._head = np.zeros(1, HEAD)
        self._head["step"], self._head["norm"] = self._step.ctypes.data, weights.norm.weight.data_ptr()
        self._head["head"] = self._matrix(weights.head)
        self._whole = np.zeros(1, WHOLE_STEP)
        self._whole["step"], self._whole["count"] = self._step.ctypes.data, spec.layers
        self._whole["layers"] = self._layers.ctypes.data
        self._kv: KVCache | None = None  # whose addresses the layers' records have
        self._pages: list[PagedCache] = []  # of each layer of it
        self._mixed = torch.empty(0)  # the last output of experts; the step has its address
        self._room: list[npt.NDArray[Any]] = []  # of which records have addresses
        self._lay_out(FEW_TOKENS)

    def _sizes(self) -> Record:
        step, spec, heads, router = np.zeros(1, STEP), self._spec, self._heads, self._spec.router
        step["width"], step["eps"] = spec.hidden, spec.block.eps
        step["heads"], step["kv_heads"], step["head_dim"] = heads.count, heads.kv_count, heads.dim
        step["experts"], step["k"], step["renormalise"] = router.experts, router.top_k, router.renormalise
        step["iota"], step["linear"] = self._kernels.iota, self._kernels.linear_record.ctypes.data
        return step

    def _layer_record(self, layer: DecoderLayer) -> Record:
        assert isinstance(layer, SerialLayer)
        record, attention, gate = np.zeros(1, LAYER), layer.attention, layer.gate
        assert isinstance(attention, DenseAttention)
        assert gate is not None
        record["step"] = self._step.ctypes.data
        record["norm"], record["post_norm"] = layer.norm.weight.data_ptr(), layer.post_norm.weight.data_ptr()
        record["qkv"], record["o"] = self._matrix(attention.qkv), self._matrix(attention.o)
        record["gate"] = self._matrix(DenseMatrix(gate.weight, self._kernels.dtype, self._spec.hidden))
        for name, bias in (
            ("qkv_bias", attention.qkv_bias),
            ("o_bias", attention.o_bias),
            ("gate_bias", gate.logit_bias),
            ("sinks", attention.scores.sinks),
        ):
            if bias is not None:
                self._vectors.append(bias.float())
                record[name] = self._vectors[-1].data_ptr()
        record["window"] = attention.scores.window
        if attention.q_norm is not None and attention.k_norm is not None:
            record["q_norm"], record["k_norm"] = (
                norm.weight.data_ptr() for norm in (attention.q_norm, attention.k_norm)
            )
        return record

    def _matrix(self, matrix: DenseMatrix) -> int:
        """Returns the address of a matrix's MATRIX record, which this object keeps."""
        code = self._kernels.row_code(matrix.encoding)
        self._matrices.append(self._kernels.matrix(matrix.rows.data_ptr(), len(matrix), matrix.columns, code))
        return int(self._matrices[-1].ctypes.data)

    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Computes the same as `Decoder.forward`, for one token of each of at most FEW_TOKENS sequences."""
        spec, step, tokens = self._spec, self._step, len(batch.tokens)
        rows = list(range(tokens))
        tables, contexts = zip(
            *(tables_and_contexts(each, batch.context_lens, rows) for each in batch.tables_by_kind), strict=True
        )
        cos, sin = self._rope(batch.positions)
        residual = self._weights.embed.rows_at(batch.tokens)
        hidden = torch.empty((tokens, spec.hidden), dtype=DTYPES[spec.dtype])
        ids = torch.empty((len(self._layers), tokens, spec.router.top_k), dtype=torch.int64)
        weights = torch.empty((len(self._layers), tokens, spec.router.top_k), dtype=torch.float32)
        step["tokens"], step["delta"] = tokens, 0
        step["positions"], step["residual"] = batch.positions.data_ptr(), residual.data_ptr()
        step["cos"], step["sin"], step["hidden"] = cos.data_ptr(), sin.data_ptr(), hidden.data_ptr()
        self._begin(tokens, tables, contexts[0], kv)
        if experts.places is not None:
            self._run(experts, experts.places, hidden, ids, weights)
            return self._logits(batch.logit_rows)
        for layer, (chosen, shares) in enumerate(zip(ids.unbind(0), weights.unbind(0), strict=True)):
            self._call[IDS], self._call[WEIGHTS] = chosen.data_ptr(), shares.data_ptr()
            self._kernels.layer(self._addresses[layer])
            if experts.lookahead and batch.decode:
                self._hint(experts, layer, hidden)
            self._add_next(experts.forward(layer, hidden, chosen, shares))
        return self._logits(batch.logit_rows)

    def _run(
        self,
        experts: ExpertExecutor,
        places: ExpertPlaces,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Runs all layers in one call; layers at which it stops have their experts computed by `experts`."""
        whole, (layers, tokens, k) = self._whole, ids.shape
        whole["places"], whole["next"], whole["served"] = places.address(tokens, tokens * k), 0, 0
        whole["ids"], whole["weights"] = ids.data_ptr(), weights.data_ptr()
        self._kernels.whole_step(whole.ctypes.data)
        while (layer := int(whole["next"][0])) < layers:
            self._add_next(experts.forward(layer, hidden, ids[layer], weights[layer]))
            whole["next"] = layer + 1
            self._kernels.whole_step(whole.ctypes.data)
        experts.computed(ids, weights, int(whole["served"][0]))

    def _add_next(self, mixed: torch.Tensor) -> None:
        """Passes the experts' output [T, D] to the next layer, or the head, which adds it to the residual stream."""
        self._mixed = mixed.float()
        self._call[DELTA] = self._mixed.data_ptr()

    def _begin(
        self, tokens: int, tables: Sequence[npt.NDArray[np.int64]], contexts: npt.NDArray[np.int64], kv: KVCache
    ) -> None:
        """Writes the addresses of scratch memory, both kinds of block tables, and KV cache into the records."""
        step, heads = self._step, self._heads
        if kv is not self._kv:
            self._kv, self._pages = kv, [paged(heads.count, kv, i, self._scores) for i in range(len(self._layers))]
            self._layers["keys"] = [pages.keys for pages in self._pages]
            self._layers["values"] = [pages.values for pages in self._pages]
            self._layers["block_stride"] = [pages.block_stride for pages in self._pages]
        self._layers["tables"] = [tables[windowed].ctypes.data for windowed in kv.windowed]
        attention = self._kernels.attention_record(tokens, tables[0], contexts, self._pages[0])
        attention["queries"] = self._queries
        attention["out"] = step["attended"]
        step["attention"] = attention.ctypes.data

    def _lay_out(self, most: int) -> None:
        """Writes the addresses of scratch memory for as many tokens as a step may have into the records."""
        spec, step, whole, heads = self._spec, self._step, self._whole, self._heads
        queries, pairs = heads.count * heads.dim, most * spec.router.top_k
        step["packed"] = self._address(most * spec.hidden)
        step["qkv"] = self._address(most * (queries + 2 * heads.kv_count * heads.dim))
        step["attended"], step["turned"] = self._address(most * queries), self._address(most * queries)
        step["mixed"] = self._address(most * spec.hidden)
        step["probs"] = self._address(most * spec.router.experts)
        whole["out"], whole["shares"] = self._address(most * spec.hidden), self._address(pairs)
        for name in ("slots", "offsets", "index"):
            whole[name] = self._address(pairs + 1, np.int64)
        whole["counts"] = self._address(spec.router.experts, np.int64)
        self._queries = self._address(most * queries)

    def _address(self, count: int, dtype: npt.DTypeLike = np.float32) -> int:
        """Returns the address, a multiple of 64, of a new array that this object keeps."""
        self._room.append(np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8))
        return (self._room[-1].ctypes.data + 63) & ~63

    def _hint(self, experts: ExpertExecutor, layer: int, hidden: torch.Tensor) -> None:
        """Applies the gates that `experts` asks for to this layer's expert input, and passes the result on."""
        spec, count, tokens = self._spec, self._spec.router.experts, len(hidden)
        for ahead in range(layer + experts.lookahead.start, min(layer + experts.lookahead.stop, spec.layers)):
            logits = torch.empty((tokens, count), dtype=torch.float32)
            gate, is_bf16 = self._gates[ahead], self._kernels.bf16
            place, to = gate.weight.data_ptr(), logits.data_ptr()
            self._kernels.linear(place, count, spec.hidden, hidden.data_ptr(), is_bf16, tokens, to)
            if gate.logit_bias is not None:
                logits += gate.logit_bias
            experts.hint(ahead, logits.softmax(-1))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self._spec.vocab), dtype=torch.float32)
        head = self._head
        head["rows"], head["count"], head["logits"] = rows.data_ptr(), len(rows), logits.data_ptr()
        self._kernels.head(head.ctypes.data)
        return logits
