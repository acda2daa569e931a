"""The decoder of all supported families, whose differences are in the spec.

The residual stream is float32; matrices multiply in the model's dtype. Steps in which every sequence contributes one
token use the fused kernels where there are any (see `fused`), all others the torch operations here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm

from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepAttention
from edgemoe.model.fused import FusedDecoder
from edgemoe.model.kv import KVCache
from edgemoe.model.rope import Rope, turn
from edgemoe.model.scores import Scores
from edgemoe.model.weights import LayerWeights, Weights, load_weights
from edgemoe.types.step import Batch, Experts

FUSED_TOKENS = 16  # at most; with more, torch's products are faster


class Decoder:
    """Computes logits from dense weights that it owns; the experts and the KV cache are passed to each call."""

    def __init__(self, spec: ModelSpec, weights: Weights, device: torch.device, kernels: Kernels | None = None) -> None:
        self.spec, self.device = spec, device
        self._weights, self.kernels = weights, kernels
        self._rope = Rope(spec, device)
        self._scores = Scores(spec.head_dim**-0.5)
        self._fused = FusedDecoder(spec, weights, kernels, self._rope) if kernels is not None else None

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
        return self._weights.embed

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, experts: Experts) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises MissingExpert, CorruptExpert.

        The `hidden` passed to `experts` is valid during that call only.
        """
        tokens = len(batch.tokens)
        if self._fused is not None and tokens == len(batch.query_lens) and tokens <= FUSED_TOKENS:
            return self._fused.forward(batch, kv, experts)
        attention = StepAttention(batch, kv, self.kernels)
        cos, sin = self._rope(batch.positions)
        residual = self._weights.embed[batch.tokens].float()
        for number, layer in enumerate(self._weights.layers):
            q, k, v = self._qkv(layer, self._norm(residual, layer.norm), cos, sin)
            residual += linear(attention(number, q, k, v, self._scores), layer.o)
            hidden = self._norm(residual, layer.post_norm)
            ids, weights = self._route(hidden, layer)
            if batch.decode:
                self._hint(experts, number, hidden)
            residual += experts.forward(number, hidden, ids, weights)
        return linear(self._norm(residual[batch.logit_rows], self._weights.norm), self._weights.head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.spec.rms_eps).to(self._weights.embed.dtype)

    def _qkv(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries [T, heads, D], keys and values [T, kv_heads, D], after head norms and rotary embedding."""
        spec = self.spec
        heads = linear(x, layer.qkv).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        turned = []
        for part, weight in ((q, layer.q_norm), (k, layer.k_norm)):
            part = part.float()
            if weight is not None:
                part = rms_norm(part, part.shape[-1:], weight, spec.rms_eps)
            turned.append(turn(part, cos, sin).to(x.dtype))
        return turned[0], turned[1], v

    def _route(self, hidden: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the chosen experts' ids [T, k] and weights [T, k] float32."""
        probs = linear(hidden, layer.gate).float().softmax(-1)
        weights, ids = probs.topk(self.spec.top_k, dim=-1)
        if self.spec.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights

    def _hint(self, experts: Experts, number: int, hidden: torch.Tensor) -> None:
        """Applies the gates of the next layers to this layer's expert input, and passes the result to `experts`."""
        for ahead in range(number + 1, min(number + 1 + experts.lookahead, self.spec.layers)):
            experts.hint(ahead, linear(hidden, self._weights.layers[ahead].gate).float().softmax(-1))
