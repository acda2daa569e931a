"""The decoder of all supported families, whose differences are in the spec's records.

The residual stream is float32; matrices multiply in the model's dtype. Steps in which every sequence contributes one
token use the fused kernels where these can run the model (see `fused`), all others the torch operations here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.fused import FusedDecoder, is_plain
from edgemoe.model.kv import DTYPES, KVCache
from edgemoe.model.layers.feed_forward import ExpertLayer
from edgemoe.model.layers.norm import Norm
from edgemoe.model.layers.step import StepContext, ropes_of
from edgemoe.model.weights import Weights, load_weights
from edgemoe.types.step import Batch, Experts

FUSED_TOKENS = 16  # at most; with more, torch's products are faster


class Decoder:
    """Computes logits from dense weights that it owns; the experts and the KV cache are passed to each call."""

    def __init__(self, spec: ModelSpec, weights: Weights, device: torch.device, kernels: Kernels | None = None) -> None:
        self.spec, self.device = spec, device
        self._weights, self.kernels = weights, kernels
        self._ropes, self._gates = ropes_of(spec, device), [layer.gate for layer in weights.expert_layers]
        self._fused: FusedDecoder | None = None
        if kernels is not None and is_plain(spec) and weights.plain:
            (rope,) = self._ropes.values()
            self._fused = FusedDecoder(spec, weights, kernels, rope)

    @classmethod
    def load(
        cls, spec: ModelSpec, path: Path, device: torch.device | str = "cpu", kernels: Kernels | None = None
    ) -> Decoder:
        """Loads the weights from `dense.safetensors`. `kernels` are used on the CPU only. Raises StoreError."""
        device = torch.device(device)
        return cls(spec, load_weights(spec, path, device), device, kernels if device.type == "cpu" else None)

    @property
    def embedding(self) -> torch.Tensor:
        """Returns the token embedding, [V, H] in the model's dtype, on the decoder's device. Not to be changed."""
        return self._weights.embed.weights(DTYPES[self.spec.dtype])

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, experts: Experts) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises MissingExpert, CorruptExpert.

        The `hidden` passed to `experts` is valid during that call only.
        """
        tokens = len(batch.tokens)
        if self._fused is not None and tokens == len(batch.query_lens) and tokens <= FUSED_TOKENS:
            return self._fused.forward(batch, kv, experts)
        step, block, number = StepContext(batch, kv, self.kernels, self._ropes), self.spec.block, 0
        residual = self._weights.embed.pick(batch.tokens)
        if block.embedding != 1.0:
            residual *= block.embedding
        for layer in self._weights.layers:
            residual.add_(layer.attention(self._norm(residual, layer.norm), step), alpha=block.residual)
            hidden = self._norm(residual, layer.post_norm)
            if isinstance(layer.feed_forward, ExpertLayer):
                output = self._mix(layer.feed_forward, number, hidden, experts, batch.decode)
                number += 1
            else:
                output = layer.feed_forward(hidden)
            residual.add_(output, alpha=block.residual)
        logits = self._weights.head(self._norm(residual[batch.logit_rows], self._weights.norm)).float()
        return logits if block.logits == 1.0 else logits * block.logits

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(x).to(DTYPES[self.spec.dtype])

    def _mix(
        self, layer: ExpertLayer, number: int, hidden: torch.Tensor, experts: Experts, decode: bool
    ) -> torch.Tensor:
        """Returns the output of an expert layer; `number` counts these alone."""
        ids, weights = layer.gate.route(hidden)
        if decode:
            self._hint(experts, number, hidden)
        output, shared = experts.forward(number, hidden, ids, weights), layer.shared(hidden)
        return output if shared is None else output + shared

    def _hint(self, experts: Experts, number: int, hidden: torch.Tensor) -> None:
        """Applies the gates of the next layers to this layer's expert input, and passes the result to `experts`."""
        for ahead in range(number + 1, min(number + 1 + experts.lookahead, len(self._gates))):
            experts.hint(ahead, self._gates[ahead].chances(hidden))
