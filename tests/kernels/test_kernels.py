"""The kernels against plain torch, in both weight types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from edgemoe.encodings.codec import pack, unpack
from edgemoe.jit.intrinsics import INT, f32_at
from edgemoe.jit.object_cache import code
from edgemoe.kernels.cpu.expert_math import ExpertKernels
from edgemoe.kernels.cpu.experts_decode import ExpertLayout
from edgemoe.kernels.cpu.paged_cache import EVERYTHING, PagedCache
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.kernels.cpu.vector import log32
from edgemoe.types.encoding import FP8, INT4, INT8, MXFP4, Encoding

BLOCK = 16


def _random(kernels: Kernels, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16 if kernels.bf16 else torch.float32)


def _experts(kernels: Kernels, tokens: int, hidden: int, width: int, k: int, experts: int = 9) -> None:
    torch.manual_seed(tokens)
    size = 3 * hidden * width
    stride = -(-size * (2 if kernels.bf16 else 4) // 4096) * 4096
    slab = torch.zeros(experts, stride, dtype=torch.uint8)
    weights = _random(kernels, experts, size) * 0.1
    slab[:, : size * weights.element_size()] = weights.view(torch.uint8)
    x = _random(kernels, tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    scores = torch.rand(tokens, k)
    out = torch.ones(tokens, hidden)
    expected = out.double()
    slots, offsets, index, pairs = [], [0], [], []
    for slot in ids.unique().flip(0).tolist():
        gate_up = weights[slot, : 2 * hidden * width].view(2 * width, hidden).double()
        down = weights[slot, 2 * hidden * width :].view(hidden, width).double()
        for token, place in (ids == slot).nonzero().tolist():
            gate, up = (gate_up @ x[token].double()).chunk(2)
            expected[token] += scores[token, place].double() * (down @ (torch.nn.functional.silu(gate) * up))
            index.append(token)
            pairs.append(scores[token, place].item())
        slots.append(slot)
        offsets.append(len(index))
    ExpertKernels(kernels).few_tokens(
        ExpertLayout(hidden, width, kernels.dtype),
        slab.data_ptr(),
        stride,
        np.array(slots),
        np.array(offsets),
        np.array(index),
        np.array(pairs, np.float32),
        x.data_ptr(),
        kernels.bf16,
        out.data_ptr(),
        tokens,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17, 70])
def test_experts_equal_their_definition(kernels: Kernels, tokens: int) -> None:
    _experts(kernels, tokens, hidden=128, width=96, k=4)


def test_experts_of_sizes_that_fill_no_vector_equal_their_definition(kernels: Kernels) -> None:
    _experts(kernels, 5, hidden=50, width=38, k=3)


@pytest.mark.parametrize(("rows", "n", "tokens"), [(64, 128, 1), (37, 100, 3), (5, 10, 6), (300, 256, 16)])
def test_a_linear_product_equals_its_definition(kernels: Kernels, rows: int, n: int, tokens: int) -> None:
    torch.manual_seed(rows)
    weight, x = _random(kernels, rows, n), torch.randn(tokens, n)
    out = torch.full((tokens, rows), torch.nan)
    kernels.linear(weight.data_ptr(), rows, n, x.data_ptr(), False, tokens, out.data_ptr())
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("groups", "rows", "n", "tokens"), [(4, 64, 128, 1), (3, 37, 50, 3)])
def test_a_product_per_group_equals_its_definition(
    kernels: Kernels, groups: int, rows: int, n: int, tokens: int
) -> None:
    torch.manual_seed(rows)
    weight, x = _random(kernels, groups, rows, n), _random(kernels, tokens, groups, n)
    out = torch.full((tokens, groups, rows), torch.nan)
    kernels.grouped_linear(weight.data_ptr(), groups, rows, n, x.data_ptr(), tokens, out.data_ptr())
    expected = torch.einsum("tgn,grn->tgr", x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_a_token_gets_the_same_bits_in_any_batch(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weight, x = _random(kernels, 70, 192), torch.randn(13, 192)
    together, alone = torch.empty(13, 70), torch.empty(13, 70)
    kernels.linear(weight.data_ptr(), 70, 192, x.data_ptr(), False, 13, together.data_ptr())
    for token in range(13):
        kernels.linear(weight.data_ptr(), 70, 192, x[token].data_ptr(), False, 1, alone[token].data_ptr())
    assert torch.equal(together, alone)


class Contexts:
    """Single queries of sequences of several lengths; their keys and values lie in blocks in random order."""

    lengths = (1, 16, 17, 256, 300, 512, 777)

    def __init__(self, kernels: Kernels, heads: int, kv_heads: int, head_dim: int, latent: int = 0) -> None:
        """Draws the cache and queries. With `latent`, a value is the first `latent` elements of its key."""
        torch.manual_seed(heads)
        self.kernels, self.shape, self.scale = kernels, (heads, kv_heads, head_dim), head_dim**-0.5
        self.latent, self.value_dim = bool(latent), latent or head_dim
        needed = [-(-length // BLOCK) for length in self.lengths]
        self.cache = _random(kernels, sum(needed) + 1, 2, kv_heads, BLOCK, head_dim)
        self.queries = _random(kernels, len(needed), heads, head_dim)
        order = iter(torch.randperm(len(self.cache)).tolist())
        self.mine = [[next(order) for _ in range(blocks)] for blocks in needed]
        self.tables = np.zeros((len(needed), max(needed)), np.int64)
        for row, blocks in zip(self.tables, self.mine, strict=True):
            row[: len(blocks)] = blocks

    def attend(self, lengths: Sequence[int], window: int = EVERYTHING, sinks: int = 0) -> torch.Tensor:
        cache, size = self.cache, self.cache.element_size()
        places = {"keys": cache.data_ptr(), "values": cache[0, 0 if self.latent else 1].data_ptr()}
        places["block_stride"] = cache.stride(0) * size
        places["head_stride"] = cache.stride(2) * size
        pages = PagedCache(*self.shape, self.value_dim, self.scale, **places, window=window, sinks=sinks)
        out = torch.empty(len(lengths), self.shape[0] * self.value_dim)
        contexts = np.array(lengths)
        self.kernels.attend(self.queries.data_ptr(), len(lengths), self.tables, contexts, pages, out.data_ptr())
        return out

    def expected(self, window: int = EVERYTHING, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Computes attention by its definition."""
        results, (_, kv_heads, head_dim) = [], self.shape
        for query, length, blocks in zip(self.queries, self.lengths, self.mine, strict=True):
            seen = slice(max(0, length - window), length)
            keys, values = self.cache[blocks].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, seen]
            values = keys[..., : self.value_dim] if self.latent else values
            scores = query.double().view(kv_heads, -1, head_dim) @ keys.transpose(1, 2) * self.scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(kv_heads, -1, 1)], -1)
            results.append((scores.softmax(-1)[..., : keys.shape[1]] @ values).flatten())
        return torch.stack(results)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 16), (6, 1, 40)])
