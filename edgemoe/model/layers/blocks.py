"""What a layer does with the residual: attention, then experts or a dense network; Gemma has both at once [Gemma-4]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from edgemoe.model.attention import StepContext
from edgemoe.model.dense_weights import LayerPlace, Norm
from edgemoe.model.feed_forward import ExpertLayer, Gate, Mlp
from edgemoe.model.kv import DTYPES
from edgemoe.model.layers.mechanisms import MECHANISMS, Mechanism
from edgemoe.types.step import Experts


class ExpertCalls:
    """Calls the experts of a step, layer after layer, and tells them what the gates of the next layers forecast."""

    def __init__(self, experts: Experts, gates: Sequence[Gate], forecast: bool) -> None:
        self._experts, self._gates, self._number = experts, gates, 0
        self._lookahead = experts.lookahead if forecast else range(0)

    def __call__(self, chosen_by: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the next layer's output [T, H] for `hidden` [T, H]; its gate is given `chosen_by` [T, H]."""
        number, gates = self._number, self._gates
        self._number += 1
        ids, weights = gates[number].route(chosen_by)
        for ahead in range(number + self._lookahead.start, min(number + self._lookahead.stop, len(gates))):
            self._experts.hint(ahead, gates[ahead].chances(chosen_by))
        return self._experts.forward(number, hidden, ids, weights)


class DecoderLayer(Protocol):
    """One layer of the decoder."""

    @property
    def gate(self) -> Gate | None:
        """Returns the gate of its experts, where it has some."""

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: ExpertCalls) -> None:
        """Adds to `residual` [T, H] float32 what the layer computes."""


@dataclass(frozen=True, slots=True)
class SerialLayer:
    """A layer of two parts, each with a norm before it. Matrices are in the model's dtype, norms in float32."""

    norm: Norm
    attention: Mechanism
    post_norm: Norm
    feed_forward: ExpertLayer | Mlp
    factor: float  # of what is added to the residual
    dtype: torch.dtype

    @property
    def gate(self) -> Gate | None:
        return self.feed_forward.gate if isinstance(self.feed_forward, ExpertLayer) else None

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: ExpertCalls) -> None:
        residual.add_(self.attention(self.norm(residual).to(self.dtype), step), alpha=self.factor)
        self.feed_in(residual, experts)

    def feed_in(self, residual: torch.Tensor, experts: ExpertCalls) -> None:
        """Adds what the layer's second part computes."""
        hidden = self.post_norm(residual).to(self.dtype)
        if not isinstance(self.feed_forward, ExpertLayer):
            residual.add_(self.feed_forward(hidden), alpha=self.factor)
            return
        output, shared = experts(hidden, hidden), self.feed_forward.shared(hidden)
        residual.add_(output if shared is None else output + shared, alpha=self.factor)


class ParallelLayer:
    """A layer whose dense network and experts read the same residual, with norms before and after each part."""

    def __init__(self, place: LayerPlace) -> None:
        self._attention = MECHANISMS[place.attention.heads.mechanism](place)
        self._dense = Mlp(place, "mlp.shared_experts")
        self.gate, self._dtype = Gate(place), DTYPES[place.spec.dtype]
        self._scalar = place.read("layer_scalar", dtype=torch.float32)

        def norm(name: str) -> Norm:
            return place.norm(f"{name}.weight")

        self._before_attention, self._after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self._before_dense = norm("pre_feedforward_layernorm")
        self._after_dense = norm("post_feedforward_layernorm_1")
        self._before_experts = norm("pre_feedforward_layernorm_2")
        self._after_experts = norm("post_feedforward_layernorm_2")
        self._after_both = norm("post_feedforward_layernorm")

    def __call__(self, residual: torch.Tensor, step: StepContext, experts: ExpertCalls) -> None:
        attended = self._attention(self._before_attention(residual).to(self._dtype), step)
        residual += self._after_attention(attended.float())
        dense = self._dense(self._before_dense(residual).to(self._dtype))
        mixed = experts(residual, self._before_experts(residual).to(self._dtype))
        both = self._after_dense(dense.float()) + self._after_experts(mixed.float())
        residual += self._after_both(both)
        residual *= self._scalar


def make_layer(place: LayerPlace) -> DecoderLayer:
    """Reads a layer's weights."""
    spec = place.spec
    if spec.block.parallel:
        return ParallelLayer(place)
    dense = place.number in spec.feed_forward.dense_layers
    return SerialLayer(
        norm=place.norm("input_layernorm.weight"),
        attention=MECHANISMS[place.attention.heads.mechanism](place),
        post_norm=place.norm("post_attention_layernorm.weight"),
        feed_forward=Mlp(place, "mlp") if dense else ExpertLayer(place),
        factor=spec.block.residual,
        dtype=DTYPES[spec.dtype],
    )
