"""Computes this box's layers for the sequences of another box, whose engine owns these and their blocks.

Keys and values lie in this box's blocks under the other's numbers. So its block tables, prefix cache and pauses work
without any of them here.
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
from edgemoe.types.stages import Stage, StageWork, blocks_of
from edgemoe.types.step import Batch, ExpertExecutor, StepMeta

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
        self._layers, self._model, self._engine, self._blocks = layers, model, engine, engine.blocks.count
        self._windows = 0 if model.kv.windows is None else model.kv.windows.blocks
        self._opening, self._owner, self._number = 0, ("", ""), 0

    def open(self, peer: str, boot: str, layers: range, blocks: int, window_blocks: int) -> int:
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
        for count, here, kind in ((blocks, self._blocks, "blocks"), (window_blocks, self._windows, "windows' blocks")):
            if count > here and (here or kind == "blocks"):
                raise PeerRefused(
                    f"{self._stage.node} has {here} {kind} of keys and values, and {peer} has {count}. "
                    f"Raise memory.kv_bytes on {self._stage.node} by {-(-100 * count // here) - 100} %, "
                    f"or lower it on {peer}"
                )
        if self._owner != (peer, boot):
            self._owner, self._number = (peer, boot), 0
            self._opening = 1 + secrets.randbelow(MOST_OPENING)
        return self._opening

    def start(self, opening: int, number: int, work: StageWork) -> Future[npt.NDArray[np.float32]]:
        """Computes a step on the compute thread, before this box's next own. Its future may raise PeerRefused."""
        self._check_blocks(work)
        return self._engine.loop.ask(lambda: self._compute(opening, number, work))

    def warm_up(self, tokens: int) -> Future[None]:
        """Computes a prompt of random rows and a token behind it, in blocks of their own, so that all code is there."""
        return self._engine.loop.ask(lambda: self._warm_up(tokens))

    def _warm_up(self, tokens: int) -> None:
        model = self._model
        blocks = list(range(blocks_of(tokens + 1)))
        cache = KVCache.of(model.spec, len(blocks), 0, model.device)
        for first, count in ((0, tokens), (tokens, 1)):
            hidden = torch.randn(count, model.spec.hidden, generator=torch.Generator().manual_seed(0))
            batch, meta = batch_of(StageWork(hidden.numpy(), [count], [first + count], [blocks], ()))
            self._engine.runner.compute_stage(meta, partial(self._layers.compute, hidden, batch, cache, model.experts))

    def _check_blocks(self, work: StageWork) -> None:
        for tables, count in ((work.block_tables, self._blocks), (work.window_tables, self._windows)):
            if tables and not (min(map(min, tables)) >= 0 and max(map(max, tables)) < (count or self._blocks)):
                raise PeerRefused("a step with a block that is not there")

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
        states=(),
        window_tables=work.window_tables,
    )
    return batch, StepMeta(("",) * len(lens), lens, decode, tokens, positions)
