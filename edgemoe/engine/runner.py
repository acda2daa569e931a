"""Runs the forward pass of a step, and counts it in the block signatures, the chunk budget and the totals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.batch import describe, make_batch, token_blocks
from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.scheduler import ChunkBudget, Work
from edgemoe.families.spec import ModelSpec
from edgemoe.types.step import Batch, Experts, StepMeta, StepRouting

if TYPE_CHECKING:
    from edgemoe.engine.grammar import Grammars

KINDS, PHASES = ("steps", "seconds", "experts", "tokens"), ("prefill", "decode")


class StepDecoder(Protocol):
    """Computes logits: what the engine asks of the model."""

    def forward(self, batch: Batch, kv: Any, experts: Experts) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises MissingExpert, CorruptExpert."""


class StepExperts(Experts, Protocol):
    """Computes experts, and collects per step what the gates chose."""

    def begin_step(self, meta: StepMeta) -> npt.NDArray[np.int16]:
        """Starts collecting. Drops what was collected of a step that failed before its end.

        Returns the array of what the gates choose, [L, T, k], which is filled layer by layer, over -1.
        """

    def end_step(self) -> StepRouting:
        """Returns what the step's gates chose."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What an engine computes with."""

    spec: ModelSpec
    decoder: StepDecoder
    experts: StepExperts
    kv: Any  # of as many blocks and, in its `states`, slots as the engine's budget has
    device: torch.device
    grammars: Grammars | None = None


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told of steps, on the compute thread."""

    observe: Callable[[StepRouting], None] | None = None  # what the gates chose
    # each step before it runs, and the array of what its gates choose: see `StepExperts.begin_step`
    expect: Callable[[StepMeta, npt.NDArray[np.int16]], None] | None = None


class Computed(NamedTuple):
    """The result of a step's forward pass, which changes nothing until it is committed."""

    works: Sequence[Work]
    logits: torch.Tensor  # float32 [R, V], of the rows that `make_batch` wants
    routing: StepRouting
    step_s: float


class Runner:
    """Runs forward passes, commits them, and counts steps, seconds, tokens and experts."""

    def __init__(
        self,
        model: LoadedModel,
        blocks: BlockManager,
        chunk_budget: ChunkBudget,
        watchers: Watchers,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # by phase ("prefill" where a prompt is in the step): steps, seconds, experts touched in all layers, and tokens
        self.totals: dict[tuple[str, str], float] = dict.fromkeys(product(KINDS, PHASES), 0.0)
        self.started_s: float | None = None  # of the step, or the attempt at it, that the compute thread is in
        self._ids: npt.NDArray[np.int16] = np.empty((0, 0, 0), np.int16)  # see `StepExperts.begin_step`
        self._reached: tuple[float | None, int] = None, 0  # when the step began, and layers whose gates have chosen
        self._since_s = 0.0
        self._model, self._watchers = model, watchers
        self._blocks, self._chunk_budget, self._clock = blocks, chunk_budget, clock

    @property
    def layers_begun(self) -> int:
        """Returns how many layers the step, or the last one, has come to. May be read on any thread."""
        return int(np.count_nonzero(self._ids[:, :1, :1] >= 0))

    def standstill_s(self) -> float:
        """Returns the seconds for which it has seen the step come to no other layer; 0 between steps.

        For one caller, on any thread, who looks time and again. However slow a step is, it does not hang while it
        comes on.
        """
        now_s, started_s = self._clock(), self.started_s
        reached = started_s, self.layers_begun
        if reached != self._reached:
            self._reached, self._since_s = reached, now_s
        return 0.0 if started_s is None else now_s - self._since_s

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Counts the whole `with` block as part of the step in `standstill_s`, because a thread may hang anywhere."""
        self.started_s = self._clock()
        try:
            yield
        finally:
            self.started_s = None

    @torch.inference_mode()
    def compute(self, works: Sequence[Work]) -> Computed:
        """Runs the works' forward pass and changes nothing. Raises MissingExpert, CorruptExpert."""
        meta = describe(works)
        batch = make_batch(works, meta)
        started_s = self.started_s = self._clock()
        ids = self._ids = self._model.experts.begin_step(meta)
        if self._watchers.expect is not None:
            self._watchers.expect(meta, ids)
        logits = self._model.decoder.forward(batch, self._model.kv, self._model.experts)
        return Computed(works, logits, self._model.experts.end_step(), self._clock() - started_s)

    def commit(self, step: Computed) -> None:
        """Counts the step's tokens as computed, adds to the totals, and hands the gates' choices to `observe`."""
        works, _, routing, step_s = step
        meta = routing.meta
        self._blocks.observe(token_blocks(works), routing.ids)
        for seq, tokens in works:
            self._blocks.advance(seq, tokens)
        decoding = int(meta.decode.sum())
        prompt_tokens = len(meta.tokens) - decoding
        if prompt_tokens:
            self._chunk_budget.observe(prompt_tokens, step_s)
        phase = "prefill" if prompt_tokens else "decode"
        self.totals["steps", phase] += 1
        self.totals["seconds", phase] += step_s
        self.totals["experts", phase] += _active(routing)
        self.totals["tokens", "prefill"] += prompt_tokens
        self.totals["tokens", "decode"] += decoding
        if self._watchers.observe is not None:
            self._watchers.observe(routing)


def _active(routing: StepRouting) -> int:
    """Counts the distinct experts that the step touched, summed over layers."""
    layers = len(routing.ids)
    touched = np.zeros((layers, int(routing.ids.max()) + 1), np.bool_)
    touched[np.arange(layers)[:, None, None], routing.ids] = True
    return int(touched.sum())
