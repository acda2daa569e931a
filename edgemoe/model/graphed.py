"""Runs decode steps on a GPU by one launch each: a CUDA graph for each number of rows.

It does so while the GPU can read every expert, in its own memory or in pinned RAM. A graph is captured at the first
step that needs it. Where that fails, steps go on operation by operation, as they do otherwise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear

from edgemoe.families.spec import ModelSpec, RopeSpec
from edgemoe.kernels.cpu.paged_cache import EVERYTHING
from edgemoe.model.attention import AttentionScores, RotaryEmbedding, StepAttention, StepContext
from edgemoe.model.decoder_layers import DenseWeights, SerialLayer
from edgemoe.model.feed_forward import ExpertLayer, Gate
from edgemoe.model.kv import DTYPES, CodedKV, KVCache, StepStates
from edgemoe.model.row_layers import RowCalls, compute, normalised
from edgemoe.types.arrays import IntArray
from edgemoe.types.step import BLOCK_TOKENS, Batch, ExpertExecutor, ExpertSlots


class RowMoeRunner(RowCalls):
    """Calls the experts of a step of few rows, layer after layer."""

    def __init__(self, experts: RowExperts, gates: tuple[Gate, ...]) -> None:
        super().__init__(experts, gates, forecast=False)
        self._rows = experts

    def add_experts(self, layer: SerialLayer, experts: ExpertLayer, residual: torch.Tensor) -> None:
        from edgemoe.kernels.gpu import decode_dense

        gate, number, rows, slots = experts.gate, self._number, len(residual), self._rows.slots
        self._number += 1
        kind, router = slots.kind(number), gate.router
        planes, norm = torch.empty_like(residual), layer.post_norm
        few = rows <= decode_dense.MOST_ROWS and not norm.centred
        hidden = None
        if not few:
            hidden = normalised(residual, norm, layer.dtype, planes, kind)
        elif experts.has_shared:
            hidden = normalised(residual, norm, layer.dtype)
        if few:
            logits, rounded = residual.new_empty((rows, router.experts)), layer.dtype == torch.bfloat16
            with_planes = decode_dense.GpuProduct(norm.weight, norm.eps, planes=planes, kind=kind, rounded=rounded)
            decode_dense.multiplied(residual, gate.weight, logits, with_planes)
        else:
            assert hidden is not None
            logits = linear(hidden.to(gate.weight.dtype), gate.weight).float()
        how = decode_dense.GateRule(
            router.top_k,
            router.score == "softmax",
            gate.logit_bias,
            gate.selection_bias,
            gate.expert_scale,
            router.renormalise,
            router.least_mass,
            router.scale,
            router.groups,
            router.top_groups,
            router.group_score == "top2",
        )
        ids, shares = self._rows.ids[number], self._rows.weights[number]
        decode_dense.chosen(logits, how, ids, shares)
        shared = experts.shared(hidden) if hidden is not None else None
        slots.add(number, planes, ids, shares, residual, layer.factor)
        if shared is not None:
            residual.add_(shared, alpha=layer.factor)


ROWS = (1, 2, 4, 8, 16)  # tokens of a step; one of another number is filled up with copies of its first
FIELDS = ("tokens", "positions", "contexts", "begins", "reads", "writes")


def rows_for(tokens: int) -> int:
    """Returns the number of rows of a step of `tokens` tokens, from ROWS."""
    return next(rows for rows in ROWS if tokens <= rows)


class RowInputs:
    """The inputs of one step of T rows: numbers of each row, then block tables of all rows, one after the other.

    A row's table begins at the same place in each kind of layers.
    """

    def __init__(self, rows: int, blocks: int, kinds: int, device: torch.device) -> None:
        """Allocates room for at most `blocks` blocks a sequence, in each of `kinds` kinds of layers."""
        self.rows, self._most = rows, rows * blocks
        head = len(FIELDS) * rows
        self._there = torch.zeros(head + kinds * self._most, dtype=torch.int64, device=device)
        here = torch.zeros(head + kinds * self._most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._here, self._staged = here, here.numpy()
        self._fields: dict[str, npt.NDArray[np.int64]] = dict(
            zip(FIELDS, self._staged[:head].reshape(-1, rows), strict=True)
        )
        self.tokens, self.positions, self.contexts, self.begins, self.reads, self.writes = self._there[:head].view(
            -1, rows
        )
        self.tables = self._there[head:].view(kinds, -1)

    def fits(self, batch: Batch) -> bool:
        """Returns whether the batch's block tables have room."""
        return sum(map(len, batch.block_tables)) <= self._most

    def fill(self, batch: Batch) -> None:
        """Copies a batch of at most T tokens, each of another sequence, to the GPU; does not wait for it."""
        count, head, fields = len(batch.context_lens), len(FIELDS) * self.rows, self._fields
        fields["tokens"][:count], fields["positions"][:count] = (
            batch.tokens.numpy(force=True),
            batch.positions.numpy(force=True),
        )
        fields["contexts"][:count] = batch.context_lens
        needed = [-(-context // BLOCK_TOKENS) for context in batch.context_lens]
        ends = np.cumsum([0, *needed])
        fields["begins"][:count] = ends[:-1]
        for number, tables in enumerate(batch.tables_by_kind[: len(self.tables)]):
            first = head + number * self._most
            for table, blocks, at in zip(tables, needed, (first + ends).tolist(), strict=False):
                self._staged[at : at + blocks] = table[:blocks]
        if batch.states:
            fields["reads"][:count] = [use.read for use in batch.states]
            fields["writes"][:count] = [use.writes[-1][1] for use in batch.states]
        for field in fields.values():
            field[count:] = field[0]
        for begin, after in ((0, head + int(ends[-1])), (head + self._most, head + self._most + int(ends[-1]))):
            self._there[begin:after].copy_(self._here[begin:after], non_blocking=True)


class RowAttention(StepAttention):
    """Computes the attention of single tokens by kernels that read blocks, contexts and places from the inputs."""

    def __init__(self, inputs: RowInputs, kv: KVCache) -> None:
        from edgemoe.kernels.gpu import decode_attention

        self._kernels, self._kv, self._inputs, self._attention = None, kv, inputs, decode_attention
        self.prefills, self.single_rows = [], torch.arange(inputs.rows, device=kv.data.device)
        self.positions = inputs.positions
        self._places = inputs.positions % BLOCK_TOKENS
        self._rows = inputs.tables[:, inputs.begins + inputs.positions // BLOCK_TOKENS]
        for rows, pool in zip(self._rows, (kv, kv.windows), strict=False):
            if pool is not None and pool.block_bytes:
                decode_attention.clear_begun(pool.data, rows, inputs.positions)

    def blocks(self, layer: int) -> torch.Tensor:
        return self._rows[int(self._kv.windowed[layer])]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._kv.layers[layer].store(self.blocks(layer), self._places, k, v)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionScores
    ) -> torch.Tensor:
        self.store(layer, k, v)
        return self.single(layer, q, scores).flatten(1)

    def single(self, layer: int, q: torch.Tensor, scores: AttentionScores) -> torch.Tensor:
        pages, inputs = self._kv.layers[layer], self._inputs
        key_scales, value_scales = (pages.key_scales, pages.value_scales) if isinstance(pages, CodedKV) else (None,) * 2
        window = 0 if scores.window == EVERYTHING else scores.window
        lie = self._attention.PagedLayer(
            pages.keys, pages.values, key_scales, value_scales, scores.scale, window, scores.sinks
        )
        tables = inputs.tables[int(self._kv.windowed[layer])]
        return self._attention.decode_attention(q.contiguous(), lie, tables, inputs.begins, inputs.contexts)  # type: ignore[no-any-return]


class RowExperts:
    """Calls experts where the GPU can read them, and keeps the routing: ids and weights [L, T, k]."""

    lookahead, places = range(0), None

    def __init__(self, spec: ModelSpec, slots: ExpertSlots, rows: int, device: torch.device) -> None:
        geometry, self.slots = spec.geometry, slots
        shape = geometry.layers, rows, geometry.top_k
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.weights = torch.zeros(shape, dtype=torch.float32, device=device)

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.ids[layer], self.weights[layer] = ids, weights
        return self.slots.forward(layer, hidden, self.ids[layer], self.weights[layer])

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        raise AssertionError("no layer of the step is foreseen")

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        raise AssertionError("the step that it is part of is told of")


class DecodeRows:
    """One step of T rows: its inputs, the launches that compute it, and its results."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DenseWeights,
        ropes: Mapping[RopeSpec, RotaryEmbedding],
        kv: KVCache,
        slots: ExpertSlots,
        rows: int,
    ) -> None:
        self._spec, self._weights, self._ropes, self._kv = spec, weights, ropes, kv
        device = kv.data.device
        most = min(kv.blocks, -(-spec.context_tokens // BLOCK_TOKENS))
        self.inputs = RowInputs(rows, most, 1 if kv.windows is None else 2, device)
        self.experts = RowExperts(spec, slots, rows, device)
        self.logits = torch.empty((rows, spec.vocab), dtype=torch.float32, device=device)

    def launch(self) -> None:
        """Computes logits [T, V] of the inputs. Does not wait for the GPU."""
        inputs, kv, block = self.inputs, self._kv, self._spec.block
        attention = RowAttention(inputs, kv)
        step = StepContext(
            kv,
            None,
            attention,
            lambda: StepStates(attention.single_rows, inputs.reads, inputs.writes),
            lambda rope: self._ropes[rope](inputs.positions),
            inputs.positions,
        )
        residual = self._weights.embed.rows_at(inputs.tokens)
        if block.embedding != 1.0:
            residual *= block.embedding
        calls = RowMoeRunner(self.experts, self._weights.gates)
        for layer in self._weights.layers:
            compute(layer, residual, step, calls)
        last = normalised(residual, self._weights.norm, DTYPES[self._spec.dtype])
        self.logits.copy_(self._weights.logits(last, block))


log = logging.getLogger(__name__)


class GraphedStep:
    """A step of T rows as a graph, and where its routing is read."""

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
            self.step.launch()  # compiles and loads the kernels, which is forbidden during a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step.launch()
        return graph

    def run(self, batch: Batch, experts: ExpertExecutor) -> torch.Tensor | None:
        """Computes the batch, passes its chosen experts to `experts`, and returns the logits of its rows.

        Returns None, with nothing passed on, where `ExpertSlots.launch` refuses, or experts in RAM moved meanwhile.
        """
        step, count = self.step, len(batch.context_lens)
        step.inputs.fill(batch)
        if not step.experts.slots.launch(self._launch, step.inputs.rows):
            return None
        self._ids.copy_(step.experts.ids, non_blocking=True)
        self._weights.copy_(step.experts.weights, non_blocking=True)
        logits = step.logits[:count]
        wanted = batch.logit_rows.numpy(force=True)
        if not np.array_equal(wanted, np.arange(count)):
            logits = logits[batch.logit_rows.to(self._device)]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if not step.experts.slots.is_intact():  # the bytes that were read may be others
            return None
        ids = self._ids[:, :count]
        experts.computed(ids, self._weights[:, :count], count_distinct(ids.numpy()))
        return logits


class GraphedDecoder:
    """Keeps the graphs of one decoder, by rows."""

    def __init__(
        self, spec: ModelSpec, weights: DenseWeights, ropes: Mapping[RopeSpec, RotaryEmbedding], device: torch.device
    ) -> None:
        self._spec, self._weights, self._ropes, self._device = spec, weights, ropes, device
        self._steps: dict[int, GraphedStep] = {}
        self._made_for: tuple[KVCache, ExpertSlots] | None = None
        self._failed = False

    def forward(self, batch: Batch, kv: KVCache, experts: ExpertExecutor) -> torch.Tensor | None:
        """Computes the same as `Decoder.forward`; None if the step must be computed in another way."""
        slots = experts.slots
        if slots is None or self._failed:
            return None
        if self._made_for is None or self._made_for[0] is not kv or self._made_for[1] is not slots:
            self._steps, self._made_for = {}, (kv, slots)
        rows = rows_for(len(batch.context_lens))
        step = self._steps.get(rows)
        if step is None and (step := self._made(rows, batch, kv, slots)) is None:
            return None
        return step.run(batch, experts) if step.step.inputs.fits(batch) else None

    def _made(self, rows: int, batch: Batch, kv: KVCache, slots: ExpertSlots) -> GraphedStep | None:
        """Returns the step of `rows` rows, captured by running the batch, which must run again; None if that failed.

        Experts may be overwritten while that runs, so its results mean nothing.
        """
        if not slots.renew():
            return None
        try:
            if not self._steps:
                self._compile(kv, slots)
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

    def _compile(self, kv: KVCache, slots: ExpertSlots) -> None:
        """Compiles the kernels of all numbers of rows side by side, so that no later step waits for that."""
        if self._device.type != "cuda":
            return
        from edgemoe.kernels.gpu.launches import collected, compile_launches

        with collected() as launches:
            for rows in ROWS:
                DecodeRows(self._spec, self._weights, self._ropes, kv, slots, rows).launch()
        compile_launches(launches.values(), self._device, len(os.sched_getaffinity(0)))


def count_distinct(ids: IntArray) -> int:
    """Returns how many distinct experts [L, T, k] the layers chose, counted layer by layer."""
    ordered = np.sort(ids.reshape(len(ids), -1), axis=1)
    return len(ordered) + int(np.count_nonzero(np.diff(ordered, axis=1)))