def test_paged_attention_equals_attention_over_the_whole_context(
    kernels: Kernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    one = Contexts(kernels, heads, kv_heads, head_dim)
    one.attend([max(one.lengths)] * len(one.lengths))  # leaves its partial results behind
    torch.testing.assert_close(one.attend(one.lengths).double(), one.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "latent"), [(16, 32), (19, 32), (3, 38)])
def test_values_may_be_the_first_part_of_the_keys(kernels: Kernels, heads: int, latent: int) -> None:
    one = Contexts(kernels, heads, 1, 40, latent)
    torch.testing.assert_close(one.attend(one.lengths).double(), one.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 16, 50, 128, 300, 1000])
def test_paged_attention_sees_its_window_and_its_sinks(kernels: Kernels, window: int) -> None:
    one = Contexts(kernels, 8, 2, 64)
    one.scale = 0.3
    sinks = torch.linspace(-30, 30, 8)
    sinks[0] = -torch.inf
    for blocks, length in zip(one.mine, one.lengths, strict=True):
        one.cache[blocks[: max(0, length - window) // BLOCK]] = torch.nan  # which is not read
    result = one.attend(one.lengths, window, sinks.data_ptr()).double()
    torch.testing.assert_close(result, one.expected(window, sinks), atol=2e-5, rtol=2e-5)


def test_a_window_gives_a_token_the_same_bits_in_any_batch(kernels: Kernels) -> None:
    one, sinks = Contexts(kernels, 8, 2, 64), torch.randn(8)
    together = one.attend(one.lengths, 300, sinks.data_ptr())
    alone = [one.attend(one.lengths[: n + 1], 300, sinks.data_ptr())[n] for n in range(len(one.lengths))]
    torch.testing.assert_close(torch.stack(alone), together, atol=0, rtol=0)


@code(INT, INT, INT)
def LOGARITHMS(values: int, out: int, n: int) -> None:
    for i in range(n):
        f32_at(out)[i] = log32(f32_at(values)[i])


def test_a_logarithm_is_within_its_error() -> None:
    values = np.concatenate([np.geomspace(1e-37, 1e38, 5000), np.linspace(0.5, 2, 5000)]).astype(np.float32)
    out = np.empty_like(values)
    LOGARITHMS.call(values.ctypes.data, out.ctypes.data, len(values))
    np.testing.assert_allclose(out, np.log(values.astype(np.float64)), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("encoding", [INT8, INT4, MXFP4, FP8], ids=lambda each: each.name)
@pytest.mark.parametrize("tokens", [1, 5, 33, 100])
def test_a_dense_product_of_encoded_weights(
    kernels: Kernels, float_kernels: Kernels, encoding: Encoding, tokens: int
) -> None:
    random, (rows, n) = np.random.default_rng(tokens), (150, 608)
    weights = pack(random.normal(0, 0.1, (rows, n)).astype(np.float32), encoding)
    x = torch.from_numpy(random.normal(size=(tokens, n)).astype(np.float32)).to(
        torch.bfloat16 if kernels.bf16 else torch.float32
    )
    expected = x.double() @ torch.from_numpy(unpack(weights, encoding, n)).double().T
    results = []
    for made, multiply in ((kernels, Kernels.linear), (kernels, Kernels.product), (float_kernels, Kernels.product)):
        out, code = torch.full((tokens, rows), torch.nan), made.row_code(encoding)
        multiply(made, weights.ctypes.data, rows, n, x.data_ptr(), made.bf16, tokens, out.data_ptr(), code)
        results.append(out)
    torch.testing.assert_close(results[0].double(), expected, atol=5e-4 if kernels.bf16 else 1e-4, rtol=1e-4)
    torch.testing.assert_close(results[1], results[0], atol=0.1 if kernels.bf16 else 1e-4, rtol=1e-4)
    torch.testing.assert_close(results[2], results[0], atol=0.05 if kernels.bf16 else 1e-4, rtol=1e-4)
