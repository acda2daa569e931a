"""The tokens that an indexer chooses do not depend on how a context was divided into steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model.test_decoder import _tokens
from support.tiny_models import Session, Tiny

from edgemoe.model import latent_attention
from edgemoe.model.latent_attention import IndexQueries, SparseLatentAttention, highest

MakeTiny = Callable[..., Tiny]


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert highest(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2], [0, 1, 2]]


def test_a_query_never_chooses_a_later_token(make_tiny: MakeTiny) -> None:
    attention = make_tiny("deepseek_v32").decoder._weights.layers[0].attention  # type: ignore[attr-defined]
    assert isinstance(attention, SparseLatentAttention)
    assert attention.indexer is not None
    heads = attention.heads
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(40, heads.index_count, heads.index_dim, generator=generator)
    weights = torch.randn(40, heads.index_count, generator=generator)
    keys = torch.randn(40, heads.index_dim, generator=generator)
    whole = attention.indexer.choose(IndexQueries(queries, weights), keys)
    for place, row in enumerate(whole.tolist()):
        seen = [number for number in row if number >= 0]
        assert len(seen) == min(place + 1, heads.chosen)
        assert seen == sorted(set(seen))
        assert max(seen) <= place
    queries[:, :, 0] = torch.nan  # as when numbers overflowed: the answer is worthless, but the step ends
    assert attention.indexer.choose(IndexQueries(queries, weights), keys).shape == whole.shape


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_small_tiles_choose_and_attend_alike(make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    tiny, tokens = make_tiny(family), _tokens(90)
    whole = Session(tiny).step(tokens)
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 1)  # one query at a time
    assert (Session(tiny).step(tokens) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_short_and_long_contexts_share_a_step(make_tiny: MakeTiny, family: str) -> None:
    tiny, prompts = make_tiny(family), [_tokens(5), _tokens(60, seed=2), _tokens(23, seed=3)]
    alone = [Session(tiny) for _ in prompts]
    for session, prompt in zip(alone, prompts, strict=True):
        session.step(prompt)
    together = Session(tiny, sequences=3)
    together.step(*prompts)
    for token in (7, 8, 9):  # the third context grows beyond the tokens that are chosen
        expected = torch.cat([session.step([token]) for session in alone])
        assert (together.step([token], [token], [token]) - expected).abs().max() < 1e-4
