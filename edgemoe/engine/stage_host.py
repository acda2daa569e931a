"""Computes this box's layers for the sequences of another box, whose engine owns these and their blocks.

Keys, values and states lie in this box's blocks and slots under the other's numbers. So its block tables, prefix cache
and pauses work without any of them here.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.engine import Engine
from edgemoe.engine.steps import LoadedModel
from edgemoe.errors import PeerRefused
from edgemoe.model.kv import KVCache
from edgemoe.types.stages import CacheRoom, Stage, StageWork, blocks_of
from edgemoe.types.step import LEAST_STATE_SLOTS, Batch, ExpertExecutor, StateUse, StepMeta

MOST_OPENING = 1 << 62


class HeldLayers(Protocol):
    """Computes the layers that this box holds."""

    def compute(self, residual: torch.Tensor, batch: Batch, kv: Any, experts: ExpertExecutor) -> torch.Tensor:
        """Returns the residual [T, H] float32 behind the layers, valid until the next call."""


class StageHost:
    """Owns the opening: the engine of the box with the first stage that uses this box's blocks.

    Another opening makes all steps of the one before invalid. Steps run in the order of their numbers.
    """

    def __init__(
        self, stages: tuple[Stage, ...], node: str, layers: HeldLayers, model: LoadedModel, engine: Engine
    ) -> None:
        self.steps = 0
        self._head, self._stage = stages[0].node, next(stage for stage in stages if stage.node == node)
        self._layers, self._model, self._engine = layers, model, engine
        self.room = room_of(model.kv)
        self._opening, self._owner, self._number = 0, ("", ""), 0

    def open(self, peer: str, boot: str, layers: range) -> int:
        """Returns the number of an opening for an engine; it stays the same for the same engine. Raises PeerRefused.

        Called on the event loop.
        """
        if peer != self._head:
            raise PeerRefused(f"{peer} is not the box with the first stage here: that is {self._head} (cluster.stages)")
        if layers != self._stage.layers:
            theirs = Stage(self._stage.node, layers.start, layers.stop)
            raise PeerRefused(
                f"{self._stage.node} holds {self._stage}, not {theirs}: state the same cluster.stages on all boxes"
            )
        if self._owner != (peer, boot):
            self._owner, self._number = (peer, boot), 0
            self._opening = 1 + secrets.randbelow(MOST_OPENING)
        return self._opening

    def close(self) -> None:
        """Makes the opening invalid, so that the other box computes all keys and values again. From any thread."""
        self._owner, self._opening = ("", ""), 0

    def start(self, opening: int, number: int, work: StageWork) -> Future[npt.NDArray[np.float32]]:
        """Computes a step on the compute thread, before this box's next own. Its future may raise PeerRefused."""
        self._check_places(work)
        return self._engine.loop.ask(lambda: self._compute(opening, number, work))

    def warm_up(self, tokens: int) -> Future[None]:
        """Computes a prompt of random rows and a token behind it, in blocks of their own, so that all code is there."""
        return self._engine.loop.ask(lambda: self._warm_up(tokens))

    def _warm_up(self, tokens: int) -> None:
        model = self._model
        blocks = list(range(blocks_of(tokens + 1)))
        cache = KVCache.of(model.spec, len(blocks), LEAST_STATE_SLOTS, model.device)
        for first, count in ((0, tokens), (tokens, 1)):
            hidden = torch.randn(count, model.spec.hidden, generator=torch.Generator().manual_seed(0))
            states = [StateUse(min(first, 1), [(count, 1 + min(first, 1))])] if model.spec.state_layers else []
            batch, meta = batch_of(StageWork(hidden.numpy(), [count], [first + count], [blocks], (), states))
            self._engine.runner.compute_stage(meta, partial(self._layers.compute, hidden, batch, cache, model.experts))

    def _check_places(self, work: StageWork) -> None:
        kv, room = self._model.kv, self.room
        for tables, count in ((work.block_tables, room.blocks), (work.window_tables, room.window_blocks)):
            if count and tables and not (min(map(min, tables)) >= 0 and max(map(max, tables)) < count):
                raise PeerRefused("a step with a block that is not there")
        if bool(work.states) != self._model.spec.has_states:
            raise PeerRefused("a step with other states than the model has")
        if kv.states is None:
            return
        reads = [use.read for use in work.states]
        writes = [slot for use in work.states for _, slot in use.writes]
        if not (min(reads) >= 0 and min(writes) > 0 and max(reads + writes) < room.state_slots):
            raise PeerRefused("a step with a state that is not there")

    def _compute(self, opening: int, number: int, work: StageWork) -> npt.NDArray[np.float32]:
        if opening != self._opening or number <= self._number:
            raise PeerRefused("a step of an engine that is gone, or one that came too late")
        self._number = number
        batch, meta = batch_of(work)
        residual = torch.from_numpy(work.hidden.copy())
        self.steps += 1

        def compute() -> npt.NDArray[np.float32]:
            found = self._layers.compute(residual, batch, self._model.kv, self._model.experts)
            return found.numpy().copy()

        return self._engine.runner.compute_stage(meta, compute)


def room_of(kv: KVCache) -> CacheRoom:
    """Returns the number of places in this box's layers of each kind."""
    windows, states = kv.windows, kv.states
    return CacheRoom(
        kv.blocks if kv.block_bytes else 0,
        0 if windows is None or not windows.block_bytes else windows.blocks,
        0 if states is None else len(states.data),
    )


def batch_of(work: StageWork) -> tuple[Batch, StepMeta]:
    """Returns the batch of a stage's step, and its description, in which tokens and requests have no names."""
    lens, contexts = np.array(work.query_lens, np.int64), np.array(work.context_lens, np.int64)
    ends = np.cumsum(lens)
    positions = np.arange(int(ends[-1])) + np.repeat(contexts - ends, lens)
    tokens = np.zeros(len(positions), np.int64)
    decode = lens == 1
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        query_lens=lens.tolist(),
        context_lens=contexts.tolist(),
        block_tables=work.block_tables,
        logit_rows=torch.empty(0, dtype=torch.int64),
        decode=bool(decode.all()),
        states=work.states,
        window_tables=work.window_tables,
    )
    return batch, StepMeta(("",) * len(lens), lens, decode, tokens, positions)
