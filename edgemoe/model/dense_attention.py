"""Computes attention with keys and values for each token: the mechanism "dense", with all its switches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import softplus

from edgemoe.kernels.cpu.paged_cache import EVERYTHING
from edgemoe.kernels.cpu.prefill_heads import MANY_HEADS
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import Angles, AttentionScores, StepContext, half_split, paged, rotate
from edgemoe.model.dense_weights import LayerReader, Norm, rms_norm


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
        if step.kernels is not None:
            attended = step.attention.read(self.number, self._by_kernel(step.kernels, parts, step), self.scores)
        else:
            q, k, v = self._by_torch(q, k, k if heads.v_is_k else v, step)
            attended = step.attention(self.number, q, k, v, self.scores)
        if heads.output_gate:
            attended = self._weigh(attended, gates.flatten(1) if self.gate is None else self.gate(x))
        return self.o(attended, self.o_bias)

    def describe_heads(self, job: npt.NDArray[np.void]) -> None:
        """Writes shapes, norms, bounds and the rotated elements into a HEADS record."""
        heads = self.heads
        job["heads"], job["kv_heads"], job["head_dim"] = heads.count, heads.kv_count, heads.dim
        job["dims"] = 0 if self.rope is None else self.rope.dims
        if self.q_norm is not None and self.k_norm is not None:
            job["q_norm"], job["k_norm"] = self.q_norm.weight.data_ptr(), self.k_norm.weight.data_ptr()
            job["centred"] = self.q_norm.centred
        job["full"], job["late"] = heads.qk_norm == "full", heads.norm_after_rope
        job["v_norm"], job["v_is_k"] = heads.v_norm, heads.v_is_k
        job["clip"], job["scale"], job["eps"] = heads.clip, self.scores.scale, self.eps

    def _by_kernel(self, kernels: Kernels, parts: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the queries [T, heads, dim] of the q/k/v product [T, heads, dim]; stores keys and values."""
        heads, job = self.heads, np.zeros(1, MANY_HEADS)
        self.describe_heads(job)
        blocks, places = step.attention.places(self.number)
        q = parts.new_empty((len(parts), heads.count, heads.dim))
        job["tokens"], job["source"], job["source_line"] = len(parts), parts.data_ptr(), parts.stride(0)
        job["line"] = self.ends[-1] * heads.dim
        job["blocks"], job["places"], job["out"] = blocks.data_ptr(), places.data_ptr(), q.data_ptr()
        if self.rope is not None:
            job["cos"], job["sin"] = (part.data_ptr() for part in step.angles(self.rope))
        kernels.place_heads(job, paged(heads.count, step.kv, self.number, self.scores))
        return q

    def _by_torch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, dtype, angles = self.heads, q.dtype, None if self.rope is None else step.angles(self.rope)
        q, k = self._place(q, self.q_norm, angles), self._place(k, self.k_norm, angles)
        if heads.clip:
            v = v.clamp(-heads.clip, heads.clip)
        if heads.v_norm:
            v = rms_norm(v.float(), None, self.eps).to(dtype)
        return q.to(dtype), k.to(dtype), v

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
