"""Computes one step's attention over paged keys and values.

On the CPU, kernels read the pages in place: one kernel serves all sequences of one token, another one prefilling
sequence. Other devices gather blocks and compute a prompt's queries in tiles, so that memory is linear in the context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from edgemoe.families.spec import ModelSpec, RopeSpec
from edgemoe.kernels.cpu.paged_cache import EVERYTHING, PagedCache
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.kv import EVERY, BlockPool, KVCache, StepStates
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS, Batch

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, dims / 2]


class RotaryEmbedding:
    """Computes cos and sin of positions: default, linear [Linear-RoPE], proportional and YaRN [YaRN], in float32.

    The two halves of the rotated elements form pairs. Weights whose neighbours form pairs are reordered on reading.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._frequencies = frequencies(rope).to(device)  # [dims / 2]
        self._scale = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> Angles:
        """Returns cos and sin [T, dims / 2] at positions [T]."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dims of heads x [T, heads, D] by cos and sin [T, dims / 2]."""
    dims = 2 * cos.shape[-1]
    low, high = x[..., :dims].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., dims:]), dim=-1)


def half_split(rows: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Returns rows [heads * dim, ...] with the even ones of each head's first `dims` before the odd ones."""
    order = [*range(0, dims, 2), *range(1, dims, 2), *range(dims, dim)]
    return rows.view(-1, dim, *rows.shape[1:])[:, order].flatten(0, 1)


def frequencies(rope: RopeSpec) -> torch.Tensor:
    """Returns radians per position, [dims / 2] float32."""
    dims = rope.dims
    periods = rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if rope.kind == "default":
        return 1.0 / periods
    if rope.kind == "linear":
        return 1.0 / periods / rope.factor
    if rope.kind == "proportional":
        turning = torch.arange(dims // 2) < int(rope.share * dims // 2)
        return torch.where(turning, 1.0 / periods / rope.factor, 0.0)
    share = _extrapolated(rope, dims)
    return (1.0 / (rope.factor * periods)) * (1.0 - share) + (1.0 / periods) * share


def _extrapolated(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Returns the ramp [dim / 2]: 1 keeps a frequency, 0 divides it by `factor` [YaRN, Eq. 17-19]."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1.0 - ramp.clamp(0.0, 1.0)


WIDER = 8  # elements that a sink adds to a head: one would do, but the fast kernels want multiples of 8


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScores:
    """The factor of scores, the tokens that have one, and each head's sink."""

    scale: float
    window: int = EVERYTHING  # tokens that a token sees, itself among them
    sinks: torch.Tensor | None = None  # [heads] float32: one more score, whose value is zero


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scores: AttentionScores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the attention [S, heads, t, D] of q [S, heads, t, D] to k and v [S, kv_heads, n, D].

    `mask` is of the n keys, after one more where there are sinks; `sinks` are shaped like q without S and D.
    """
    width = v.shape[-1]
    if sinks is not None:
        q, k, v = _with_sinks(q, k, v, sinks / scores.scale)
    grouped = q.shape[1] != k.shape[1]
    result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale, enable_gqa=grouped)
    return result[..., :width]


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, products: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Puts a key before all others that stands for the sink: `products` with the queries, and a value of zero.

    It comes first because the mask is aligned at the last key, so that every query sees it.
    """
    q = pad(q, (0, WIDER))
    q[..., -WIDER] = products
    k, v = pad(k, (0, WIDER, 1, 0)), pad(v, (0, WIDER, 1, 0))
    k[..., 0, -WIDER] = 1
    return q, k, v


QUERY_TILE = 512  # tokens


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk: rows first:after of the step, which are the last of its `context` tokens."""

    first: int
    after: int
    context: int
    number: int  # of the sequence


def tables_and_contexts(
    tables: Sequence[Sequence[int]], context_lens: Sequence[int], chosen: list[int]
) -> tuple[IntArray, IntArray]:
    """Returns block tables [S, widest] and contexts [S] of the chosen sequences.

    Tables are padded with the sequence's own last block.
    """
    contexts = np.array([context_lens[s] for s in chosen], np.int64)
    padded = np.zeros((len(chosen), -(-int(contexts.max(initial=1)) // BLOCK_TOKENS)), np.int64)
    for row, s in enumerate(chosen):
        needed = -(-context_lens[s] // BLOCK_TOKENS)
        padded[row, :needed] = tables[s][:needed]
        padded[row, needed:] = padded[row, needed - 1]
    return padded, contexts


class StepBlocks:
    """The blocks of one step in one kind of layers."""

    def __init__(
        self, batch: Batch, tables: Sequence[Sequence[int]], owner: torch.Tensor, single: list[int], pool: BlockPool
    ) -> None:
        """Reads the tables [S][blocks]; `owner` [T] is each token's sequence, `single` the sequences of one token."""
        self._device = pool.data.device
        self.tables, self._contexts = tables_and_contexts(tables, batch.context_lens, single)
        self.by_sequence = [self._tensor(table) for table in tables]
        padded = torch.nn.utils.rnn.pad_sequence(self.by_sequence, batch_first=True)  # [S, widest]
        self.rows = padded[owner, batch.positions // BLOCK_TOKENS]  # [T], where new keys and values go
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by window

    def clear_begun(self, batch: Batch, pool: BlockPool) -> None:
        """Zeroes the blocks that the step begins and does not fill, because gathering reads them whole.

        A masked position has weight 0, but 0 times a NaN that another request left there would still be NaN.
        """
        begun = [
            table[context // BLOCK_TOKENS]
            for table, context, count in zip(self.by_sequence, batch.context_lens, batch.query_lens, strict=True)
            if 0 < context % BLOCK_TOKENS <= count
        ]
        if begun:
            pool.data[torch.stack(begun)] = 0

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def gather_plan(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks [S, n] that windows of this size lie in, and the mask [S, 1, 1, n * 16] of tokens."""
        if window not in self._plans:
            first = np.maximum(self._contexts - window, 0) // BLOCK_TOKENS
            count = int((-(-self._contexts // BLOCK_TOKENS) - first).max())
            places = np.minimum(first[:, None] + np.arange(count), self.tables.shape[1] - 1)
            tokens = first[:, None] * BLOCK_TOKENS + np.arange(count * BLOCK_TOKENS)
            past = self._contexts[:, None] - 1 - tokens
            mask = torch.from_numpy((past >= 0) & (past < window))[:, None, None]
            blocks = torch.from_numpy(np.take_along_axis(self.tables, places, 1))
            self._plans[window] = blocks.to(self._device), mask.to(self._device)
        return self._plans[window]


class StepAttention:
    """Computes attention for each layer of one step, with the blocks and masks that layers of a kind share."""

    def __init__(self, batch: Batch, kv: KVCache, kernels: Kernels | None) -> None:
        self._kv, self._kernels = kv, kernels
        device = kv.data.device
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        single = [s for s, length in enumerate(batch.query_lens) if length == 1]
        self.single_rows = torch.tensor([starts[s] for s in single], dtype=torch.int64, device=device)
        self.singles = [PrefillChunk(starts[s], starts[s] + 1, batch.context_lens[s], s) for s in single]
        self._contexts = np.array([batch.context_lens[s] for s in single], np.int64)
        self.prefills = [
            PrefillChunk(starts[s], starts[s + 1], batch.context_lens[s], s)
            for s, length in enumerate(batch.query_lens)
            if length > 1
        ]
        lengths = torch.tensor(batch.query_lens, device=device)
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        pools = (kv, kv.windows)
        self._kinds = tuple(
            StepBlocks(batch, tables, owner, single, pool)
            for tables, pool in zip(batch.tables_by_kind, pools, strict=True)
            if pool is not None
        )
        self._places = batch.positions % BLOCK_TOKENS
        if kernels is None:
            for blocks, pool in zip(self._kinds, pools, strict=False):
                assert pool is not None
                blocks.clear_begun(batch, pool)

    def _blocks(self, layer: int) -> StepBlocks:
        """Returns the blocks of the kind of this layer."""
        return self._kinds[self._kv.windowed[layer]]

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionScores
    ) -> torch.Tensor:
        """Stores k and v [T, kv_heads, D] and returns the attention [T, heads * D] of q [T, heads, D].

        All are in the model's dtype, q and k after rotary embedding.
        """
        self.store(layer, k, v)
        return self.read(layer, q, scores)

    def read(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        """Returns the attention [T, heads * D] of q [T, heads, D] to keys and values that are in the cache."""
        out = torch.empty_like(q)
        for prefill in self.prefills:
            out[prefill.first : prefill.after] = self.prompt(layer, prefill, q[prefill.first : prefill.after], scores)
        if len(self.single_rows):
            out[self.single_rows] = self.single(layer, q[self.single_rows], scores)
        return out.flatten(1)

    def places(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks [T] to which a layer's keys and values go, and the places in them [T]."""
        return self._blocks(layer).rows, self._places

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Writes the step's keys [T, kv_heads, D] and its values, None where they are stored in the keys."""
        self._kv.layers[layer].store(self._blocks(layer).rows, self._places, k, v)

    def prompt(self, layer: int, prefill: PrefillChunk, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        """Returns the attention [t, heads, value width] of one prefill's queries [t, heads, D]."""
        if self._kernels is None:
            return self._gathered_prompt(layer, prefill, q, scores)
        pages = paged(q.shape[1], self._kv, layer, scores)
        return prompt_by_kernel(
            self._kernels, q, self._blocks(layer).by_sequence[prefill.number].numpy(), prefill.context, pages
        )

    def single(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        """Returns the attention [S, heads, value width] of the step's single queries [S, heads, D]."""
        attended = self._gathered if self._kernels is None else self._by_kernel
        return attended(layer, q, scores).to(q.dtype)

    def past(self, layer: int, prefill: PrefillChunk, part: slice = EVERY) -> torch.Tensor:
        """Returns a copy of the keys of one prefill's whole context, [kv_heads, context, D], or of a part of D."""
        needed = -(-prefill.context // BLOCK_TOKENS)
        pages = self._kv.layers[layer].read_keys(self._blocks(layer).by_sequence[prefill.number][:needed], part)
        return pages.transpose(0, 1).flatten(1, 2)[:, : prefill.context]

    def tokens(self, layer: int, chunk: PrefillChunk, numbers: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns a copy of a part of the keys [..., D] of tokens of these numbers [...], of a layer with one head."""
        blocks = self._blocks(layer).by_sequence[chunk.number][numbers // BLOCK_TOKENS]
        return self._kv.layers[layer].read_tokens(blocks, numbers % BLOCK_TOKENS, part)

    def _gathered_prompt(
        self, layer: int, prefill: PrefillChunk, q: torch.Tensor, scores: AttentionScores
    ) -> torch.Tensor:
        begin = max(0, prefill.context - (prefill.after - prefill.first) + 1 - scores.window) // BLOCK_TOKENS
        needed = -(-prefill.context // BLOCK_TOKENS)
        pages = self._pages(
            layer, self._blocks(layer).by_sequence[prefill.number][begin:needed]
        )  # [n, kv_heads, 16, D] each
        keys, values = (part.transpose(0, 1).flatten(1, 2)[None] for part in pages)  # [1, kv_heads, n * 16, D]
        seen = prefill.context - begin * BLOCK_TOKENS
        return prompt_in_tiles(q, keys[:, :, :seen], values[:, :, :seen], scores)

    def _pages(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the keys and values of blocks."""
        kept = self._kv.layers[layer]
        return kept.read_keys(blocks), kept.read_values(blocks)

    def _by_kernel(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        assert self._kernels is not None
        pages = paged(q.shape[1], self._kv, layer, scores)
        out = torch.empty((len(q), pages.heads, pages.value_dim), dtype=torch.float32)
        q = q.contiguous()
        tables = self._blocks(layer).tables
        self._kernels.attend(q.data_ptr(), len(q), tables, self._contexts, pages, out.data_ptr())
        return out

    def _gathered(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        """Returns the attention of single queries. The queries of one KV head's group form the query dimension."""
        blocks, mask = self._blocks(layer).gather_plan(scores.window)
        pages = self._pages(layer, blocks)  # [S, n, kv_heads, 16, D] each
        keys, values = (part.transpose(1, 2).flatten(2, 3) for part in pages)  # [S, kv_heads, n * 16, D]
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
        sinks = None if scores.sinks is None else scores.sinks.view(grouped.shape[1:3])
        mask = mask if sinks is None else pad(mask, (1, 0), value=True)
        return attend(grouped, keys, values, mask, scores, sinks).flatten(1, 2)


def prompt_by_kernel(
    kernels: Kernels, q: torch.Tensor, table: IntArray, context: int, pages: PagedCache
) -> torch.Tensor:
    """Returns the attention [t, heads, value width] of a context's last queries [t, heads, D] to its pages."""
    q = q.contiguous()
    out = q.new_empty((len(q), pages.heads, pages.value_dim))
    kernels.prefill(q.data_ptr(), len(q), table, context, pages, out.data_ptr())
    return out


def prompt_in_tiles(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
    """Returns the attention [t, heads, D] of a context's last queries to its keys and values [1, kv_heads, n, D]."""
    tiles, seen = [], keys.shape[2]
    for first in range(0, len(q), QUERY_TILE):
        after = min(first + QUERY_TILE, len(q))
        end = seen - (len(q) - after)
        start = max(0, end - (after - first) + 1 - scores.window)
        tiles.append(_tile(q[first:after], keys[:, :, start:end], values[:, :, start:end], scores))
    return torch.cat(tiles)


def _tile(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
    """Returns the attention [t, heads, D] of at most QUERY_TILE queries, the last of which has the last key."""
    queries, sinks = q.transpose(0, 1)[None], scores.sinks  # [1, heads, t, D]
    mask = causal_mask(len(q), keys.shape[2], scores, q.device)
    each = None if sinks is None else sinks[:, None]
    return attend(queries, keys, values, mask, scores, each)[0].transpose(0, 1)


def causal_mask(queries: int, keys: int, scores: AttentionScores, device: torch.device) -> torch.Tensor:
    """Returns the mask of keys that the last queries see, a sink first; without memory on a GPU without a window."""
    before = 0 if scores.sinks is None else 1
    if device.type == "cuda" and keys <= scores.window:
        from torch.nn.attention.bias import causal_lower_right  # takes seconds to load

        return causal_lower_right(queries, before + keys)
    past = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    return pad((past >= 0) & (past < scores.window), (before, 0), value=True)


def paged(heads: int, kv: KVCache, layer: int, scores: AttentionScores) -> PagedCache:
    """Describes a layer's keys and values for the kernel: addresses, shapes, window and scale."""
    pages = kv.layers[layer]
    keys = pages.keys
    return PagedCache(
        heads=heads,
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_dim=pages.values.shape[3],
        scale=scores.scale,
        keys=keys.data_ptr(),
        values=pages.values.data_ptr(),
        block_stride=keys.stride(0) * keys.element_size(),
        head_stride=keys.stride(1) * keys.element_size(),
        window=scores.window,
        sinks=0 if scores.sinks is None else scores.sinks.data_ptr(),
        codes=keys.dtype == torch.int8,
    )


class StepContext:
    """One step's attention, states and cache, and the values that all layers compute from its positions."""

    def __init__(
        self,
        kv: KVCache,
        kernels: Kernels | None,
        attention: StepAttention,
        states: Callable[[], StepStates],
        angles: Callable[[RopeSpec], Angles],
        positions: torch.Tensor,
    ) -> None:
        """Keeps `states` and `angles`; each is called once per step, on first use. `positions` are [T]."""
        self.kv, self.kernels, self.attention, self.positions = kv, kernels, attention, positions
        self._find_states, self._find_angles = states, angles
        self._angles: dict[RopeSpec, Angles] = {}
        self.layer_inputs: torch.Tensor | None = None  # [T, L, width], where the model has such
        self.chosen: dict[int, torch.Tensor] = {}  # by sequence: numbers of tokens [t, n] that its queries attend to

    @classmethod
    def of(
        cls, batch: Batch, kv: KVCache, kernels: Kernels | None, ropes: Mapping[RopeSpec, RotaryEmbedding]
    ) -> StepContext:
        """Returns the context of a batch of any sequences."""
        return cls(
            kv,
            kernels,
            StepAttention(batch, kv, kernels),
            lambda: StepStates.of(batch, kv.data.device),
            lambda rope: ropes[rope](batch.positions),
            batch.positions,
        )

    @cached_property
    def states(self) -> StepStates:
        """Returns which rows of the step lead from which state to which."""
        return self._find_states()

    def angles(self, rope: RopeSpec) -> Angles:
        """Returns cos and sin [T, dims / 2] of the step's positions."""
        if rope not in self._angles:
            self._angles[rope] = self._find_angles(rope)
        return self._angles[rope]


def ropes_of(spec: ModelSpec, device: torch.device) -> dict[RopeSpec, RotaryEmbedding]:
    """Returns the rotary embeddings of a model's layers."""
    records = {attention.rope for attention in spec.attention if attention.rope is not None}
    return {record: RotaryEmbedding(record, device) for record in records}
