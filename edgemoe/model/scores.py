"""How the scores of a layer's attention are made, and what follows from it for torch's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from edgemoe.kernels.cpu.runtime import EVERYTHING

WIDER = 8  # elements that a sink adds to a head: one would do, but the fast kernels want multiples of 8


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the scores of queries and keys are multiplied with, which tokens have one, and each head's sink."""

    scale: float
    window: int = EVERYTHING  # tokens that a token sees, itself among them
    sinks: torch.Tensor | None = None  # [heads] float32: one more score, whose value is zero


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scores: Scores, sinks: torch.Tensor | None
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
    """Puts a key before all others, whose product with each query is given and whose value is zero.

    It comes first, so that a mask that is aligned at the last key lets every query see it.
    """
    q = pad(q, (0, WIDER))
    q[..., -WIDER] = products
    k, v = pad(k, (0, WIDER, 1, 0)), pad(v, (0, WIDER, 1, 0))
    k[..., 0, -WIDER] = 1
    return q, k, v
