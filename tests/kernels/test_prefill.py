"""Attention of prompts, and the matrix product that it shares with the experts of prompts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from edgemoe.jit.intrinsics import PAIRS
from edgemoe.kernels.cpu import amx
from edgemoe.kernels.cpu.gemm_tile import make_tile
from edgemoe.kernels.cpu.paged_cache import EVERYTHING, PagedCache
from edgemoe.kernels.cpu.panels import panel_words
from edgemoe.kernels.cpu.runtime import Kernels

BLOCK = 16


class Prompt:
    """Queries, and the keys and values of their whole context in blocks in random order."""

    def __init__(
        self, kernels: Kernels, context: int, heads: int, kv_heads: int, head_dim: int, value_dim: int = 0
    ) -> None:
        torch.manual_seed(context)
        dtype = torch.bfloat16 if kernels.bf16 else torch.float32
        self.kernels, self.context, self.shape = kernels, context, (heads, kv_heads, head_dim)
        self.scale, self.value_dim = head_dim**-0.5, value_dim or head_dim
        blocks = -(-context // BLOCK)
        self.data = torch.randn(blocks + 2, 2, kv_heads, BLOCK, head_dim).to(dtype)
        self.table = np.random.default_rng(0).permutation(blocks + 2)[:blocks]
        self.queries = torch.randn(context, heads, head_dim).to(dtype)

    def attend(self, tokens: int, context: int, window: int = EVERYTHING, sinks: int = 0) -> torch.Tensor:
        """Computes attention of the last `tokens` of the first `context`."""
        size, data = self.data.element_size(), self.data
        strides = {"block_stride": data.stride(0) * size, "head_stride": data.stride(2) * size}
        keys = data.data_ptr()
        places = {"keys": keys, "values": keys + data.stride(1) * size, **strides}
        pages = PagedCache(*self.shape, self.value_dim, self.scale, **places, window=window, sinks=sinks)
        queries = self.queries[context - tokens : context].contiguous()
        out = torch.full_like(queries[..., : self.value_dim], torch.nan, memory_format=torch.contiguous_format)
        self.kernels.prefill(queries.data_ptr(), tokens, self.table, context, pages, out.data_ptr())
        return out

    def expected(self, tokens: int, window: int = EVERYTHING, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Computes attention of the last tokens by its definition."""
        pages, kv_heads = self.data[torch.from_numpy(self.table)].double(), self.shape[1]
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.context].unbind(0)  # [kv_heads, n, D]
        values = values[..., : self.value_dim]
        reach = torch.arange(self.context - tokens, self.context)[:, None]
        past = reach - torch.arange(self.context)[None]
        grouped = self.queries[-tokens:].double().unflatten(1, (kv_heads, -1))
        scores = torch.einsum("tkgd,knd->tkgn", grouped, keys) * self.scale
        scores = scores.masked_fill(((past < 0) | (past >= window))[:, None, None], -torch.inf)
        if sinks is not None:
            more = sinks.double().view(1, kv_heads, -1, 1).expand(tokens, -1, -1, -1)
            scores = torch.cat([scores, more], -1)
            values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
        return torch.einsum("tkgn,knd->tkgd", scores.softmax(-1), values).flatten(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 3, 24), (16, 1, 128), (4, 2, 10)])
@pytest.mark.parametrize(("tokens", "context"), [(2, 2), (37, 37), (70, 700), (5, 129)])
def test_a_chunk_attends_to_all_that_came_before(
    kernels: Kernels, tokens: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    prompt = Prompt(kernels, context, heads, kv_heads, head_dim)
    rounding = 0.02 if kernels.bf16 else 1e-5
    result = prompt.attend(tokens, context)
    torch.testing.assert_close(result.double(), prompt.expected(tokens), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("value_dim", [16, 18])
def test_values_may_be_narrower_than_keys(kernels: Kernels, value_dim: int) -> None:
    prompt = Prompt(kernels, 200, 6, 2, 24, value_dim)
    rounding = 0.02 if kernels.bf16 else 1e-5
    torch.testing.assert_close(prompt.attend(70, 200).double(), prompt.expected(70), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("window", [1, 16, 50, 128, 1000])
@pytest.mark.parametrize(("tokens", "context"), [(2, 2), (70, 700), (300, 300)])
def test_a_chunk_sees_its_windows_and_its_sinks(kernels: Kernels, tokens: int, context: int, window: int) -> None:
    prompt = Prompt(kernels, context, 8, 2, 64)
    prompt.scale = 0.3
    sinks = torch.linspace(-30, 30, 8)
    sinks[0] = -torch.inf
    rounding = 0.02 if kernels.bf16 else 1e-5
    result = prompt.attend(tokens, context, window, sinks.data_ptr())
    expected = prompt.expected(tokens, window, sinks)
    torch.testing.assert_close(result.double(), expected, atol=rounding, rtol=rounding)


def test_blocks_before_all_windows_are_not_read(kernels: Kernels) -> None:
    prompt = Prompt(kernels, 700, 8, 2, 64)
    prompt.data[prompt.table[: (700 - 70 - 49) // 64 * 4]] = torch.nan
    assert prompt.attend(70, 700, 50).isfinite().all()


def test_windows_and_sinks_give_the_same_bits_however_the_prompt_is_cut(kernels: Kernels) -> None:
    prompt, sinks = Prompt(kernels, 300, 8, 2, 64), torch.randn(8)
    whole = prompt.attend(300, 300, 70, sinks.data_ptr())
    cuts = [0, 7, 100, 101, 164, 300]
    pieces = [prompt.attend(after - first, after, 70, sinks.data_ptr()) for first, after in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=0, rtol=0)


def test_a_token_gets_the_same_bits_however_the_prompt_is_cut(kernels: Kernels) -> None:
    prompt = Prompt(kernels, 300, 8, 2, 64)
    whole = prompt.attend(300, 300)
    cuts = [0, 7, 100, 101, 164, 300]
    pieces = [prompt.attend(after - first, after) for first, after in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=0, rtol=0)


@pytest.mark.parametrize(("pairs", "tiles"), sorted({(False, False), (PAIRS, False), (PAIRS, amx.HERE)}))
@pytest.mark.parametrize(("rows", "elements", "columns"), [(1, 2, 16), (13, 70, 32), (24, 64, 48), (77, 166, 48)])
def test_a_tile_is_the_product_of_rows_and_columns(
    kernels: Kernels, pairs: bool, tiles: bool, rows: int, elements: int, columns: int
) -> None:
    tile = make_tile(kernels.bf16, pairs, tiles)
    torch.manual_seed(rows)
    dtype = torch.bfloat16 if kernels.bf16 else torch.float32
    a, x = torch.randn(rows, elements).to(dtype), torch.randn(columns, elements).to(dtype)
    panel = (x.view(torch.float32) if kernels.bf16 and pairs else x.float()).T.contiguous()
    assert len(panel) == panel_words(elements, kernels.bf16, pairs)
    c, line = torch.ones(rows, columns), elements * a.element_size()
    for fresh in (0, 1, 0):
        before = torch.zeros(()) if fresh else c.double()
        job = (a.data_ptr(), line, rows, a.data_ptr(), panel.data_ptr(), 4 * columns, line // 4)
        tile.call(*job, c.data_ptr(), 4 * columns, columns, fresh)
        torch.testing.assert_close(c.double(), before + a.double() @ x.double().T, atol=1e-4, rtol=1e-4)
