"""Computes a layer for few rows on a GPU, by kernels of its own where they can, else by torch's operations.

None of them waits for the GPU, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch.nn.functional import linear

from edgemoe.model.attention import AttentionScores, StepContext
from edgemoe.model.convolution import ShortConvolution
from edgemoe.model.decoder_layers import DecoderLayer, MoeRunner, SerialLayer
from edgemoe.model.delta_net import NORM_EPS, DeltaNet
from edgemoe.model.dense_attention import DenseAttention
from edgemoe.model.dense_weights import Norm
from edgemoe.model.feed_forward import ExpertLayer
from edgemoe.model.kv import CodedKV, LayerStates
from edgemoe.model.latent_attention import LatentAttention
from edgemoe.model.mamba import Mamba


class RowPlaces(Protocol):
    """The attention of single tokens, and where their keys and values go."""

    positions: torch.Tensor  # [T]

    def blocks(self, layer: int) -> torch.Tensor:
        """Returns the blocks [T] to which a layer's keys and values go."""

    def single(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        """Returns the attention [T, heads, value width] of q [T, heads, key width]."""


class RowCalls(MoeRunner, ABC):
    """Calls the experts of a step of few rows."""

    @abstractmethod
    def add_experts(self, layer: SerialLayer, experts: ExpertLayer, residual: torch.Tensor) -> None:
        """Adds the outputs of the layer's chosen and shared experts to `residual`."""


def compute(layer: DecoderLayer, residual: torch.Tensor, step: StepContext, calls: RowCalls) -> None:
    """Adds the layer's output to `residual` [T, H] float32."""
    if not isinstance(layer, SerialLayer):
        layer(residual, step, calls)
        return
    if isinstance(layer.attention, DenseAttention) and _places_heads(layer.attention, step):
        _attend(layer, layer.attention, residual, step)
    elif isinstance(layer.attention, LatentAttention) and not _is_coded(step, layer.attention.number):
        _attend_latents(layer, layer.attention, residual, step)
    elif isinstance(layer.attention, DeltaNet):
        _step_delta_net(layer, layer.attention, residual, step)
    elif isinstance(layer.attention, Mamba):
        _step_mamba(layer, layer.attention, residual, step)
    elif isinstance(layer.attention, ShortConvolution):
        _step_convolution(layer, layer.attention, residual, step)
    elif layer.attention is not None:
        residual.add_(layer.attention(normalised(residual, layer.norm, layer.dtype), step), alpha=layer.factor)
    if isinstance(layer.feed_forward, ExpertLayer) and _is_chosen_by_kernel(layer.feed_forward):
        calls.add_experts(layer, layer.feed_forward, residual)
    else:
        layer.feed_in(residual, calls)


def _places_heads(attention: DenseAttention, step: StepContext) -> bool:
    """Returns whether one kernel turns the attention's heads and writes them to the cache."""
    return attention.heads.qk_norm != "full" and attention.gate is None and not _is_coded(step, attention.number)


def _is_coded(step: StepContext, layer: int) -> bool:
    return isinstance(step.kv.layers[layer], CodedKV)


def _is_chosen_by_kernel(layer: ExpertLayer) -> bool:
    gate, router = layer.gate, layer.gate.router
    grouped = router.top_groups != router.groups
    plain = gate.input_scale is None and not router.logit_cap and not router.added_mass and layer.latent_in is None
    return plain and not (grouped and router.experts & (router.experts - 1))


def _attend(layer: SerialLayer, attention: DenseAttention, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_dense

    rows: RowPlaces = step.attention  # type: ignore[assignment]
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
    given = product(residual, attention.qkv.rows, layer.norm, attention.qkv_bias, layer.dtype)
    q = residual.new_empty((len(residual), heads.count, heads.dim), dtype=layer.dtype)
    angles = None if attention.rope is None else step.angles(attention.rope)
    pages = step.kv.layers[attention.number]
    decode_dense.placed(given, how, angles, rows.blocks(attention.number), rows.positions, pages, q)
    attended = rows.single(attention.number, q, attention.scores).flatten(1)
    if heads.output_gate:
        attended = attended * given[:, attention.ends[-1] * heads.dim :].sigmoid().to(layer.dtype)
    add_product(residual, attended, attention.o.rows, attention.o_bias, layer.factor)


def _attend_latents(layer: SerialLayer, attention: LatentAttention, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_latent

    rows: RowPlaces = step.attention  # type: ignore[assignment]
    heads, count, norm, dtype = attention.heads, len(residual), layer.norm, layer.dtype
    how = decode_latent.LatentPlaces(
        heads.count, heads.plain, heads.dim, heads.rank, attention.norm.weight, attention.norm.eps
    )
    latent = product(residual, attention.latent.rows, norm, None, dtype)
    if attention.query_latent is None or attention.query_norm is None:
        given = product(residual, attention.query.rows, norm, None, dtype)
    else:
        given = product(residual, attention.query_latent.rows, norm, None, dtype).float()
        given = product(given, attention.query.rows, attention.query_norm, None, dtype)
    if (factors := attention.growth(step.positions)) is not None:
        given *= factors.to(given.dtype)[:, None]
    q = residual.new_empty((count, heads.count, heads.rank + heads.dim), dtype=dtype)
    lines = step.kv.layers[attention.number].keys
    blocks = rows.blocks(attention.number)
    decode_latent.placed(given, latent, how, step.angles(attention.rope), blocks, rows.positions, lines, q)
    decode_latent.multiplied_by_head(given.view(count, heads.count, heads.key), attention.keys, q)
    means = rows.single(attention.number, q, attention.scores)
    values = residual.new_empty((count, heads.count, heads.value), dtype=dtype)
    decode_latent.multiplied_by_head(means, attention.values, values)
    add_product(residual, values.flatten(1), attention.out.rows, None, layer.factor)


def _step_delta_net(layer: SerialLayer, net: DeltaNet, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_states

    weights, (states, *slots) = net.weights, _states(step, net.number)
    convolution = decode_states.Convolution(weights.convolution, None, states.tails, *slots)
    heads = decode_states.HeadStates(net.heads.kv_count, weights.rates, weights.dt_bias, states.matrices, *slots)
    projected = product(residual, weights.project.rows, layer.norm, None, layer.dtype)
    own = product(residual, weights.own, layer.norm, None, layer.dtype)
    mixed = residual.new_empty((len(residual), net.heads.channels))
    decode_states.convolved(projected, 0, convolution, mixed)
    out = residual.new_empty((len(residual), net.heads.values), dtype=layer.dtype)
    decode_states.delta_step(mixed, projected, own, heads, weights.norm, NORM_EPS, net.eps, out)
    add_product(residual, out, weights.out.rows, None, layer.factor)


def _step_mamba(layer: SerialLayer, mamba: Mamba, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_dense, decode_states

    count, groups, (states, *slots) = len(residual), mamba.heads.kv_count, _states(step, mamba.number)
    convolution = decode_states.Convolution(mamba.taps, mamba.bias, states.tails, *slots)
    heads = decode_states.HeadStates(groups, mamba.rates, mamba.dt_bias, states.matrices, *slots)
    projected = product(residual, mamba.project.rows, layer.norm, mamba.project_bias, layer.dtype)
    mixed = residual.new_empty((count, mamba.heads.channels))
    decode_states.convolved(projected, mamba.heads.values, convolution, mixed)
    out = residual.new_empty((count, mamba.heads.values))
    decode_states.mamba_step(mixed, projected, heads, mamba.skip, out)
    normed = decode_dense.normalised(out.view(count * groups, -1), mamba.norm, mamba.eps, layer.dtype)
    add_product(residual, normed.view(count, -1), mamba.out.rows, mamba.out_bias, layer.factor)


def _step_convolution(layer: SerialLayer, short: ShortConvolution, residual: torch.Tensor, step: StepContext) -> None:
    from edgemoe.kernels.gpu import decode_states

    states, *slots = _states(step, short.number)
    convolution = decode_states.Convolution(short.taps, short.bias, states.tails, *slots)
    projected = product(residual, short.project.rows, layer.norm, short.project_bias, layer.dtype)
    channels = short.taps.shape[1]
    out = residual.new_empty((len(residual), channels), dtype=layer.dtype)
    decode_states.convolved(projected, 2 * channels, convolution, out, gated=True)
    add_product(residual, out, short.out.rows, short.out_bias, layer.factor)


def _states(step: StepContext, layer: int) -> tuple[LayerStates, torch.Tensor, torch.Tensor]:
    """Returns a layer's states, and the slots [T] that the step reads and writes."""
    assert step.kv.states is not None
    return step.kv.states.layer(layer), step.states.reads, step.states.writes


def product(
    x: torch.Tensor, rows: torch.Tensor, norm: Norm, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns float32 x [T, H], normalised, times a matrix of rows [R, H]: [T, R], of few tokens in float32."""
    from edgemoe.kernels.gpu import decode_dense

    if len(x) > decode_dense.MOST_ROWS or norm.centred:
        return linear(normalised(x, norm, dtype), rows, bias)
    out = x.new_empty((len(x), len(rows)))
    decode_dense.multiplied(x, rows, out, decode_dense.GpuProduct(norm.weight, norm.eps, bias))
    return out


def normalised(
    x: torch.Tensor, norm: Norm, dtype: torch.dtype, planes: torch.Tensor | None = None, kind: int = -1
) -> torch.Tensor:
    """Returns float32 rows x [T, H] normalised, in a type; writes them to `planes`, too, for experts of a kind."""
    from edgemoe.kernels.gpu import decode_dense, experts_decode

    if not norm.centred:
        return decode_dense.normalised(x, norm.weight, norm.eps, dtype, planes, kind)  # type: ignore[no-any-return]
    result = norm(x).to(dtype)
    if planes is not None:
        planes.copy_(experts_decode.in_planes(result, kind))
    return result


def add_product(
    to: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, factor: float
) -> None:
    """Adds x [T, C] times a matrix of rows [R, C], times `factor`, to float32 numbers [T, R]."""
    from edgemoe.kernels.gpu import decode_dense

    if len(x) > decode_dense.MOST_ROWS:
        to.add_(linear(x, rows, bias), alpha=factor)
    else:
        decode_dense.multiplied(x, rows, to, decode_dense.GpuProduct(bias=bias, add=True, factor=factor))
