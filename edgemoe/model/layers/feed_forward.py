"""Computes what follows attention in a layer: a dense network, or experts and the network that all tokens share."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from edgemoe.kernels.cpu.expert_math import activated
from edgemoe.model.dense_weights import LayerPlace
from edgemoe.model.layers.gate import Gate


class Mlp:
    """Computes a gated network: down(activation(gate x) * up x)."""

    def __init__(self, place: LayerPlace, prefix: str) -> None:
        self._gate_up = place.matrix(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")  # [2I, H]
        self._down = place.matrix(f"{prefix}.down_proj.weight")  # [H, I]
        self._activation = place.spec.feed_forward.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(activated(self._activation, gate, up))


class ExpertLayer:
    """The gate of a layer with experts, and what its tokens share."""

    def __init__(self, place: LayerPlace) -> None:
        feed_forward = place.spec.feed_forward
        self.gate = Gate(place)
        self._shared = Mlp(place, "mlp.shared_experts") if feed_forward.shared_width else None
        self._shared_gate = place.read("mlp.shared_expert_gate.weight") if feed_forward.shared_gate else None

    @property
    def has_shared(self) -> bool:
        """Returns whether tokens share something."""
        return self._shared is not None

    def shared(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Returns what every token's output has besides its experts', [T, H] in the model's dtype, if anything."""
        if self._shared is None:
            return None
        output = self._shared(hidden)
        return output if self._shared_gate is None else output * linear(hidden, self._shared_gate).sigmoid()
