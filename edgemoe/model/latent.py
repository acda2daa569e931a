"""Computes multi-head latent attention [DeepSeek-V2, 2.1] over a cache of latents.

Of a token are kept a latent, of which all heads' keys and values are products, and a turned key that all heads share.
Single tokens take the products into the query and out of the result (2.1.2, "absorbed"): attention with one KV head
whose key is latent and turned key, and whose value is the latent. Prompts compute the keys and values of their context
anew, a few heads at a time, where that takes fewer products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm

from edgemoe.families.latent import LatentSpec
from edgemoe.kernels.cpu.runtime import Kernels, Paged
from edgemoe.model.attention import Prefill, StepAttention, prompt_by_kernel, prompt_in_tiles
from edgemoe.model.rope import turn
from edgemoe.model.scores import Scores
from edgemoe.types.step import BLOCK_TOKENS

NORM_EPS = 1e-6  # of the latents, whatever the model's own is
EXPANDED_BYTES = 32 << 20  # keys and values of a context that are computed at a time, where one head's are not more


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """One layer's weights: matrices in the model's dtype, norms in float32. Rotary halves lie one after the other."""

    query_latent: torch.Tensor | None  # [query_rank, H]
    query_norm: torch.Tensor | None  # [query_rank]
    query: torch.Tensor  # [heads * key, query_rank or H]
    latent: torch.Tensor  # [rank + rope, H]
    norm: torch.Tensor  # [rank]
    expand: torch.Tensor  # [heads, plain + value, rank]
    out: torch.Tensor  # [H, heads * value]


class LatentAttention:
    """Computes one layer."""

    def __init__(self, spec: LatentSpec, weights: LatentWeights, kernels: Kernels | None) -> None:
        self._spec, self._weights, self._kernels = spec, weights, kernels
        self._scores = Scores(spec.scale)
        self._keys, self._values = torch.split(
            weights.expand, [spec.plain, spec.value], dim=1
        )  # [heads, ..., rank] each

    def __call__(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Returns the layer's attention [T, H] for normed x [T, H]; cos and sin [T, rope / 2]."""
        q = self._queries(x, cos, sin)
        attention.store(layer, self._latents(x, cos, sin), None)
        out = x.new_empty((len(x), self._spec.heads, self._spec.value))
        for prefill in attention.prefills:
            rows = slice(prefill.first, prefill.after)
            out[rows] = self._prompt(layer, prefill, q[rows], attention)
        if len(attention.single_rows):
            absorbed = self._absorb(q[attention.single_rows])
            out[attention.single_rows] = self._emit(attention.single(layer, absorbed, self._scores))
        return linear(out.flatten(1), self._weights.out)

    def _queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns queries [T, heads, key]."""
        spec, weights = self._spec, self._weights
        if weights.query_latent is not None and weights.query_norm is not None:
            x = _norm(linear(x, weights.query_latent), weights.query_norm)
        q = linear(x, weights.query).view(len(x), spec.heads, spec.key)
        plain, turned = torch.split(q, [spec.plain, spec.rope], dim=-1)
        return torch.cat((plain, turn(turned.float(), cos, sin).to(q.dtype)), dim=-1)

    def _latents(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns what the cache keeps of the tokens, [T, 1, rank + rope]."""
        latent, turned = torch.split(linear(x, self._weights.latent), [self._spec.rank, self._spec.rope], dim=-1)
        turned = turn(turned.float()[:, None], cos, sin).to(x.dtype)
        return torch.cat((_norm(latent, self._weights.norm)[:, None], turned), dim=-1)

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Returns queries [T, heads, rank + rope] to latents, of queries [T, heads, key] to keys."""
        plain, turned = torch.split(q, [self._spec.plain, self._spec.rope], dim=-1)
        return torch.cat((torch.bmm(plain.transpose(0, 1), self._keys).transpose(0, 1), turned), dim=-1)

    def _emit(self, latents: torch.Tensor) -> torch.Tensor:
        """Returns mean values [T, heads, value] of mean latents [T, heads, rank]."""
        return torch.bmm(latents.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1)

    def _prompt(self, layer: int, prefill: Prefill, q: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        spec, context = self._spec, prefill.context
        absorbed = len(q) * context * (spec.stored + spec.rank) + len(q) * spec.rank * (spec.plain + spec.value)
        expanded = len(q) * context * (spec.key + spec.value) + context * spec.rank * (spec.plain + spec.value)
        if absorbed <= expanded:
            return self._emit(attention.prompt(layer, prefill, self._absorb(q), self._scores))
        past = attention.past(layer, prefill)[0]
        return torch.cat([self._expanded(q[:, heads], past, heads) for heads in self._portions(past)], dim=1)

    def _portions(self, past: torch.Tensor) -> Iterator[slice]:
        """Yields so many heads at a time that their keys and values stay within EXPANDED_BYTES."""
        count = max(1, EXPANDED_BYTES // (len(past) * 2 * self._spec.key * past.element_size()))
        return (slice(first, first + count) for first in range(0, self._spec.heads, count))

    def _expanded(self, q: torch.Tensor, past: torch.Tensor, heads: slice) -> torch.Tensor:
        """Returns the attention [t, h, value] of some heads' queries [t, h, key] to what the cache keeps [n, stored].

        Keys and values lie in lines of one width, and the context fills whole blocks, as the kernel wants it.
        """
        spec, (latents, turned) = self._spec, torch.split(past, [self._spec.rank, self._spec.rope], dim=-1)
        context, blocks = len(past), -(-len(past) // BLOCK_TOKENS)
        lines = past.new_empty((2, q.shape[1], blocks * BLOCK_TOKENS, spec.key))
        keys, values = lines[:, :, :context]
        keys[..., : spec.plain] = torch.matmul(latents, self._keys[heads].transpose(1, 2))
        keys[..., spec.plain :] = turned
        values = values[..., : spec.value]
        values.copy_(torch.matmul(latents, self._values[heads].transpose(1, 2)))
        if self._kernels is None:
            return prompt_in_tiles(q, keys[None], values[None], self._scores)
        line = spec.key * past.element_size()
        pages = Paged(
            heads=q.shape[1],
            kv_heads=q.shape[1],
            head_dim=spec.key,
            value_dim=spec.value,
            scale=spec.scale,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            block_stride=BLOCK_TOKENS * line,
            head_stride=blocks * BLOCK_TOKENS * line,
        )
        return prompt_by_kernel(self._kernels, q, np.arange(blocks), context, pages)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.float(), weight.shape, weight, NORM_EPS).to(x.dtype)
