"""Computes a layer of few rows on a GPU by few launches, where kernels have what its records ask for.

What they lack, attention or feed-forward, the layer computes itself by torch's operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from edgemoe.model.attention import StepContext
from edgemoe.model.decoder_layers import DecoderLayer, ExpertCalls, SerialLayer
from edgemoe.model.dense_weights import Matrix, Norm
from edgemoe.model.feed_forward import ExpertLayer, Gate
from edgemoe.model.kv import CodedKV
from edgemoe.model.layers.dense_attention import DenseAttention

if TYPE_CHECKING:
    from edgemoe.model.decode_rows import RowAttention, RowExperts


def compute(layer: DecoderLayer, residual: torch.Tensor, step: StepContext, calls: RowCalls) -> None:
    """Adds to `residual` [T, H] float32 what the layer computes."""
    if not isinstance(layer, SerialLayer):
        layer(residual, step, calls)
        return
    if isinstance(layer.attention, DenseAttention) and _places_heads(layer.attention, step):
        _attend(layer, layer.attention, residual, step)
    else:
        residual.add_(layer.attention(layer.norm(residual).to(layer.dtype), step), alpha=layer.factor)
    if isinstance(layer.feed_forward, ExpertLayer) and _is_chosen_by_kernel(layer.feed_forward.gate):
        calls.add_experts(layer, layer.feed_forward, residual)
    else:
        layer.feed_in(residual, calls)


def _places_heads(attention: DenseAttention, step: StepContext) -> bool:
    """Returns whether one kernel turns the attention's heads and writes them to the cache."""
    return attention.heads.qk_norm != "full" and not isinstance(step.kv.layers[attention.number], CodedKV)


def _is_chosen_by_kernel(gate: Gate) -> bool:
    router = gate.router
    grouped = router.top_groups != router.groups
    return gate.input_scale is None and not (grouped and router.experts & (router.experts - 1))


def _attend(layer: SerialLayer, attention: DenseAttention, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_dense

    rows: RowAttention = step.attention  # type: ignore[assignment]
    heads = attention.heads
    how = decode_dense.HeadPlaces(
        None if attention.q_norm is None else attention.q_norm.weight,
        None if attention.k_norm is None else attention.k_norm.weight,
        attention.eps,
        heads.count,
        heads.kv_count,
        heads.dim,
        0 if attention.rope is None else attention.rope.dims,
        heads.clip,
        heads.norm_after_rope,
        heads.v_norm,
        heads.v_is_k,
    )
    given = product(residual, attention.qkv, layer.norm, attention.qkv_bias, layer.dtype)
    q = residual.new_empty((len(residual), heads.count, heads.dim), dtype=layer.dtype)
    angles = None if attention.rope is None else step.angles(attention.rope)
    pages = step.kv.layers[attention.number]
    decode_dense.placed(given, how, angles, rows.blocks, rows.positions, pages, q)
    attended = rows.single(attention.number, q, attention.scores).flatten(1)
    if heads.output_gate:
        attended = attended * given[:, attention.ends[-1] * heads.dim :].sigmoid().to(layer.dtype)
    add_product(residual, attended, attention.o, attention.o_bias, layer.factor)


def product(x: torch.Tensor, matrix: Matrix, norm: Norm, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns float32 rows x [T, H], normalised, times a matrix, [T, R], of few rows in float32."""
    from edgemoe.kernels.gpu import decode_dense

    if len(x) > decode_dense.MOST_ROWS:
        return linear(norm(x).to(dtype), matrix.rows, bias)
    out = x.new_empty((len(x), len(matrix)))
    decode_dense.multiplied(x, matrix.rows, out, decode_dense.Product(norm.weight, norm.eps, bias))
    return out


def add_product(to: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, factor: float) -> None:
    """Adds x [T, C] times a matrix, times `factor`, to float32 rows [T, R]."""
    from edgemoe.kernels.gpu import decode_dense

    if len(x) > decode_dense.MOST_ROWS:
        to.add_(linear(x, matrix.rows, bias), alpha=factor)
    else:
        decode_dense.multiplied(x, matrix.rows, to, decode_dense.Product(bias=bias, add=True, factor=factor))


class RowCalls(ExpertCalls):
    """Calls the experts of a step of few rows, layer after layer."""

    def __init__(self, experts: RowExperts, gates: tuple[Gate, ...]) -> None:
        super().__init__(experts, gates, forecast=False)
        self._rows = experts

    def add_experts(self, layer: SerialLayer, experts: ExpertLayer, residual: torch.Tensor) -> None:
        """Adds what the layer's experts and what its tokens share compute to `residual`."""
        from edgemoe.kernels.gpu import decode_dense, experts_decode

        gate, number, rows, slots = experts.gate, self._number, len(residual), self._rows.slots
        self._number += 1
        kind, router = slots.kind(number), gate.router
        few = rows <= decode_dense.MOST_ROWS
        hidden = None
        if not few or experts.has_shared:
            hidden = layer.post_norm(residual).to(layer.dtype)
        if few:
            logits, planes = residual.new_empty((rows, router.experts)), torch.empty_like(residual)
            norm, rounded = layer.post_norm, layer.dtype == torch.bfloat16
            with_planes = decode_dense.Product(norm.weight, norm.eps, planes=planes, kind=kind, rounded=rounded)
            decode_dense.multiplied(residual, gate.weight, logits, with_planes)
        else:
            assert hidden is not None
            logits = linear(hidden.to(gate.weight.dtype), gate.weight).float()
            planes = experts_decode.in_planes(hidden, kind)
        how = decode_dense.ExpertChoice(
            router.top_k,
            router.score == "softmax",
            gate.logit_bias,
            gate.selection_bias,
            gate.expert_scale,
            router.renormalise,
            router.least_mass,
            router.scale,
            router.groups,
            router.top_groups,
            router.group_score == "top2",
        )
        ids, shares = self._rows.ids[number], self._rows.weights[number]
        decode_dense.chosen(logits, how, ids, shares)
        shared = experts.shared(hidden) if hidden is not None else None
        slots.add(number, planes, ids, shares, residual, layer.factor)
        if shared is not None:
            residual.add_(shared, alpha=layer.factor)
