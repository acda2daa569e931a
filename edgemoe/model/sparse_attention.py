"""Computes latent attention to chosen tokens [DeepSeek-V3.2, 2.1]: the mechanism "sparse latent".

While a context has no more tokens than are chosen, this is latent attention. Beyond, each query's tokens are gathered
from the cache, so that the work of attention stays constant. Only the indexer's grows with the context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import layer_norm, pad

from edgemoe.families.sparse_families import SparseLatentHeads
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import Angles, PrefillChunk, StepContext, half_split, rotate
from edgemoe.model.dense_weights import LayerReader
from edgemoe.model.latent_attention import EXPANDED_BYTES, NORM_EPS, LatentAttention


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
    """The attention of one layer."""

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
