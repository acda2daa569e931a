"""Computes one step's attention over paged keys and values.

On the CPU, kernels read the pages in place: one kernel serves all sequences of one token, another one prefilling
sequence. On other devices blocks are gathered, and a prompt's queries are computed in tiles, so that memory grows with
the context and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels, Paged
from edgemoe.model.kv import KVCache
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

    def __init__(self, spec: ModelSpec, batch: Batch, kv: KVCache, kernels: Kernels | None) -> None:
        self._spec, self._kv, self._kernels = spec, kv, kernels
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

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v [T, kv_heads, D] and returns the attention [T, heads * D] of q [T, heads, D].

        All are in the model's dtype, q and k after rotary embedding.
        """
        keys, values = self._kv.layers[layer]
        keys[self._blocks, :, self._places] = k
        values[self._blocks, :, self._places] = v
        out = torch.empty_like(q)
        prompt = self._prefill_by_kernel if self._kernels is not None else self._prefill
        for prefill in self._prefills:
            out[prefill.first : prefill.after] = prompt(layer, prefill, q)
        if len(self._single_rows):
            single = self._by_kernel if self._kernels is not None else self._gathered
            out[self._single_rows] = single(layer, q[self._single_rows]).to(q.dtype)
        return out.flatten(1)

    def _prefill_by_kernel(self, layer: int, prefill: Prefill, q: torch.Tensor) -> torch.Tensor:
        assert self._kernels is not None
        queries = q[prefill.first : prefill.after].contiguous()
        out, table = torch.empty_like(queries), prefill.blocks.numpy()
        pages = paged(self._spec, self._kv, layer)
        self._kernels.prefill(queries.data_ptr(), len(queries), table, prefill.context, pages, out.data_ptr())
        return out

    def _prefill(self, layer: int, prefill: Prefill, q: torch.Tensor) -> torch.Tensor:
        needed = -(-prefill.context // BLOCK_TOKENS)
        pages = (part[prefill.blocks[:needed]] for part in self._kv.layers[layer])  # [n, kv_heads, 16, D] each
        keys, values = (part.transpose(0, 1).flatten(1, 2)[None] for part in pages)  # [1, kv_heads, n * 16, D]
        return torch.cat([self._tile(prefill, q, first, keys, values) for first in _tiles(prefill)])

    def _tile(
        self, prefill: Prefill, q: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Returns the attention of at most QUERY_TILE queries, [t, heads, D]."""
        after = min(first + QUERY_TILE, prefill.after)
        context = prefill.context - (prefill.after - after)
        queries = q[first:after].transpose(0, 1)[None]  # [1, heads, t, D]
        keys, values = keys[:, :, :context], values[:, :, :context]
        mask: torch.Tensor
        if self._device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right  # takes seconds to load

            mask = causal_lower_right(after - first, context)  # no mask in memory
        else:
            reach = torch.arange(context - (after - first), context)
            mask = torch.arange(context)[None] <= reach[:, None]
        result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return result[0].transpose(0, 1)

    def _by_kernel(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert self._kernels is not None
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=torch.float32)
        pages = paged(self._spec, self._kv, layer)
        self._kernels.attend(q.data_ptr(), len(q), self._tables, self._contexts, pages, out.data_ptr())
        return out.view(q.shape)

    def _gathered(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Returns the attention of single queries; those of one KV head's group form the query dimension."""
        blocks, mask = self._gather_plan
        pages = (part[blocks] for part in self._kv.layers[layer])  # [S, n, kv_heads, 16, D] each
        keys, values = (part.transpose(1, 2).flatten(2, 3) for part in pages)  # [S, kv_heads, n * 16, D]
        grouped = q.view(len(q), self._spec.kv_heads, -1, self._spec.head_dim)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).view(q.shape)

    @cached_property
    def _gather_plan(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.from_numpy(self._tables).to(self._device)
        reach = torch.from_numpy(self._contexts).to(self._device)[:, None, None, None]
        return blocks, torch.arange(blocks.shape[1] * BLOCK_TOKENS, device=self._device) < reach


def _tiles(prefill: Prefill) -> Iterator[int]:
    return iter(range(prefill.first, prefill.after, QUERY_TILE))


def paged(spec: ModelSpec, kv: KVCache, layer: int) -> Paged:
    """Returns the addresses and strides of a layer's keys and values, for the kernel."""
    keys, values = kv.layers[layer]
    return Paged(
        heads=spec.heads,
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        scale=spec.head_dim**-0.5,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        block_stride=kv.block_bytes,
        head_stride=keys.stride(1) * keys.element_size(),
    )
