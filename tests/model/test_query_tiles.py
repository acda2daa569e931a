"""Attention of long prompts without kernels, as on the GPU: tile by tile the same as at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import FAMILIES, Session, Tiny
from support.turns import by_turns

from edgemoe.model import attention
from edgemoe.model.attention import AttentionScores


@pytest.mark.parametrize(("mask", "family"), by_turns(["in memory", "lower right"], FAMILIES))
def test_a_prompt_of_several_tiles_equals_transformers(
    make_tiny: Callable[..., Tiny], family: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, made = make_tiny(family, fused=False), attention.causal_mask

    def on_a_gpu(queries: int, keys: int, scores: AttentionScores, device: torch.device) -> torch.Tensor:
        """Builds a GPU's mask, which works on the CPU as well."""
        gpu: Any = SimpleNamespace(type="cuda")
        return made(queries, keys, scores, gpu if keys <= scores.window else device)

    monkeypatch.setattr(attention, "QUERY_TILE", 32)
    if mask == "lower right":
        monkeypatch.setattr(attention, "causal_mask", on_a_gpu)
    tokens = torch.randint(0, 300, (130,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = tiny.reference(tokens)
    for cuts in ([130], [32, 98], [33, 64, 33], [7, 1, 122]):
        session, start, found = Session(tiny), 0, []
        for count in cuts:
            found.append(session.step(tokens[start : start + count]))
            start += count
        assert (torch.cat(found) - reference).abs().max() < 1e-4
