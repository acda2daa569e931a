"""Sampling on a GPU; imports nothing that a bare GPU machine may lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgemoe.engine.sampler import SampledToken, sample
from edgemoe.engine.sequence import Sequence
from edgemoe.types.request import Request, Sampling

STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 20, "top_p": 0.95},
    {"top_p": 0.8, "presence_penalty": 0.5},
    {"min_p": 0.05, "logit_bias": {3: 4.0}, "logprobs": 4},
    {"min_tokens": 3, "stop_token_ids": (1, 2)},
]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1000, 151_936])
def test_a_gpu_picks_the_tokens_that_the_cpu_picks(vocab: int) -> None:
    logits = 4 * torch.randn(60, vocab, generator=torch.Generator().manual_seed(0))
    rows = []
    for n in range(60):
        chosen = Sampling(max_tokens=9, **STYLES[n % len(STYLES)])
        request = Request(id=str(n), prompt=(1,), sampling=chosen, seed=n)
        rows.append(Sequence(request, (5, 6), 1, 0.0, 1e9))
    pairs = zip(sample(logits.cuda(), rows), sample(logits.clone(), rows), strict=True)
    for ours, expected in pairs:
        assert isinstance(ours, SampledToken)
        assert isinstance(expected, SampledToken)
        assert ours.token == expected.token
        assert ours.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1000, 151_936])
def test_a_gpu_takes_the_first_of_equal_highest_logits_and_refuses_rows_that_are_no_numbers(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        logits[row, [vocab - 1 - row, vocab // 2, 7 * row + 3]] = 9.0
    logits[3], logits[4, 5] = -torch.inf, torch.nan
    request = Request(id="r", prompt=(1,), sampling=Sampling(max_tokens=9, temperature=0.0), seed=0)
    rows = [Sequence(request, (5, 6), 1, 0.0, 1e9) for _ in range(5)]
    ours, expected = sample(logits.cuda(), rows), sample(logits.clone(), rows)
    assert ours[:3] == expected[:3] == [SampledToken(7 * row + 3) for row in range(3)]
    assert [str(error) for error in ours[3:]] == [str(error) for error in expected[3:]]
