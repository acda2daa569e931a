"""Computes one step's attention over paged keys and values.

On the CPU, kernels read the pages in place: one kernel serves all sequences of one token, another one prefilling
sequence. On other devices blocks are gathered, and a prompt's queries are computed in tiles, so that memory grows with
the context and not with its square.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from edgemoe.kernels.cpu.runtime import Kernels, Paged
from edgemoe.model.kv import KVCache
from edgemoe.model.scores import Scores, attend
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS, Batch

QUERY_TILE = 512  # tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence's chunk: rows first:after of the step, which are the last of its `context` tokens."""

    first: int
    after: int
    context: int
    blocks: torch.Tensor  # [n] int64


def block_tables(batch: Batch, chosen: list[int]) -> tuple[IntArray, IntArray]:
    """Returns block tables [S, widest] and contexts [S] of the chosen sequences.

    Tables are padded with the sequence's own last block.
    """
    contexts = np.array([batch.context_lens[s] for s in chosen], np.int64)
    tables = np.zeros((len(chosen), -(-int(contexts.max(initial=1)) // BLOCK_TOKENS)), np.int64)
    for row, s in enumerate(chosen):
        needed = -(-batch.context_lens[s] // BLOCK_TOKENS)
        tables[row, :needed] = batch.block_tables[s][:needed]
        tables[row, needed:] = tables[row, needed - 1]
    return tables, contexts


class StepAttention:
    """Computes attention for each layer of one step, with the block tables and masks that all layers share."""

    def __init__(self, batch: Batch, kv: KVCache, kernels: Kernels | None) -> None:
        self._kv, self._kernels = kv, kernels
        self._device = kv.data.device
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        single = [s for s, length in enumerate(batch.query_lens) if length == 1]
        self._single_rows = torch.tensor([starts[s] for s in single], dtype=torch.int64, device=self._device)
        self._tables, self._contexts = block_tables(batch, single)
        self._prefills = [
            Prefill(starts[s], starts[s + 1], batch.context_lens[s], self._tensor(batch.block_tables[s]))
            for s, length in enumerate(batch.query_lens)
            if length > 1
        ]
        blocks = [self._tensor(table) for table in batch.block_tables]
        owner = torch.repeat_interleave(torch.arange(len(blocks), device=self._device), self._tensor(batch.query_lens))
        padded = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)  # [S, widest]
        self._blocks = padded[owner, batch.positions // BLOCK_TOKENS]  # [T], where new keys and values go
        self._places = batch.positions % BLOCK_TOKENS
        self._plans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by window
        if kernels is None:
            self._clear_begun(batch)

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _clear_begun(self, batch: Batch) -> None:
        """Zeroes the blocks that the step begins and does not fill, because gathering reads them whole.

        A masked position has weight 0, but 0 times a NaN that another request left there would still be NaN.
        """
        begun = [
            table[context // BLOCK_TOKENS]
            for table, context, count in zip(batch.block_tables, batch.context_lens, batch.query_lens, strict=True)
            if 0 < context % BLOCK_TOKENS <= count
        ]
        if begun:
            self._kv.data[self._tensor(begun)] = 0

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Stores k and v [T, kv_heads, D] and returns the attention [T, heads * D] of q [T, heads, D].

        All are in the model's dtype, q and k after rotary embedding.
        """
        keys, values = self._kv.layers[layer]
        keys[self._blocks, :, self._places] = k
        values[self._blocks, :, self._places] = v
        out = torch.empty_like(q)
        prompt = self._prefill_by_kernel if self._kernels is not None else self._prefill
        for prefill in self._prefills:
            out[prefill.first : prefill.after] = prompt(layer, prefill, q, scores)
        if len(self._single_rows):
            single = self._by_kernel if self._kernels is not None else self._gathered
            out[self._single_rows] = single(layer, q[self._single_rows], scores).to(q.dtype)
        return out.flatten(1)

    def _prefill_by_kernel(self, layer: int, prefill: Prefill, q: torch.Tensor, scores: Scores) -> torch.Tensor:
        assert self._kernels is not None
        queries = q[prefill.first : prefill.after].contiguous()
        out, table = torch.empty_like(queries), prefill.blocks.numpy()
        pages = paged(q.shape[1], self._kv, layer, scores)
        self._kernels.prefill(queries.data_ptr(), len(queries), table, prefill.context, pages, out.data_ptr())
        return out

    def _prefill(self, layer: int, prefill: Prefill, q: torch.Tensor, scores: Scores) -> torch.Tensor:
        begin = max(0, prefill.context - (prefill.after - prefill.first) + 1 - scores.window) // BLOCK_TOKENS
        needed = -(-prefill.context // BLOCK_TOKENS)
        pages = (part[prefill.blocks[begin:needed]] for part in self._kv.layers[layer])  # [n, kv_heads, 16, D] each
        keys, values = (part.transpose(0, 1).flatten(1, 2)[None] for part in pages)  # [1, kv_heads, n * 16, D]
        seen = prefill.context - begin * BLOCK_TOKENS
        tiles = []
        for first in range(prefill.first, prefill.after, QUERY_TILE):
            after = min(first + QUERY_TILE, prefill.after)
            end = seen - (prefill.after - after)
            start = max(0, end - (after - first) + 1 - scores.window)
            tiles.append(self._tile(q[first:after], keys[:, :, start:end], values[:, :, start:end], scores))
        return torch.cat(tiles)

    def _tile(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Returns the attention [t, heads, D] of at most QUERY_TILE queries, the last of which has the last key."""
        queries, sinks = q.transpose(0, 1)[None], scores.sinks  # [1, heads, t, D]
        t, n = len(q), keys.shape[2]
        mask: torch.Tensor
        if self._device.type == "cuda" and n <= scores.window:
            from torch.nn.attention.bias import causal_lower_right  # takes seconds to load

            mask = causal_lower_right(t, n if sinks is None else 1 + n)  # no mask in memory
        else:
            past = torch.arange(n - t, n, device=q.device)[:, None] - torch.arange(n, device=q.device)[None]
            mask = (past >= 0) & (past < scores.window)
            mask = mask if sinks is None else pad(mask, (1, 0), value=True)
        each = None if sinks is None else sinks[:, None]
        return attend(queries, keys, values, mask, scores, each)[0].transpose(0, 1)

    def _by_kernel(self, layer: int, q: torch.Tensor, scores: Scores) -> torch.Tensor:
        assert self._kernels is not None
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=torch.float32)
        pages = paged(q.shape[1], self._kv, layer, scores)
        self._kernels.attend(q.data_ptr(), len(q), self._tables, self._contexts, pages, out.data_ptr())
        return out.view(q.shape)

    def _gathered(self, layer: int, q: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Returns the attention of single queries; those of one KV head's group form the query dimension."""
        blocks, mask = self._gather_plan(scores.window)
        pages = (part[blocks] for part in self._kv.layers[layer])  # [S, n, kv_heads, 16, D] each
        keys, values = (part.transpose(1, 2).flatten(2, 3) for part in pages)  # [S, kv_heads, n * 16, D]
        grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
        sinks = None if scores.sinks is None else scores.sinks.view(grouped.shape[1:3])
        mask = mask if sinks is None else pad(mask, (1, 0), value=True)
        return attend(grouped, keys, values, mask, scores, sinks).flatten(1, 2)

    def _gather_plan(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the blocks [S, n] that windows of this size lie in, and the mask [S, 1, 1, n * 16] of tokens."""
        if window not in self._plans:
            first = np.maximum(self._contexts - window, 0) // BLOCK_TOKENS
            count = int((-(-self._contexts // BLOCK_TOKENS) - first).max())
            places = np.minimum(first[:, None] + np.arange(count), self._tables.shape[1] - 1)
            tokens = first[:, None] * BLOCK_TOKENS + np.arange(count * BLOCK_TOKENS)
            past = self._contexts[:, None] - 1 - tokens
            mask = torch.from_numpy((past >= 0) & (past < window))[:, None, None]
            blocks = torch.from_numpy(np.take_along_axis(self._tables, places, 1))
            self._plans[window] = blocks.to(self._device), mask.to(self._device)
        return self._plans[window]


def paged(heads: int, kv: KVCache, layer: int, scores: Scores) -> Paged:
    """Returns where a layer's keys and values lie, and how they are attended to, for the kernel."""
    keys, values = kv.layers[layer]
    return Paged(
        heads=heads,
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        value_dim=values.shape[3],
        scale=scores.scale,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        block_stride=kv.block_bytes,
        head_stride=keys.stride(1) * keys.element_size(),
        window=scores.window,
        sinks=0 if scores.sinks is None else scores.sinks.data_ptr(),
    )
