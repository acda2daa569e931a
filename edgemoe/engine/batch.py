"""Turns the scheduled work of one step into what the experts (`StepMeta`) and the decoder (`Batch`) take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgemoe.engine.scheduler import Work
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS, Batch, StateUse, StepMeta


def describe(works: Sequence[Work]) -> StepMeta:
    """Returns the works' next tokens laid end to end, with the sequence that each belongs to."""
    tokens: list[int] = []
    for seq, count in works:
        tokens += seq.tokens[seq.computed : seq.computed + count]
    return StepMeta(
        requests=tuple(seq.request.id for seq, _ in works),
        query_lens=np.array([count for _, count in works]),
        decode=np.array([seq.decoding for seq, _ in works]),
        tokens=np.array(tokens),
        positions=np.concatenate([np.arange(seq.computed, seq.computed + count) for seq, count in works]),
        conversations=np.array([seq.conversation for seq, _ in works]),
    )


def make_batch(works: Sequence[Work], meta: StepMeta) -> Batch:
    """Returns the decoder's batch, which asks for logits of two kinds of tokens, sequence by sequence.

    First those of `prompt_logprob_positions`, then the last token of the sequence where the step computes it.
    """
    wanted: list[int] = []
    for work, start in zip(works, np.cumsum(meta.query_lens) - meta.query_lens, strict=True):
        first = int(start) - work.seq.computed
        wanted += [first + place for place in work.seq.prompt_logprob_positions(work.tokens)]
        if completes(work):
            wanted.append(int(start) + work.tokens - 1)
    return Batch(
        tokens=torch.from_numpy(meta.tokens),
        positions=torch.from_numpy(meta.positions),
        query_lens=[count for _, count in works],
        context_lens=[seq.computed + count for seq, count in works],
        block_tables=[seq.blocks for seq, _ in works],
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
        decode=bool(meta.decode.all()),
        states=[StateUse(seq.state, seq.next_states) for seq, _ in works if seq.next_states],
    )


def completes(work: Work) -> bool:
    """Returns whether the step computes the sequence's last token, so that the next one can be sampled."""
    return work.tokens == work.seq.uncomputed


def token_blocks(works: Sequence[Work]) -> IntArray:
    """Returns the KV block of each of the step's tokens, [T]."""
    blocks: list[int] = []
    for seq, count in works:
        blocks += [seq.blocks[place // BLOCK_TOKENS] for place in range(seq.computed, seq.computed + count)]
    return np.array(blocks)
