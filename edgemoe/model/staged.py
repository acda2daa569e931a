"""Computes a model whose layers are divided over boxes. docs/design/stages.md describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch

from edgemoe.errors import StoreError
from edgemoe.families.mechanisms import planned_tokens
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import StepContext, ropes_of
from edgemoe.model.decoder import FusedLayers, is_planned
from edgemoe.model.decoder_layers import DecoderLayer, DenseWeights, MoeRunner, gates_of, load_layers, load_weights
from edgemoe.model.kv import DTYPES, KVCache
from edgemoe.types.stages import StageCaller, StageWork, blocks_of
from edgemoe.types.step import Batch, ExpertExecutor


class StageLayers:
    """Computes the layers that this box holds on the residual stream, as `Decoder` does."""

    def __init__(
        self, spec: ModelSpec, layers: Sequence[DecoderLayer], device: torch.device, kernels: Kernels | None
    ) -> None:
        self.spec, self.device, self._kernels = spec, device, kernels
        self._layers, self._gates, self._ropes = layers, gates_of(layers), ropes_of(spec, device)
        self._longest = planned_tokens(spec)
        self._fused = None if kernels is None else FusedLayers(spec, layers, kernels, self._ropes)

    @torch.inference_mode()
    def compute(self, residual: torch.Tensor, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Returns the residual [T, H] float32 behind the layers, in host memory. Raises MissingExpert, CorruptExpert.

        The given residual may be changed. The result is valid until the next call.
        """
        few = is_planned(batch, self._longest)
        if self._kernels is not None:
            torch.set_num_threads(1 if few else self._kernels.pool.threads)
        if self._fused is not None and few:
            return self._fused.run(residual, batch, kv, experts)
        batch, residual = batch.to(self.device), residual.to(self.device)
        step = StepContext.of(batch, kv, self._kernels, self._ropes)
        called = MoeRunner(experts, self._gates, batch.decode, self.spec.first_expert_layer)
        for layer in self._layers:
            layer(residual, step, called)
        return residual.cpu()


class StagedDecoder:
    """Computes logits on the box with the first stage: its own layers, then the others' by their boxes.

    On a box without the first stage it only has that box's layers, for `StageHost`.
    """

    def __init__(
        self,
        own: StageLayers,
        ends: DenseWeights | None,
        callers: Sequence[StageCaller] = (),
    ) -> None:
        """Takes the callers of the other stages, in their order."""
        self.own, self.spec, self.device, self.callers = own, own.spec, own.device, callers
        self._ends = ends

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        path: Path,
        device: torch.device,
        kernels: Kernels | None,
        progress: Callable[[float], object] = lambda _: None,
    ) -> Self:
        """Loads the tensors that this box holds, as `Decoder.load` does, and no others. Raises StoreError."""
        kernels = kernels if device.type == "cpu" else None
        ends = load_weights(spec, path, device, kernels, progress) if spec.has_ends else None
        layers = load_layers(spec, path, device, kernels, progress) if ends is None else ends.layers
        return cls(StageLayers(spec, layers, device, kernels), ends)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Computes the same as `Decoder.forward`. Raises StageUnavailable too, and StoreError without the first stage.

        The other boxes are asked first whether they are there, so that no work is wasted.
        """
        if (ends := self._ends) is None:
            layers = self.spec.held_layers
            raise StoreError(f"this box holds layers {layers.start} to {layers.stop - 1} only, for another box")
        for caller in self.callers:
            caller.check()
        block = self.spec.block
        residual = ends.embed.rows_at(batch.tokens.to(self.device)).cpu()
        if block.embedding != 1.0:
            residual *= block.embedding
        residual = self.own.compute(residual, batch, kv, experts)
        for caller in self.callers:
            work = StageWork(
                residual.numpy(),
                batch.query_lens,
                batch.context_lens,
                _used(batch.block_tables, batch.context_lens),
                _used(batch.window_tables, batch.context_lens),
                batch.states,
            )
            residual = torch.from_numpy(caller.compute(work))
        last = ends.norm(residual[batch.logit_rows].to(self.device)).to(DTYPES[self.spec.dtype])
        return ends.logits(last, block)


def _used(tables: Sequence[Sequence[int]], context_lens: Sequence[int]) -> list[Sequence[int]]:
    """Returns the part of each table [S][blocks] that its context lies in."""
    return [table[: blocks_of(context)] for table, context in zip(tables, context_lens, strict=False)]
