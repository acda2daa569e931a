"""Latent attention of prompts, with keys recomputed or absorbed: both ways give transformers' results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.tiny_models import Session, Tiny

from edgemoe.model import latent_attention


@pytest.mark.parametrize("fused", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("most_bytes", [0, 1 << 20], ids=["a head at a time", "all heads"])
def test_a_prompt_equals_transformers_however_it_is_cut(
    make_tiny: Callable[..., Tiny], most_bytes: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", most_bytes)
    tiny = make_tiny("deepseek_v3", fused=fused)
    tokens = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    session, start, found = Session(tiny, sequences=2), 0, []
    for count in (90, 3, 1, 6):  # the short ones absorb
        more = [7] if count == 6 else [7, 8]  # another sequence beside it
        found.append(session.step(tokens[start : start + count], more)[:count])
        start += count
    assert (torch.cat(found) - tiny.reference(tokens)).abs().max() < 1e-4
