"""Decoders with keys and values in int8: kernels and torch agree, and the loss is small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.tiny_models import Session, Tiny

from edgemoe.model.decoder import Decoder
from edgemoe.store.manifest import DENSE

MADE = ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text", "deepseek_v2", "deepseek_v3", "glm_moe_dsa", "qwen3_next"]
TOKENS = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(tiny: Tiny) -> torch.Tensor:
    """Computes the logits of a prompt, and of single tokens after it."""
    session = Session(tiny)
    parts = (TOKENS[:33], TOKENS[33:45], *([token] for token in TOKENS[45:]))
    return torch.cat([session.step(part) for part in parts])


@pytest.mark.parametrize("family", MADE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_and_torch_keep_the_same_and_lose_little(
    make_tiny: Callable[..., Tiny], family: str, dtype: torch.dtype
) -> None:
    plain = make_tiny(family, dtype=dtype)
    spec = replace(plain.spec, kv_int8=True)
    assert spec.kv_bytes_per_token < plain.spec.kv_bytes_per_token * (0.45 if dtype == torch.float32 else 0.8)
    whole, found = logits(plain), []
    for kernels in (plain.decoder.kernels, None):
        decoder = Decoder.load(spec, plain.store / DENSE, kernels=kernels)
        found.append(logits(replace(plain, spec=spec, decoder=decoder)))
    lost, apart = [median_error(each, whole) for each in found], median_error(*found)
    assert 1e-6 < min(lost) <= max(lost) < 0.1, lost
    if dtype == torch.float32:
        assert apart < max(lost) / 100, (apart, lost)


def median_error(found: torch.Tensor, meant: torch.Tensor) -> float:
    """Returns the median token's error: a token whose experts change in a random model differs much."""
    return float(((found - meant).norm(dim=-1) / meant.norm(dim=-1)).median())
