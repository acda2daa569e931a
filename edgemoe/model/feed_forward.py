"""Chooses each token's experts, as the router's record says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from edgemoe.kernels.cpu.expert_math import activated
from edgemoe.model.dense_weights import LayerReader, rms_norm

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Gate:
    """The gate of one layer."""

    def __init__(self, reader: LayerReader) -> None:
        self.router = router = reader.spec.router
        self.weight = reader.read("mlp.gate.weight", dtype=torch.float32 if router.float32 else None)  # [E, H]
        self.logit_bias: torch.Tensor | None = None  # [E] float32
        self.selection_bias = None
        if router.logit_bias:
            self.logit_bias = reader.read("mlp.gate.bias", dtype=torch.float32)
        self.input_scale = self.expert_scale = None
        if router.input_norm:
            self._eps, root = reader.spec.block.eps, reader.spec.hidden**-0.5
            self.input_scale = reader.read("mlp.gate.scale", dtype=torch.float32) * root
        if router.expert_scale:
            self.expert_scale = reader.read("mlp.gate.per_expert_scale", dtype=torch.float32)
        if router.selection_bias:
            self.selection_bias = reader.read("mlp.gate.e_score_correction_bias", dtype=torch.float32)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the chosen experts' ids [T, k] and weights [T, k] float32 for `hidden` [T, H]."""
        router, scores = self.router, self._scores(self._logits(hidden))
        selection = self._selection_scores(scores)
        weights, ids = selection.topk(router.top_k, dim=-1)
        if selection is not scores:
            weights = scores.gather(-1, ids)
        if router.renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(router.least_mass).add(router.added_mass)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        return ids, weights * router.scale if router.scale != 1.0 else weights

    def chances(self, hidden: torch.Tensor, multiply: Multiply = linear) -> torch.Tensor:
        """Returns the probability of each expert, [T, E] float32; each token's sum to 1. `multiply` is as `linear`."""
        scores = self._scores(self._logits(hidden, multiply))
        selection = self._selection_scores(scores)
        if selection is scores and self.router.score == "softmax":
            return scores
        open_to = selection.isfinite()
        least = selection.masked_fill(~open_to, torch.inf).amin(-1, keepdim=True)
        above = (selection - least).masked_fill(~open_to, 0.0) + torch.finfo(torch.float32).tiny
        return above / above.sum(-1, keepdim=True)

    def _logits(self, hidden: torch.Tensor, multiply: Multiply = linear) -> torch.Tensor:
        if self.input_scale is not None:
            hidden = rms_norm(hidden.float(), self.input_scale, self._eps)
        return multiply(hidden.to(self.weight.dtype), self.weight).float()

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if self.router.logit_cap:
            logits = torch.tanh(logits / self.router.logit_cap) * self.router.logit_cap
        return logits.softmax(-1) if self.router.score == "softmax" else logits.sigmoid()

    def _selection_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores by which experts are chosen, [T, E]; -inf for experts of groups that are not selected."""
        router = self.router
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if router.top_groups == router.groups:
            return scores
        grouped = scores.view(len(scores), router.groups, -1)  # [T, groups, E / groups]
        best = grouped.amax(-1) if router.group_score == "max" else grouped.topk(2, dim=-1)[0].sum(-1)
        chosen = best.topk(router.top_groups, dim=-1)[1]
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
        return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


class Mlp:
    """Computes a dense network: down(activation(gate x, up x)), or down(activation(up x))."""

    def __init__(self, reader: LayerReader, prefix: str, stacked: bool = False) -> None:
        self.activation = reader.spec.feed_forward.activation
        gate_up = ("gate_up_proj",) if stacked else ("gate_proj", "up_proj")[-self.activation.inputs :]
        self.gate_up = reader.matrix(*(f"{prefix}.{part}.weight" for part in gate_up))  # [2I, H], or up alone
        self.down = reader.matrix(f"{prefix}.down_proj.weight")  # [H, I]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = self.gate_up(x).chunk(self.activation.inputs, dim=-1)
        return self.down(activated(self.activation, *products))


class ExpertLayer:
    """The gate of a layer with experts, and the experts that all its tokens share."""

    def __init__(self, reader: LayerReader) -> None:
        feed_forward = reader.spec.feed_forward
        self.gate = Gate(reader)
        self.shared_mlp: Mlp | None = None
        if feed_forward.shared_width:
            self.shared_mlp = Mlp(reader, "mlp.shared_experts", feed_forward.shared_stacked)
        self.factor = feed_forward.shared_factor
        self.shared_gate = reader.read("mlp.shared_expert_gate.weight") if feed_forward.shared_gate else None
        self.latent_in = self.latent_out = None
        if feed_forward.latent:
            self.latent_in = reader.matrix("mlp.fc1_latent_proj.weight")  # [latent, H]
            self.latent_out = reader.matrix("mlp.fc2_latent_proj.weight")  # [H, latent]

    @property
    def has_shared(self) -> bool:
        """Returns whether tokens share something."""
        return self.shared_mlp is not None

    def narrowed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the routed experts' input for `hidden` [T, H], in the width in which they work."""
        return hidden if self.latent_in is None else self.latent_in(hidden)

    def widened(self, output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the routed experts' sum [T, H]. Where it is narrower, it is rounded to the model's dtype first."""
        return output if self.latent_out is None else self.latent_out(output.to(dtype))

    def shared(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Returns the shared experts' output, [T, H] in the model's dtype; None without any."""
        if self.shared_mlp is None:
            return None
        output = self.shared_mlp(hidden)
        if self.factor != 1.0:
            output = output * self.factor
        return output if self.shared_gate is None else output * linear(hidden, self.shared_gate).sigmoid()
