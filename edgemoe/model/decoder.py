"""The decoder of all supported families. The records of the spec hold their differences.

The residual stream is float32; matrices multiply in the model's dtype. On the CPU, steps of few tokens, one of each
sequence, run as one plan of kernels (`FusedDecoder`). All others use the torch operations here. `StagedDecoder` divides
layers over boxes (docs/design/stages.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from edgemoe.errors import StoreError
from edgemoe.families.mechanisms import planned_tokens
from edgemoe.families.spec import ModelSpec, RopeSpec
from edgemoe.kernels.cpu.paged_cache import PagedCache, fill_cache
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.attention import RotaryEmbedding, StepContext, paged, ropes_of, tables_and_contexts
from edgemoe.model.decoder_layers import DecoderLayer, DenseWeights, MoeRunner, gates_of, load_layers, load_weights
from edgemoe.model.dense_weights import FEW_TOKENS, DenseMatrix
from edgemoe.model.graphed import GraphedDecoder
from edgemoe.model.kv import DTYPES, KVCache
from edgemoe.model.step_layers import LayerPlanner
from edgemoe.model.step_plan import StepPlan
from edgemoe.types.arrays import IntArray
from edgemoe.types.encoding import BFLOAT16, FLOAT32
from edgemoe.types.stages import StageCaller, StageWork, blocks_of
from edgemoe.types.step import Batch, ExpertExecutor, RowSource


def is_planned(batch: Batch, longest: int) -> bool:
    """Whether the plan can compute a step: few tokens, each of another sequence, in contexts that are not too long.

    `longest` is the longest context, 0 where all can be computed.
    """
    tokens = sum(batch.query_lens)
    if tokens != len(batch.query_lens) or tokens > FEW_TOKENS:
        return False
    return not longest or max(batch.context_lens) <= longest


class FusedLayers:
    """Runs consecutive layers by the kernels. Plans the step once, and fills its record at each step."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        kernels: Kernels,
        ropes: Mapping[RopeSpec, RotaryEmbedding],
    ) -> None:
        self._spec, self._kernels, self._ropes = spec, kernels, ropes
        self._gates, self._first = gates_of(layers), spec.first_expert_layer
        self._plan = plan = StepPlan(spec, kernels)
        self._layers = LayerPlanner(plan, self._first)
        for layer in layers:
            self._layers.add(layer)
        self._add_end(plan)
        self._step = plan.finish()
        self._attention = plan.attention[: len(self._layers.attending)]
        self._kv: KVCache | None = None  # whose addresses the records have
        self._pages: list[PagedCache] = []  # of its layers with keys and values: one of each shape
        self._placed: list[IntArray] = []  # arrays of the step to which the records point
        self._windowed = np.empty(0, np.bool_)  # whether keys and values of each such layer lie in blocks of windows

    def _add_end(self, plan: StepPlan) -> None:
        """Adds the stages behind the last layer: its output joins the residual."""
        plan.join(None, "input", [])

    def run(self, residual: torch.Tensor, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Returns the residual [T, H] behind the layers, valid until the next call, for one token of each sequence."""
        self._plan.residual[: len(residual)] = residual
        self._run(batch, kv, experts)
        return self._plan.residual[: len(residual)]

    def _run(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> None:
        """Runs all stages on the plan's residual."""
        spec, step, plan, tokens = self._spec, self._step, self._plan, len(batch.tokens)
        shape = spec.geometry.layers, tokens, spec.router.top_k
        ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
        if spec.held is not None:
            ids.fill_(-1)  # in the layers that other boxes compute
            weights.zero_()
        if kv is not self._kv:
            self._open(kv)
        self._place_blocks(batch)
        self._begin(batch)
        step["ids"], step["weights"] = ids.data_ptr(), weights.data_ptr()
        places = experts.places
        step["places"] = 0 if places is None else places.address(tokens, tokens * spec.router.top_k)
        self._kernels.step(step.ctypes.data)
        while step["next"][0] < step["stage_count"][0]:
            layer = int(step["layer"][0])
            if places is None and experts.lookahead and batch.decode:
                self._hint(experts, layer, tokens)
            plan.mixed[:tokens] = experts.forward(layer, plan.given[:tokens], ids[layer], weights[layer])
            step["next"] += 1
            self._kernels.step(step.ctypes.data)
        if places is not None:
            experts.computed(ids, weights, int(step["served"][0]))

    def _place_blocks(self, batch: Batch) -> None:
        """Writes contexts and block tables into the records of attention."""
        kept, rows = list[IntArray](), list(range(len(batch.tokens)))
        for kind in (False, True):
            of_kind = self._windowed == kind
            if of_kind.any():
                tables, contexts = tables_and_contexts(batch.tables_by_kind[kind], batch.context_lens, rows)
                if not kept:
                    self._kernels.fill_contexts(self._attention, tables, contexts, self._pages)
                self._attention["tables"][of_kind] = tables.ctypes.data
                kept += [tables, contexts]
        self._placed = kept

    def _begin(self, batch: Batch) -> None:
        """Writes the batch into the plan's inputs, except the residual."""
        step, plan, tokens = self._step, self._plan, len(batch.tokens)
        step["tokens"], step["positions"], step["next"], step["served"] = tokens, batch.positions.data_ptr(), 0, 0
        step["rows"], step["count"] = batch.logit_rows.data_ptr(), len(batch.logit_rows)
        for rope, angles in plan.angles.items():
            for to, part in zip(angles, self._ropes[rope](batch.positions), strict=True):
                to[:tokens] = part
        for number, use in enumerate(batch.states):
            plan.reads[number], plan.writes[number] = use.read, use.writes[-1][1]

    def _open(self, kv: KVCache) -> None:
        """Writes the addresses of keys, values and states into the records."""
        self._kv, shapes = kv, dict[tuple[int, int, int], PagedCache]()
        self._windowed = np.array([kv.windowed[each.layer] for each in self._layers.attending], np.bool_)
        for each in self._layers.attending:
            pages = paged(each.heads, kv, each.layer, each.scores)
            fill_cache(each.record, pages)
            shapes[pages.heads, pages.value_dim, pages.window] = pages
        self._pages = list(shapes.values())
        for state in self._layers.stateful:
            assert kv.states is not None
            state.fill(kv.states.layer(state.number))

    def _hint(self, experts: ExpertExecutor, layer: int, tokens: int) -> None:
        """Applies the gates that `experts` asks for to this layer's expert input, and passes the results on."""
        gates, number = self._gates, layer - self._first
        given = self._plan.residual if self._spec.block.parallel else self._plan.hidden
        for ahead in range(number + experts.lookahead.start, min(number + experts.lookahead.stop, len(gates))):
            experts.hint(self._first + ahead, gates[ahead].chances(given[:tokens], self._multiply))

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes the same as `torch.nn.functional.linear`, in float32."""
        out, is_bf16 = torch.empty((len(x), len(weight)), dtype=torch.float32), x.dtype == torch.bfloat16
        code = self._kernels.row_code(BFLOAT16 if is_bf16 else FLOAT32)
        (rows, n), place, x = weight.shape, weight.data_ptr(), x.contiguous()
        self._kernels.linear(place, rows, n, x.data_ptr(), is_bf16, len(x), out.data_ptr(), code)
        return out


class FusedDecoder(FusedLayers):
    """Computes logits by the kernels: all layers between embedding and head."""

    def __init__(
        self, spec: ModelSpec, weights: DenseWeights, kernels: Kernels, ropes: Mapping[RopeSpec, RotaryEmbedding]
    ) -> None:
        self._weights = weights
        super().__init__(spec, weights.layers, kernels, ropes)

    def _add_end(self, plan: StepPlan) -> None:
        """Adds the last norm, and the head's product."""
        last = plan.join(self._weights.norm, "input", [self._weights.head])
        plan.multiply([plan.part(self._weights.head, last, out=0)], of_rows=True)

    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Computes the same as `Decoder.forward`, for one token of each of at most FEW_TOKENS sequences."""
        spec, residual = self._spec, self._plan.residual[: len(batch.tokens)]
        logits = torch.empty((len(batch.logit_rows), spec.vocab), dtype=torch.float32)
        self._step["logits"] = logits.data_ptr()
        residual.copy_(self._weights.embed.rows_at(batch.tokens))
        if spec.block.embedding != 1.0:
            residual *= spec.block.embedding
        if self._weights.inputs is not None:
            inputs = self._weights.inputs(batch.tokens, residual)  # [T, L, width]
            self._plan.inputs[:, : len(batch.tokens), inputs.shape[2] :] = inputs.transpose(0, 1)
        self._run(batch, kv, experts)
        return self._weights.bounded(logits, spec.block)


class Decoder:
    """Computes logits from dense weights that it owns; the experts and the KV cache are passed to each call."""

    def __init__(
        self, spec: ModelSpec, weights: DenseWeights, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self.spec, self.device = spec, device
        self._weights, self.kernels = weights, kernels
        self._ropes, self.gates = ropes_of(spec, device), weights.gates
        self._fused: FusedDecoder | None = None
        self._longest = spec.chosen if kernels is None else planned_tokens(spec)  # context of a planned step
        if kernels is not None:
            self._fused = FusedDecoder(spec, weights, kernels, self._ropes)
        self._graphed: GraphedDecoder | None = None

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        path: Path,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
        progress: Callable[[float], object] = lambda _: None,
        graphs: bool = False,
        table: RowSource | None = None,
    ) -> Decoder:
        """Loads the weights from `dense.safetensors`. `kernels` are used on the CPU only. Raises StoreError.

        `progress` is called with the share of layers that are loaded. With `graphs` a GPU computes steps of few tokens
        as CUDA graphs, where every expert is in VRAM or pinned RAM. `table` has the rows of a model that has some.
        """
        device = torch.device(device)
        kernels = kernels if device.type == "cpu" else None
        progress(0.0)
        weights = load_weights(spec, path, device, kernels, progress, table)
        decoder = cls(spec, weights, device, kernels)
        if graphs and device.type == "cuda" and weights.inputs is None and not spec.chosen:
            decoder._graphed = GraphedDecoder(spec, weights, decoder._ropes, device)
        return decoder

    @property
    def embedding(self) -> DenseMatrix:
        """Returns the token embedding, [V, H], on the decoder's device. Not to be changed."""
        return self._weights.embed

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises StoreError.

        The `hidden` passed to `experts` is valid during that call only. While kernels compute few tokens, torch has one
        thread: its threads spin after each operation and would take cores from the kernels.
        """
        few = is_planned(batch, self._longest)
        if self.kernels is not None:
            torch.set_num_threads(1 if few else self.kernels.pool.threads)
        if self._fused is not None and few:
            return self._fused.forward(batch, kv, experts)
        if self._graphed is not None and few and (logits := self._graphed.forward(batch, kv, experts)) is not None:
            return logits
        batch = batch.to(self.device)
        step, block = StepContext.of(batch, kv, self.kernels, self._ropes), self.spec.block
        residual = self._weights.embed.rows_at(batch.tokens)
        if block.embedding != 1.0:
            residual *= block.embedding
        if self._weights.inputs is not None:
            step.layer_inputs = self._weights.inputs(batch.tokens, residual)
        called = MoeRunner(experts, self.gates, batch.decode)
        for layer in self._weights.layers:
            layer(residual, step, called)
        last = self._weights.norm(residual[batch.logit_rows]).to(DTYPES[self.spec.dtype])
        return self._weights.logits(last, block)


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
