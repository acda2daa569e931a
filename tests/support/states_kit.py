"""A small model with a state beside keys and values, for the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from edgemoe.types.step import Batch
from support.engine_kit import SPEC, Model, PlainCache, PlainDecoder

SLOTS = 30


class PlainStates:
    """One vector a slot; slot 0 is zero, the others NaN until written."""

    def __init__(self, slots: int) -> None:
        self.data = torch.full((slots, SPEC.hidden), torch.nan)
        self.data[0] = 0.0
        self.slot_bytes = self.data.stride(0) * 4

    def gather(self, slots: Sequence[int]) -> torch.Tensor:
        return self.data[list(slots)].clone()

    def scatter(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        assert 0 not in slots
        self.data[list(slots)] = rows


class CacheWithStates(PlainCache):
    """Keys and values in blocks, and states in slots."""

    def __init__(self, blocks: int, slots: int = SLOTS) -> None:
        super().__init__(blocks)
        self.states = PlainStates(slots)


class StatefulDecoder(PlainDecoder):
    """Adds to each token a vector that it and all tokens before it have turned and pushed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        self.turn = 0.95 * torch.linalg.qr(torch.randn(SPEC.hidden, SPEC.hidden, generator=generator)).Q

    def embedded(self, batch: Batch, kv: PlainCache) -> torch.Tensor:
        assert len(batch.states) == len(batch.query_lens)
        x = super().embedded(batch, kv)
        rows, pushes = [], iter(x)
        for use, count in zip(batch.states, batch.query_lens, strict=True):
            state, writes = kv.states.data[use.read], dict(use.writes)
            assert list(writes)[-1] == count
            for n in range(count):
                state = self.turn @ state + 0.3 * next(pushes)
                rows.append(state)
                if n + 1 in writes:
                    assert writes[n + 1] not in (0, use.read), "a step writes what it reads"
                    kv.states.data[writes[n + 1]] = state
        return x + torch.stack(rows)


def stateful_model(slots: int = SLOTS) -> Model:
    decoder = StatefulDecoder()
    return Model(decoder, decoder.experts, SPEC, partial(CacheWithStates, slots=slots))
