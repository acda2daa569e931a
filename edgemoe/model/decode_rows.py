"""Computes a step of one token for each of T sequences on a GPU, asking the host nothing: what a CUDA graph can hold.

The layers are those of all steps; what they are given differs. Where sequences, blocks and slots lie is read from
`RowInputs`, which stay in place, so that the same launches serve every step of T rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.families.records import RopeSpec
from edgemoe.families.spec import ModelSpec
from edgemoe.kernels.cpu.runtime import EVERYTHING
from edgemoe.model.attention import Scores, StepAttention, StepContext
from edgemoe.model.decoder_layers import Weights
from edgemoe.model.kv import DTYPES, CodedKV, KVCache, StepStates
from edgemoe.model.rope import Rope
from edgemoe.model.row_layers import RowCalls, compute
from edgemoe.types.step import BLOCK_TOKENS, Batch, ExpertSlots

ROWS = (1, 2, 4, 8, 16)  # tokens of a step; one of another number is filled up with copies of its first
FIELDS = ("tokens", "positions", "contexts", "begins", "reads", "writes")


def rows_for(tokens: int) -> int:
    """Returns the rows of a step of so many tokens, at most the last of ROWS."""
    return next(rows for rows in ROWS if tokens <= rows)


class RowInputs:
    """What one step of T rows is told: numbers of each row, then the rows' block tables, one after the other."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        """`blocks` are the most that a sequence may have."""
        self.rows, self._most = rows, rows * blocks
        head = len(FIELDS) * rows
        self._there = torch.zeros(head + self._most, dtype=torch.int64, device=device)
        here = torch.zeros(head + self._most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._here, self._staged = here, here.numpy()
        self._fields: dict[str, npt.NDArray[np.int64]] = dict(
            zip(FIELDS, self._staged[:head].reshape(-1, rows), strict=True)
        )
        self.tokens, self.positions, self.contexts, self.begins, self.reads, self.writes = self._there[:head].view(
            -1, rows
        )
        self.tables = self._there[head:]

    def fits(self, batch: Batch) -> bool:
        """Returns whether the batch's block tables have room."""
        return sum(map(len, batch.block_tables)) <= self._most

    def fill(self, batch: Batch) -> None:
        """Copies a batch of at most T tokens, each of another sequence, to the GPU; does not wait for it."""
        count, at, fields = len(batch.context_lens), len(FIELDS) * self.rows, self._fields
        fields["tokens"][:count], fields["positions"][:count] = (
            batch.tokens.numpy(force=True),
            batch.positions.numpy(force=True),
        )
        fields["contexts"][:count] = batch.context_lens
        for row, (table, context) in enumerate(zip(batch.block_tables, batch.context_lens, strict=True)):
            needed = -(-context // BLOCK_TOKENS)
            self._staged[at : at + needed] = table[:needed]
            fields["begins"][row] = at - len(FIELDS) * self.rows
            at += needed
        if batch.states:
            fields["reads"][:count] = [use.read for use in batch.states]
            fields["writes"][:count] = [use.writes[-1][1] for use in batch.states]
        for field in fields.values():
            field[count:] = field[0]
        self._there[:at].copy_(self._here[:at], non_blocking=True)


class RowAttention(StepAttention):
    """Computes the attention of single tokens by kernels that read blocks, contexts and places from the inputs."""

    def __init__(self, inputs: RowInputs, kv: KVCache) -> None:
        from edgemoe.kernels.gpu import decode_attention

        self._kernels, self._kv, self._inputs, self._attention = None, kv, inputs, decode_attention
        self.prefills, self.single_rows = [], torch.arange(inputs.rows, device=kv.data.device)
        self.positions = inputs.positions
        self.blocks = self._blocks = inputs.tables[inputs.begins + inputs.positions // BLOCK_TOKENS]
        self._places = inputs.positions % BLOCK_TOKENS
        decode_attention.clear_begun(kv.data, self._blocks, inputs.positions)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        self.store(layer, k, v)
        return self.single(layer, q, scores).flatten(1)

    def single(self, layer: int, q: torch.Tensor, scores: Scores) -> torch.Tensor:
        pages, inputs = self._kv.layers[layer], self._inputs
        key_scales, value_scales = (pages.key_scales, pages.value_scales) if isinstance(pages, CodedKV) else (None,) * 2
        window = 0 if scores.window == EVERYTHING else scores.window
        lie = self._attention.PagedLayer(
            pages.keys, pages.values, key_scales, value_scales, scores.scale, window, scores.sinks
        )
        return self._attention.decode_attention(q.contiguous(), lie, inputs.tables, inputs.begins, inputs.contexts)  # type: ignore[no-any-return]


class RowExperts:
    """Calls experts where they lie in the GPU's memory, and keeps what the gates chose: ids and weights [L, T, k]."""

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
        raise AssertionError("nothing is foreseen where nothing is missing")

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        raise AssertionError("the step that it is part of is told of")


class DecodeRows:
    """One step of T rows: its inputs, the launches that compute it, and what they leave."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ropes: Mapping[RopeSpec, Rope],
        kv: KVCache,
        slots: ExpertSlots,
        rows: int,
    ) -> None:
        self._spec, self._weights, self._ropes, self._kv = spec, weights, ropes, kv
        device = kv.data.device
        most = min(kv.blocks, -(-spec.context_tokens // BLOCK_TOKENS))
        self.inputs = RowInputs(rows, most, device)
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
        )
        residual = self._weights.embed.pick(inputs.tokens)
        if block.embedding != 1.0:
            residual *= block.embedding
        calls = RowCalls(self.experts, self._weights.gates)
        for layer in self._weights.layers:
            compute(layer, residual, step, calls)
        last = self._weights.norm(residual).to(DTYPES[self._spec.dtype])
        self.logits.copy_(self._weights.logits(last, block))
