"""Computes attention with keys and values for each token: the mechanism "dense", with all its switches."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from edgemoe.kernels.cpu.runtime import EVERYTHING
from edgemoe.model.attention import AttentionScores, StepContext
from edgemoe.model.dense_weights import LayerReader, Norm, rms_norm
from edgemoe.model.rope import Angles, half_split, rotate


class DenseAttention:
    """The attention of one layer."""

    def __init__(self, reader: LayerReader) -> None:
        heads = reader.attention.heads
        self.number, self.heads, self.rope = reader.number, heads, reader.attention.rope
        self.eps = reader.spec.block.eps
        qkv = [f"self_attn.{part}_proj" for part in ("qk" if heads.v_is_k else "qkv")]
        self.qkv = reader.matrix(
            *(f"{name}.weight" for name in qkv)
        )  # queries, keys, values if any, output gates if any
        self.o = reader.matrix("self_attn.o_proj.weight")  # [H, count dim]
        self.qkv_bias = reader.read(*(f"{name}.bias" for name in qkv)) if heads.qkv_bias else None
        self.o_bias = reader.read("self_attn.o_proj.bias") if heads.o_bias else None
        self.q_norm = self.k_norm = None
        if heads.qk_norm != "none":
            self.q_norm, self.k_norm = (reader.norm(f"self_attn.{part}_norm.weight") for part in "qk")
        keys = heads.count + heads.kv_count
        self.ends = (heads.count, keys, keys if heads.v_is_k else keys + heads.kv_count)
        self.gate = None
        if heads.output_gate == "queries":
            self._order_gates()
        elif heads.output_gate:
            self.gate = reader.matrix("self_attn.gate_proj.weight")  # [count dim or count, H]
        if self.rope is not None and self.rope.interleaved:
            self._order_pairs(self.rope.dims)
        sinks = reader.read("self_attn.sinks", dtype=torch.float32) if heads.sinks else None
        self.scores = AttentionScores(heads.scale or heads.dim**-0.5, heads.window or EVERYTHING, sinks)

    def _order_pairs(self, dims: int) -> None:
        """Reorders the rows of queries and keys so that pairs lie in the two halves."""
        heads = self.heads
        turned = (heads.count + heads.kv_count) * heads.dim
        for tensor, size in ((self.qkv.rows, turned), (self.qkv_bias, turned)):
            if tensor is not None:
                tensor[:size] = half_split(tensor[:size], heads.dim, dims)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.weight.copy_(half_split(norm.weight, heads.dim, dims))

    def _order_gates(self) -> None:
        """Moves the rows of output gates behind all others."""
        heads = self.heads
        rows = torch.arange(2 * heads.count * heads.dim).view(heads.count, 2, heads.dim)
        others = torch.arange(rows.numel(), (heads.count + self.ends[-1]) * heads.dim)
        order = torch.cat([rows[:, 0].flatten(), others, rows[:, 1].flatten()])
        for tensor in (self.qkv.rows, self.qkv_bias):
            if tensor is not None:
                tensor.copy_(tensor[order])

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype; fills the cache."""
        heads = self.heads
        parts = self.qkv(x, self.qkv_bias).view(len(x), -1, heads.dim)
        q, k, v, gates = torch.tensor_split(parts, self.ends, dim=1)
        if heads.v_is_k:
            v = k
        angles = None if self.rope is None else step.angles(self.rope)
        q, k = self._place(q, self.q_norm, angles), self._place(k, self.k_norm, angles)
        if heads.clip:
            v = v.clamp(-heads.clip, heads.clip)
        if heads.v_norm:
            v = rms_norm(v.float(), None, self.eps).to(x.dtype)
        attended = step.attention(self.number, q.to(x.dtype), k.to(x.dtype), v, self.scores)
        if heads.output_gate:
            attended = self._weigh(attended, gates.flatten(1) if self.gate is None else self.gate(x))
        return self.o(attended, self.o_bias)

    def _weigh(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Returns outputs [T, count dim] weighted by gates of elements [T, count dim] or of heads [T, count]."""
        gates = softplus(gates.float()).to(gates.dtype) if self.heads.gate_softplus else gates.sigmoid()
        per_head = attended.view(len(attended), gates.shape[1], -1)
        return (per_head * gates[..., None]).view(attended.shape)

    def _place(self, part: torch.Tensor, norm: Norm | None, angles: Angles | None) -> torch.Tensor:
        """Returns queries or keys [T, heads, dim] after norm, bound and rotary embedding, in float32."""
        heads, part = self.heads, part.float()
        if norm is not None and not heads.norm_after_rope:
            part = self._normalise(part, norm)
        if heads.clip:
            part = part.clamp(-heads.clip, heads.clip)
        if angles is not None:
            part = rotate(part, *angles)
        if norm is not None and heads.norm_after_rope:
            part = self._normalise(part, norm)
        return part

    def _normalise(self, part: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(part) if self.heads.qk_norm == "head" else norm(part.flatten(1)).view(part.shape)
