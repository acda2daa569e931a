"""Runs decode steps on a GPU by one launch each: a CUDA graph for each number of rows.

It does so while every expert lies in the GPU's memory. A graph is captured at the first step that needs it. Where that
fails, steps go on operation by operation, as they do otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch

from edgemoe.families.records import RopeSpec
from edgemoe.families.spec import ModelSpec
from edgemoe.model.decode_rows import DecodeRows, rows_for
from edgemoe.model.decoder_layers import Weights
from edgemoe.model.kv import KVCache
from edgemoe.model.rope import Rope
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import Batch, Experts, ExpertSlots

log = logging.getLogger(__name__)


class GraphedStep:
    """A step of T rows as a graph, and where its choices of experts are read."""

    def __init__(self, step: DecodeRows, device: torch.device) -> None:
        """Launches the step once, operation by operation, and captures it; on a CPU it is launched each time."""
        self.step, self._device, on_gpu = step, device, device.type == "cuda"
        chosen = step.experts
        self._ids, self._weights = (
            torch.empty(part.shape, dtype=part.dtype, pin_memory=on_gpu) for part in (chosen.ids, chosen.weights)
        )
        self._launch: Callable[[], object] = step.launch
        if on_gpu:
            self._launch = self._captured().replay

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self.step.launch()  # compiles and loads what it needs, which no capture may
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step.launch()
        return graph

    def run(self, batch: Batch, experts: Experts) -> torch.Tensor:
        """Computes the batch's logits, tells `experts` what was chosen, and returns the logits that it asks for."""
        step, count = self.step, len(batch.context_lens)
        step.inputs.fill(batch)
        self._launch()
        self._ids.copy_(step.experts.ids, non_blocking=True)
        self._weights.copy_(step.experts.weights, non_blocking=True)
        logits = step.logits[:count]
        wanted = batch.logit_rows.numpy(force=True)
        if not np.array_equal(wanted, np.arange(count)):
            logits = logits[batch.logit_rows.to(self._device)]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        ids = self._ids[:, :count]
        experts.computed(ids, self._weights[:, :count], count_distinct(ids.numpy()))
        return logits


class GraphedDecoder:
    """Keeps the graphs of one decoder, by rows."""

    def __init__(self, spec: ModelSpec, weights: Weights, ropes: Mapping[RopeSpec, Rope], device: torch.device) -> None:
        self._spec, self._weights, self._ropes, self._device = spec, weights, ropes, device
        self._steps: dict[int, GraphedStep] = {}
        self._made_for: tuple[KVCache, ExpertSlots] | None = None
        self._failed = False

    def forward(self, batch: Batch, kv: KVCache, experts: Experts) -> torch.Tensor | None:
        """Computes what `Decoder.forward` does; None where the step has to be computed in another way."""
        slots = experts.slots
        if slots is None or self._failed or not slots.renew():
            return None
        if self._made_for is None or self._made_for[0] is not kv or self._made_for[1] is not slots:
            self._steps, self._made_for = {}, (kv, slots)
        rows = rows_for(len(batch.context_lens))
        step = self._steps.get(rows)
        if step is None and (step := self._made(rows, batch, kv, slots)) is None:
            return None
        return step.run(batch, experts) if step.step.inputs.fits(batch) else None

    def _made(self, rows: int, batch: Batch, kv: KVCache, slots: ExpertSlots) -> GraphedStep | None:
        """Returns the step of so many rows, captured by running the batch, which is run again; None where it failed."""
        try:
            step = DecodeRows(self._spec, self._weights, self._ropes, kv, slots, rows)
            if not step.inputs.fits(batch):
                return None
            step.inputs.fill(batch)
            self._steps[rows] = GraphedStep(step, self._device)
        except Exception as error:  # a kernel that does not compile, too little memory, an operation that waits
            self._failed = True
            log.warning(
                "decode steps cannot be captured as graphs, and are launched operation by operation",
                extra={"rows": rows, "error": repr(error)},
            )
            return None
        return self._steps[rows]


def count_distinct(ids: IntArray) -> int:
    """Returns how many distinct experts [L, T, k] the layers chose, counted layer by layer."""
    ordered = np.sort(ids.reshape(len(ids), -1), axis=1)
    return len(ordered) + int(np.count_nonzero(np.diff(ordered, axis=1)))
