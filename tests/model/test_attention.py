"""One step's attention over paged keys and values, by its definition: windows, sinks and scales, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from edgemoe.families.spec import KVLayout, KVRow
from edgemoe.kernels.cpu.paged_cache import EVERYTHING
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model import attention
from edgemoe.model.attention import AttentionScores, StepAttention
from edgemoe.model.kv import CodedKV, KVCache
from edgemoe.types.step import BLOCK_TOKENS, Batch

HEADS, KV_HEADS, DIM, LAYER = 6, 2, 16, 1
CONTEXT = 150


class Sequences:
    """Random queries, keys and values of several sequences, and their attention by definition."""

    def __init__(self, count: int, scores: AttentionScores, *, int8: bool = False) -> None:
        generator = torch.Generator().manual_seed(count)
        self.q = torch.randn(count, CONTEXT, HEADS, DIM, generator=generator)
        self.k, self.v = torch.randn(2, count, CONTEXT, KV_HEADS, DIM, generator=generator)
        self.scores = scores
        row = KVRow(KV_HEADS, DIM, DIM, int8=int8)
        blocks = -(-CONTEXT // BLOCK_TOKENS)
        self.kv = KVCache(KVLayout.of([row, row]), count * blocks)
        left = self.kv.layers[LAYER]  # as left by an earlier request
        for part in (left.key_scales, left.value_scales) if isinstance(left, CodedKV) else left:
            part.fill_(torch.nan)
        self.kept = (decoded(self.k), decoded(self.v)) if int8 else (self.k, self.v)
        self.tables = torch.randperm(count * blocks, generator=generator).view(count, blocks).tolist()
        self.lengths = [0] * count

    def step(self, counts: Sequence[int], kernels: Kernels | None) -> torch.Tensor:
        """Returns the attention [T, H * D] of the next tokens of each sequence."""
        starts, self.lengths = self.lengths, [old + more for old, more in zip(self.lengths, counts, strict=True)]
        ranges = [slice(*ends) for ends in zip(starts, self.lengths, strict=True)]
        positions = torch.cat([torch.arange(each.start, each.stop) for each in ranges])
        batch = Batch(positions, positions, counts, self.lengths, self.tables, positions[:0], decode=False, states=())
        q, k, v = (torch.cat([x[s, each] for s, each in enumerate(ranges)]) for x in (self.q, self.k, self.v))
        return StepAttention(batch, self.kv, kernels)(LAYER, q, k, v, self.scores)

    def expected(self, sequence: int) -> torch.Tensor:
        q, k, v = (x[sequence].double() for x in (self.q, *self.kept))
        past = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)[None]
        products = torch.einsum("tkgd,nkd->tkgn", q.unflatten(1, (KV_HEADS, -1)), k) * self.scores.scale
        products = products.masked_fill(((past < 0) | (past >= self.scores.window))[:, None, None], -torch.inf)
        if self.scores.sinks is not None:
            sinks = self.scores.sinks.double().view(1, KV_HEADS, -1, 1).expand(CONTEXT, -1, -1, -1)
            products, v = torch.cat([products, sinks], -1), torch.cat([v, torch.zeros_like(v[:1])])
        return torch.einsum("tkgn,nkd->tkgd", products.softmax(-1), v).flatten(1)


def decoded(lines: torch.Tensor) -> torch.Tensor:
    """Returns the lines after a round trip through int8, by its definition."""
    scales = lines.abs().amax(-1, keepdim=True) / 127
    return (lines / scales).round().clamp(-127, 127) * scales


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 7, 32, 100, EVERYTHING])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_attention_is_that_of_its_definition(
    kernels: dict[bool, Kernels],
    with_kernels: bool,
    window: int,
    with_sinks: bool,
    int8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", 32)
    three = Sequences(3, AttentionScores(0.4, window, torch.linspace(-4, 6, HEADS) if with_sinks else None), int8=int8)
    steps = [(1, 40, 5), (1, 1, 1), (64, 70, 1), (34, 1, 129), (1, 1, 1), (49, 37, 13)]
    assert [sum(counts) for counts in zip(*steps, strict=True)] == [CONTEXT] * 3
    found: list[list[torch.Tensor]] = [[], [], []]
    for counts in steps:
        result = three.step(counts, kernels[False] if with_kernels else None)
        for mine, part in zip(found, result.split(list(counts)), strict=True):
            mine.append(part)
    for sequence, parts in enumerate(found):
        torch.testing.assert_close(torch.cat(parts).double(), three.expected(sequence), atol=1e-5, rtol=1e-5)


def test_a_window_gives_the_same_however_the_prompt_is_cut() -> None:
    results = []
    for cuts in ([0, 150], [0, 1, 33, 34, 150]):
        one = Sequences(1, AttentionScores(0.4, 20, torch.zeros(HEADS)))
        results.append(torch.cat([one.step([after - first], None) for first, after in pairwise(cuts)]))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-6)
