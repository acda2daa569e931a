"""How long the chunks of prompts are beside decoding sequences."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.engine.scheduler import ChunkBudget

AIM_S, STEP_TOKENS, PROMPT = 0.25, 512, 16384


@pytest.mark.parametrize("fixed_s", [0.0, 0.05, 0.17, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_stream_waits_for_the_target_gap_or_twice_the_fixed_time(fixed_s: float, seed: int) -> None:
    random, chunk_budget = np.random.default_rng(seed), ChunkBudget(STEP_TOKENS, AIM_S)
    done, waits_s = 0, []
    while done < PROMPT:
        tokens = min(chunk_budget.prefill_tokens(decoding=4), PROMPT - done)
        step_s = (fixed_s + tokens * (1e-3 + 1e-7 * done)) * random.normal(1, 0.05)
        chunk_budget.observe(tokens, step_s)
        done += tokens
        waits_s.append(step_s)
    assert np.percentile(waits_s, 90) < 1.4 * max(AIM_S, 2 * fixed_s)


def test_without_a_target_or_streams_a_chunk_fills_the_step() -> None:
    assert ChunkBudget(STEP_TOKENS, 0.0).prefill_tokens(decoding=4) == STEP_TOKENS - 4
    assert ChunkBudget(STEP_TOKENS, AIM_S).prefill_tokens(decoding=0) == STEP_TOKENS
