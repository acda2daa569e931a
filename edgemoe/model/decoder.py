"""The decoder of all supported families. The records of the spec hold their differences.

The residual stream is float32; matrices multiply in the model's dtype. On the CPU, steps of few tokens, one of each
sequence, run as one plan of kernels (see `fused`). All others use the torch operations here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from edgemoe.families.mechanisms import planned_tokens
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepContext, ropes_of
from edgemoe.model.decoder_layers import DenseWeights, MoeRunner, load_weights
from edgemoe.model.dense_weights import DenseMatrix
from edgemoe.model.fused import FusedDecoder, is_planned
from edgemoe.model.graphed import GraphedDecoder
from edgemoe.model.kv import DTYPES, KVCache
from edgemoe.types.step import Batch, ExpertExecutor, RowSource


class Decoder:
    """Computes logits from dense weights that it owns; the experts and the KV cache are passed to each call."""

    def __init__(
        self, spec: ModelSpec, weights: DenseWeights, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self.spec, self.device = spec, device
        self._weights, self.kernels = weights, kernels
        self._ropes, self.gates = ropes_of(spec, device), weights.gates
        self._fused: FusedDecoder | None = None
        self._longest = spec.chosen if kernels is None else planned_tokens(spec)  # context of a planned step
        if kernels is not None:
            self._fused = FusedDecoder(spec, weights, kernels, self._ropes)
        self._graphed: GraphedDecoder | None = None

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        path: Path,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
        progress: Callable[[float], object] = lambda _: None,
        graphs: bool = False,
        table: RowSource | None = None,
    ) -> Decoder:
        """Loads the weights from `dense.safetensors`. `kernels` are used on the CPU only. Raises StoreError.

        `progress` is called with the share of layers that are loaded. With `graphs` a GPU computes steps of few tokens
        as CUDA graphs, where every expert is in VRAM or pinned RAM. `table` has the rows of a model that has some.
        """
        device = torch.device(device)
        kernels = kernels if device.type == "cpu" else None
        progress(0.0)
        weights = load_weights(spec, path, device, kernels, progress, table)
        decoder = cls(spec, weights, device, kernels)
        if graphs and device.type == "cuda" and weights.inputs is None and not spec.chosen:
            decoder._graphed = GraphedDecoder(spec, weights, decoder._ropes, device)
        return decoder

    @property
    def embedding(self) -> DenseMatrix:
        """Returns the token embedding, [V, H], on the decoder's device. Not to be changed."""
        return self._weights.embed

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises StoreError.

        The `hidden` passed to `experts` is valid during that call only. While kernels compute few tokens, torch has one
        thread: its threads spin after each operation and would take cores from the kernels.
        """
        few = is_planned(batch, self._longest)
        if self.kernels is not None:
            torch.set_num_threads(1 if few else self.kernels.pool.threads)
        if self._fused is not None and few:
            return self._fused.forward(batch, kv, experts)
        if self._graphed is not None and few and (logits := self._graphed.forward(batch, kv, experts)) is not None:
            return logits
        batch = batch.to(self.device)
        step, block = StepContext.of(batch, kv, self.kernels, self._ropes), self.spec.block
        residual = self._weights.embed.rows_at(batch.tokens)
        if block.embedding != 1.0:
            residual *= block.embedding
        if self._weights.inputs is not None:
            step.layer_inputs = self._weights.inputs(batch.tokens, residual)
        called = MoeRunner(experts, self.gates, batch.decode)
        for layer in self._weights.layers:
            layer(residual, step, called)
        last = self._weights.norm(residual[batch.logit_rows]).to(DTYPES[self.spec.dtype])
        return self._weights.logits(last, block)
