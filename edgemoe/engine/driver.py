"""Makes blocks, states and batches of steps without the engine's queue, to measure or compare a model."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import replace

import torch

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.scheduler import ScheduledWork
from edgemoe.engine.sequence import Sequence, blocks_for
from edgemoe.engine.state_slots import StateSlots
from edgemoe.engine.steps import describe, make_batch
from edgemoe.families.spec import ModelSpec
from edgemoe.model.kv import KVCache
from edgemoe.types.request import Request, Sampling
from edgemoe.types.step import BLOCK_TOKENS, Batch, StepMeta


class SequenceDriver:
    """Owns the cache of `count` sequences of at most `most_tokens` tokens. The caller appends their tokens.

    `cache` is the KV cache that the decoder takes with each batch.
    """

    def __init__(
        self, spec: ModelSpec, count: int, most_tokens: int, device: torch.device | str = "cpu", name: str = ""
    ) -> None:
        blocks, slots = count * blocks_for(most_tokens), 2 * count + 1  # one slot to read, one to write
        self.cache = KVCache.of(spec, blocks, slots, device)
        states = StateSlots(slots, count) if spec.state_layers else None
        geometry = spec.geometry
        self._blocks = BlockManager(blocks, geometry.layers, geometry.experts, prefix_cache=False, states=states)
        requests = [Request(id=f"{name}{n}", prompt=(), sampling=Sampling(), seed=0) for n in range(count)]
        self._sequences = [Sequence(request, (), 1, 0.0, 0.0) for request in requests]

    def step(self, chunks: Row[Row[int]], every_row: bool = False) -> tuple[StepMeta, Batch]:
        """Appends a chunk of tokens to each sequence, none where it is empty. Returns the step that computes them.

        The batch asks for the logits of each chunk's last token, or of all tokens. The step counts as computed.
        """
        works = []
        for seq, chunk in zip(self._sequences, chunks, strict=True):
            if not chunk:
                continue
            seq.tokens += chunk
            while len(seq.tokens) > len(seq.blocks) * BLOCK_TOKENS:
                self._blocks.append(seq)
            self._blocks.prepare(seq, len(chunk))
            works.append(ScheduledWork(seq, len(chunk)))
        meta = describe(works)
        batch = make_batch(works, meta)
        for seq, tokens, _ in works:
            self._blocks.advance(seq, tokens)
        if every_row:
            batch = replace(batch, logit_rows=torch.arange(len(batch.tokens)))
        return meta, batch
