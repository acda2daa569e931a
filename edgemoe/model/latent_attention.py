"""Computes multi-head latent attention [DeepSeek-V2, 2.1] over a cache of latents: the mechanism "latent".

A token has a latent, from which all heads' keys and values are projected, and a rotated key that all heads share.
Single tokens absorb the projections (2.1.2): attention with one KV head, with latent and rotated key as its key and the
latent as its value. Prompts expand keys and values of their context, a few heads at a time, if that is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import layer_norm, pad

from edgemoe.families.mechanisms import LatentHeads
from edgemoe.families.sparse_families import SparseLatentHeads
from edgemoe.kernels.cpu.paged_cache import PagedCache
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import (
    Angles,
    AttentionScores,
    PrefillChunk,
    StepContext,
    half_split,
    prompt_by_kernel,
    prompt_in_tiles,
    rotate,
)
from edgemoe.model.dense_weights import FEW_TOKENS, LayerReader, Norm
from edgemoe.types.step import BLOCK_TOKENS

NORM_EPS = 1e-6  # of latents and of an indexer's keys, independent of the model's own
EXPANDED_BYTES = 32 << 20  # keys and values of a context that are expanded at a time; at least one head's


class LatentAttention:
    """The attention of one layer."""

    def __init__(self, reader: LayerReader) -> None:
        self.number, rope = reader.number, reader.attention.rope
        assert isinstance(reader.attention.heads, LatentHeads)
        assert rope is not None
        self.heads, self.rope = reader.attention.heads, rope
        self.query_latent = self.query_norm = None
        if self.heads.query_rank:
            self.query_latent = reader.matrix("self_attn.q_a_proj.weight")  # [query_rank, H]
            self.query_norm = Norm(reader.read("self_attn.q_a_layernorm.weight"), NORM_EPS)
        query = "q_b_proj" if self.heads.query_rank else "q_proj"
        self.query = reader.matrix(f"self_attn.{query}.weight")  # [count * key, query_rank or H]
        self.latent = reader.matrix("self_attn.kv_a_proj_with_mqa.weight")  # [rank + dim, H]
        self.norm = Norm(reader.read("self_attn.kv_a_layernorm.weight"), NORM_EPS)
        self.keys, self.values = self._expansion(reader.read("self_attn.kv_b_proj.weight"))
        self.out = reader.matrix("self_attn.o_proj.weight")  # [H, count * value]
        self.scores = AttentionScores(self.heads.scale)
        if rope.interleaved:
            self._order_pairs()

    def _expansion(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the matrices of keys [count, rank, plain] and values [count, value, rank], where `both` lie now."""
        heads, memory = self.heads, both.view(-1)
        keys, values = both.clone().view(heads.count, -1, heads.rank).tensor_split([heads.plain], dim=1)
        first, last = memory.tensor_split([keys.numel()])
        result = first.view(heads.count, heads.rank, heads.plain), last.view(values.shape)
        result[0].copy_(keys.transpose(1, 2))
        result[1].copy_(values)
        return result

    def _order_pairs(self) -> None:
        """Reorders the rows that rotary embedding turns, so that pairs lie in the two halves."""
        heads = self.heads
        for rows in (*torch.split(self.query.rows, heads.key), self.latent.rows):
            turned = rows[-heads.dim :]
            turned.copy_(half_split(turned, heads.dim, heads.dim))

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype; fills the cache."""
        angles, attention = step.angles(self.rope), step.attention
        q = self._queries(self._query_latents(x), angles)
        if (factors := self.growth(step.positions)) is not None:
            q = q * factors.to(q.dtype)[:, None, None]
        attention.store(self.number, self._latents(x, angles), None)
        if not attention.prefills:
            return self.out(self._single(q, step).flatten(1))
        out = x.new_empty((len(x), self.heads.count, self.heads.value))
        for prefill in attention.prefills:
            rows = slice(prefill.first, prefill.after)
            out[rows] = self._prompt(prefill, q[rows], step)
        if len(attention.single_rows):
            out[attention.single_rows] = self._single(q[attention.single_rows], step)
        return self.out(out.flatten(1))

    def _query_latents(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised latents [T, query_rank] of which queries are made; without such, `x` [T, H] itself."""
        if self.query_latent is None or self.query_norm is None:
            return x
        return self.query_norm(self.query_latent(x).float()).to(x.dtype)

    def _queries(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Projects the queries' latents to queries [T, heads, key] and rotates their rotary part."""
        heads = self.heads
        q = self.query(x).view(len(x), heads.count, heads.key)
        plain, turned = q.tensor_split([heads.plain], dim=-1)
        return torch.cat((plain, rotate(turned.float(), *angles).to(q.dtype)), dim=-1)

    def growth(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Returns the factors [T] of queries at positions [T], float32; None where they do not grow."""
        if not self.heads.growth:
            return None
        periods = torch.div(positions, self.heads.growth_tokens, rounding_mode="floor")
        return 1.0 + self.heads.growth * torch.log1p(periods.float())

    def _latents(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Returns the tokens' cache lines, latent and rotated key, [T, 1, rank + dim]."""
        latent, turned = self.latent(x).float()[:, None].tensor_split([self.heads.rank], dim=-1)
        return torch.cat((self.norm(latent), rotate(turned, *angles)), dim=-1).to(x.dtype)

    def _single(self, q: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the mean values [S, count, value] for the step's single queries [S, count, key]."""
        absorbed = self._absorb(q, step.kernels)
        return self._emit(step.attention.single(self.number, absorbed, self.scores), step.kernels)

    def _absorb(self, q: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
        """Returns queries [T, count, rank + dim] to latents, of queries [T, count, key] to keys."""
        plain, turned = q.tensor_split([self.heads.plain], dim=-1)
        return torch.cat((by_head(plain, self.keys, kernels), turned), dim=-1)

    def _emit(self, latents: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
        """Returns mean values [T, count, value] of mean latents [T, count, rank]."""
        return by_head(latents, self.values, kernels)

    def _prompt(self, prefill: PrefillChunk, q: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the mean values [t, count, value] of one prefill's queries [t, count, key]."""
        heads, tokens, context = self.heads, len(q), prefill.context
        change = heads.rank * (heads.plain + heads.value)  # products of a token's and a head's change of widths
        absorbed = tokens * (context * (2 * heads.rank + heads.dim) + change)
        if absorbed <= context * (tokens * (heads.key + heads.value) + change):
            latents = step.attention.prompt(self.number, prefill, self._absorb(q, step.kernels), self.scores)
            return self._emit(latents, step.kernels)
        past = step.attention.past(self.number, prefill, slice(heads.rank + heads.dim))[0]
        portions = [self._expanded(q[:, part], past, part, step.kernels) for part in self._portions(past)]
        return torch.cat(portions, dim=1)

    def _portions(self, past: torch.Tensor) -> Iterator[slice]:
        """Yields so many heads at a time that their keys and values stay within EXPANDED_BYTES."""
        count = max(1, EXPANDED_BYTES // (len(past) * 2 * self.heads.key * past.element_size()))
        return (slice(first, first + count) for first in range(0, self.heads.count, count))

    def _expanded(self, q: torch.Tensor, past: torch.Tensor, part: slice, kernels: Kernels | None) -> torch.Tensor:
        """Returns the attention [t, h, value] of some heads' queries [t, h, key] over the cache lines [n, ...].

        Keys and values lie in lines of one width, and the context fills whole blocks, as the kernel requires.
        """
        heads, (latents, turned) = self.heads, past.tensor_split([self.heads.rank], dim=-1)
        context, blocks = len(past), -(-len(past) // BLOCK_TOKENS)
        lines = past.new_empty((2, q.shape[1], blocks * BLOCK_TOKENS, heads.key))
        keys, values = lines[0, :, :context], lines[1, :, :context, : heads.value]
        keys[..., : heads.plain] = torch.matmul(latents, self.keys[part])
        keys[..., heads.plain :] = turned
        values.copy_(torch.matmul(latents, self.values[part].transpose(1, 2)))
        if kernels is None:
            return prompt_in_tiles(q, keys[None], values[None], self.scores)
        line = heads.key * past.element_size()
        pages = PagedCache(
            heads=q.shape[1],
            kv_heads=q.shape[1],
            head_dim=heads.key,
            value_dim=heads.value,
            scale=heads.scale,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            block_stride=BLOCK_TOKENS * line,
            head_stride=blocks * BLOCK_TOKENS * line,
        )
        return prompt_by_kernel(kernels, q, np.arange(blocks), context, pages)


def by_head(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
    """Returns each head's product [T, heads, rows] of x [T, heads, n] with its part of weight [heads, rows, n]."""
    if kernels is None or len(x) > FEW_TOKENS:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    (heads, rows, n), x = weight.shape, x.contiguous()
    out = torch.empty((len(x), heads, rows), dtype=torch.float32)
    kernels.grouped_linear(weight.data_ptr(), heads, rows, n, x.data_ptr(), len(x), out.data_ptr())
    return out.to(x.dtype)


class IndexQueries(NamedTuple):
    """The indexer's side of some tokens' queries."""

    queries: torch.Tensor  # [T, heads, index_dim] float32
    weights: torch.Tensor  # [T, heads] float32, of each head's scores


class Indexer:
    """Chooses the tokens that a layer's queries attend to."""

    def __init__(self, reader: LayerReader, heads: SparseLatentHeads) -> None:
        self.heads = heads
        self.query = reader.matrix("self_attn.indexer.wq_b.weight")  # [index_count * index_dim, query_rank]
        self.key = reader.matrix("self_attn.indexer.wk.weight")  # [index_dim, H]
        self.norm = reader.read("self_attn.indexer.k_norm.weight")
        self.bias = reader.read("self_attn.indexer.k_norm.bias")
        self.weigh = reader.read("self_attn.indexer.weights_proj.weight", dtype=torch.float32)
        if heads.index_interleaved:
            for rows in (self.query.rows, self.key.rows, self.norm, self.bias):
                rows.copy_(half_split(rows, heads.index_dim, heads.dim))

    def keys(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Returns the keys [T, 1, index_dim] float32 of hidden states [T, H]."""
        keys = layer_norm(self.key(x).float(), (self.heads.index_dim,), self.norm, self.bias, NORM_EPS)
        return rotate(keys[:, None], *angles)

    def queries(self, latents: torch.Tensor, x: torch.Tensor, angles: Angles) -> IndexQueries:
        """Returns queries of the queries' normalised latents [T, query_rank], and their weights of `x` [T, H]."""
        heads = self.heads
        queries = self.query(latents).float().view(len(x), heads.index_count, heads.index_dim)
        scale = heads.index_count**-0.5 * heads.index_dim**-0.5
        return IndexQueries(rotate(queries, *angles), (x.float() @ self.weigh.T) * scale)

    def choose(self, asked: IndexQueries, keys: torch.Tensor) -> torch.Tensor:
        """Returns the numbers [t, chosen] of tokens for a context's last queries. They ascend; -1 stands for none.

        `keys` [n, index_dim] float32 are of the whole context. Of tokens with equal scores the first ones are
        chosen, however the context was divided into steps.
        """
        count, tokens = len(asked.queries), len(keys)
        tile = max(1, EXPANDED_BYTES // (4 * self.heads.index_count * tokens))
        parts = []
        for first in range(0, count, tile):
            rows = slice(first, first + tile)
            products = (asked.queries[rows] @ keys.T).relu_()  # [tile, heads, n]
            scores = torch.bmm(asked.weights[rows, None], products)[:, 0].nan_to_num_()
            end = tokens - count + first + 1
            seen = torch.arange(end, end + len(scores), device=keys.device)[:, None]
            scores.masked_fill_(torch.arange(tokens, device=keys.device) >= seen, -torch.inf)
            numbers = highest(scores, self.heads.chosen)
            parts.append(numbers.masked_fill_(numbers >= seen, -1))
        return torch.cat(parts)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the places [t, count] of each row's highest scores [t, n], ascending; of equal ones the first."""
    least = scores.topk(count, dim=-1).values[:, -1:]
    above, equal = scores > least, scores == least
    missing = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, 1].view(len(scores), count)


class SparseLatentAttention(LatentAttention):
    """The attention of one layer to chosen tokens [DeepSeek-V3.2, 2.1]: the mechanism "sparse latent".

    While a context has no more tokens than are chosen, this is latent attention. Beyond, each query's tokens are
    gathered from the cache, so that the work of attention stays constant. Only the indexer's grows with the context.
    """

    heads: SparseLatentHeads

    def __init__(self, reader: LayerReader) -> None:
        super().__init__(reader)
        assert isinstance(self.heads, SparseLatentHeads)
        self.indexer = None if self.heads.shares else Indexer(reader, self.heads)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the output [T, H] for normalised `x` [T, H], both in the model's dtype; fills the cache.

        Layers without an indexer need `step.chosen` of the layer before them.
        """
        angles, attention, chosen = step.angles(self.rope), step.attention, self.heads.chosen
        latents = self._query_latents(x)
        q, lines = self._queries(latents, angles), self._latents(x, angles)
        asked = None
        if self.indexer is not None:
            lines = torch.cat((lines, self.indexer.keys(x, angles).to(lines.dtype)), dim=-1)
            asked = self.indexer.queries(latents, x, angles)
        attention.store(self.number, lines, None)
        out = x.new_empty((len(x), self.heads.count, self.heads.value))
        singles = attention.singles
        if all(each.context <= chosen for each in singles) and singles:
            out[attention.single_rows], singles = self._single(q[attention.single_rows], step), []
        for chunk in (*attention.prefills, *singles):
            rows = slice(chunk.first, chunk.after)
            if chunk.context <= chosen:
                out[rows] = self._prompt(chunk, q[rows], step)
                continue
            if self.indexer is not None and asked is not None:
                keys = attention.past(self.number, chunk, slice(self.heads.line, None))[0].float()
                part = IndexQueries(asked.queries[rows], asked.weights[rows])
                step.chosen[chunk.number] = self.indexer.choose(part, keys)
            out[rows] = self._to_chosen(chunk, q[rows], step)
        return self.out(out.flatten(1))

    def _absorb(self, q: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
        """Returns queries to whole lines of the cache: zeros for the indexer's keys."""
        return pad(super()._absorb(q, kernels), (0, self.heads.kv.key_width - self.heads.line))

    def _to_chosen(self, chunk: PrefillChunk, q: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Returns the mean values [t, count, value] of one sequence's queries [t, count, key] to its chosen tokens."""
        heads, numbers = self.heads, step.chosen[chunk.number]
        absorbed = LatentAttention._absorb(self, q, step.kernels)
        tile = max(1, EXPANDED_BYTES // (numbers.shape[1] * heads.line * q.element_size()))
        means = [
            self._tile(absorbed[first : first + tile], numbers[first : first + tile], chunk, step)
            for first in range(0, len(q), tile)
        ]
        return self._emit(torch.cat(means), step.kernels)

    def _tile(
        self, absorbed: torch.Tensor, numbers: torch.Tensor, chunk: PrefillChunk, step: StepContext
    ) -> torch.Tensor:
        """Returns the mean latents [t, count, rank] of absorbed queries to tokens of these numbers [t, chosen]."""
        lines = step.attention.tokens(self.number, chunk, numbers.clamp(min=0), slice(self.heads.line))
        scores = torch.bmm(absorbed, lines.transpose(1, 2)).float().mul_(self.heads.scale)
        scores.masked_fill_((numbers < 0)[:, None], -torch.inf)
        return torch.bmm(scores.softmax(-1).to(lines.dtype), lines[..., : self.heads.rank])
