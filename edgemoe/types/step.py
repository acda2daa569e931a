"""One step: its input, the routing, the experts that the decoder calls, their tokens, and the blocks that it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepMeta:
    """A step before it runs: S sequences with T tokens in all."""

    requests: tuple[str, ...]  # [S] request ids
    query_lens: IntArray  # [S] tokens that each contributed
    decode: BoolArray  # [S] true where the sequence was decoding
    tokens: IntArray  # [T] input token ids
    positions: IntArray  # [T]
    conversations: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[S] `conversation_of` each one's whole prompt, what the prefix cache supplied included; empty where unknown."""
    drafted: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[S] the last tokens of each that are drafts; empty where there are none."""

    @property
    def sure_rows(self) -> IntArray:
        """Returns the row [S] of each sequence's last token that is not a draft."""
        ends: IntArray = np.cumsum(self.query_lens) - 1
        return ends - self.drafted if len(self.drafted) else ends

    @property
    def prompt_tokens(self) -> int:
        """Counts the tokens of sequences that are not decoding."""
        return int(self.query_lens[~self.decode].sum())


@dataclass(frozen=True, slots=True)
class StepRouting:
    """The routing in one step: the input of cache policy, predictors and recorder."""

    meta: StepMeta
    ids: npt.NDArray[np.int16]  # [L, T, k]
    weights: FloatArray  # [L, T, k]
    hints: dict[int, FloatArray]  # distance in layers, 0 is its own gate -> [L, T, E]; empty where not collected
    step_s: float  # wall time of the step
    stall_s: float  # part of step_s that was spent waiting for experts
    hidden: FloatArray | None = None  # [L, T, H] the input of each layer's experts; None where not collected

    def without_rejected(self, accepted: IntArray) -> StepRouting:
        """Returns the step with only the first `accepted` [S] of each sequence's drafted tokens."""
        meta = self.meta
        rejected = meta.drafted - accepted
        ends = np.cumsum(meta.query_lens)
        gone = [np.arange(end - count, end) for end, count in zip(ends.tolist(), rejected.tolist(), strict=True)]
        rows = np.delete(np.arange(len(meta.tokens)), np.concatenate(gone))
        kept = replace(
            meta,
            query_lens=meta.query_lens - rejected,
            tokens=meta.tokens[rows],
            positions=meta.positions[rows],
            drafted=accepted,
        )
        return replace(
            self,
            meta=kept,
            ids=self.ids[:, rows],
            weights=self.weights[:, rows],
            hints={distance: hints[:, rows] for distance, hints in self.hints.items()},
            hidden=None if self.hidden is None else self.hidden[:, rows],
        )


BLOCK_TOKENS = 16  # tokens per KV block, everywhere
ROLLBACK_TOKENS = 64  # the last tokens of a sequence, which may be taken back: their windows are kept, too
LEAST_STATE_SLOTS = 3  # the first token's, one to read and one to write


class StateUse(NamedTuple):
    """Which slots a sequence's states are read from and written to, where the model has such (see `StateCache`)."""

    read: int  # the slot of the state before the step's first token
    writes: Sequence[tuple[int, int]]  # (tokens of the step, slot of the state after them), ascending, the last for all


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens: S sequences, each contributing `query_lens[s]` tokens, laid end to end (T in all).

    A decoding sequence contributes one token, a prefilling one a chunk. The keys and values of the T tokens are written
    to the KV blocks first. Then each token attends to its sequence's positions up to its own. So drafted tokens stand
    behind their sequence's own as sequences of one token, with the same blocks and ever longer contexts.
    """

    tokens: torch.Tensor  # [T] int64, on the CPU as all of a batch
    positions: torch.Tensor  # [T] int64
    query_lens: Sequence[int]  # [S]
    context_lens: Sequence[int]  # [S] tokens of the sequence after this step
    block_tables: Sequence[Sequence[int]]  # [S][blocks] KV block ids, in order
    logit_rows: torch.Tensor  # [R] int64, the rows of T whose logits are wanted
    decode: bool  # every sequence contributes one token
    states: Sequence[StateUse]  # [S], empty where the model has no states
    window_tables: Sequence[Sequence[int]] = ()
    """[S][blocks] the same for layers with windows; empty where their blocks have the same ids."""

    @property
    def tables_by_kind(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Returns the block tables of layers that see all tokens, and of layers with windows."""
        return self.block_tables, self.window_tables or self.block_tables

    def to(self, device: torch.device) -> Batch:
        """Returns the batch with its tensors on `device`."""
        tokens, positions, rows = (part.to(device) for part in (self.tokens, self.positions, self.logit_rows))
        return replace(self, tokens=tokens, positions=positions, logit_rows=rows)


class ExpertPlaces(Protocol):
    """Addresses of all experts in the CPU's memory, for the kernel that runs whole steps."""

    def address(self, tokens: int, pairs: int) -> int:
        """Returns the address of the layers' records, for a step of `tokens` tokens and `pairs` expert calls."""


class ExpertSlots(Protocol):
    """Computes experts where a GPU can read them, in its memory or in RAM, without the host: for CUDA graphs."""

    @property
    def outside(self) -> BoolArray:
        """Returns the mask of experts [L, E] that the last launch found in RAM only."""

    def renew(self) -> bool:
        """Sends changed expert addresses to the GPU. Returns False where the GPU cannot read an expert."""

    def launch(self, graph: Callable[[], object], rows: int) -> bool:
        """Calls `graph`, which launches a step of `rows` tokens, whose kernels read experts at their present addresses.

        Copies that would overwrite these experts wait for the kernels. Returns False, with nothing launched, where the
        GPU cannot read an expert, or would take longer so.
        """

    def is_intact(self) -> bool:
        """Returns whether the experts that the last launch read from RAM are still there, once it has ended."""

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the result of `Experts.forward`, [T, H] float32, for few tokens."""

    def kind(self, layer: int) -> int:
        """Returns the number of the encoding of a layer's experts, by which activations are laid out for `add`."""

    def add(
        self,
        layer: int,
        planes: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: torch.Tensor,
        factor: float,
    ) -> None:
        """Adds the same, times `factor`, to `to` [T, H], for activations [T, H] in planes."""


class ExpertExecutor(Protocol):
    """Computes the experts of MoE layers for the decoder. Called on the compute thread only."""

    lookahead: range  # how many layers ahead to call `hint`; 0 is the layer whose turn it is

    @property
    def places(self) -> ExpertPlaces | None:
        """Returns the experts' addresses once all are in the CPU's memory; else None."""

    @property
    def slots(self) -> ExpertSlots | None:
        """Returns the object that computes experts on one GPU without the host; None where that is impossible."""

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' outputs, [T, H], preferably in float32.

        `hidden` [T, H] in the model's dtype; `ids` [T, k] int64; `weights` [T, k] float32.
        Raises MissingExpert, CorruptExpert.
        """

    def computed(self, ids: torch.Tensor, weights: torch.Tensor, served: int) -> None:
        """Counts a step that was computed by `places` or `slots`.

        `ids` and `weights` [L, T, k] are as in `forward`; `served` counts the distinct experts of its layers.
        """

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        """Forecasts the experts of `layer`: `probs` [T, E] float32, its gate's output for another hidden state.

        That is an earlier layer's, or at distance 0 the layer's own before `forward`.
        """


# KV blocks of layers with a window of tokens.


def first_seen(position: int, window: int) -> int:
    """Returns the first block that the token at `position` sees."""
    return max(0, position + 1 - window) // BLOCK_TOKENS


def first_kept(computed: int, window: int) -> int:
    """Returns the first block that a sequence of `computed` tokens keeps."""
    return first_seen(computed - ROLLBACK_TOKENS, window)


def most_kept(window: int) -> int:
    """Returns the most blocks that a sequence keeps, with that of its next token."""
    return -(-(window + ROLLBACK_TOKENS - 1) // BLOCK_TOKENS) + 1


def last_covered(count: int, window: int, is_known: Callable[[int], bool]) -> int:
    """Returns the most of the first `count` blocks after which a token sees known blocks only."""
    place = count
    while place > first_seen(count * BLOCK_TOKENS, window):
        place -= 1
        if not is_known(place):
            count = place
    return count


def least_blocks(window: int) -> int:
    """Returns the fewest blocks with which a sequence is computed: its own, one that it begins, and one of zeros."""
    return most_kept(window) + 2


class EntryKind(IntEnum):
    """The content of an entry that the prefix cache has for a block's key."""

    BLOCK = 0  # keys and values of the layers that see all tokens, then the block's expert signature
    STATE = 1  # the states after the block
    WINDOW = 2  # keys and values of the layers with windows


class RowSource(Protocol):
    """A table of rows; used by one thread, the one that computes."""

    row_bytes: int

    def begin_reads(self, numbers: IntArray) -> None:
        """Begins to read rows that will be taken soon."""

    def take_rows(self, numbers: IntArray) -> npt.NDArray[np.uint8]:
        """Returns these rows, [n, row_bytes]; waits for the ones that are not in memory. Raises StoreError."""


class TokenGroups(NamedTuple):
    """The calls of T tokens for k experts each, grouped by expert: expert i has calls `offsets[i]:offsets[i + 1]`."""

    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    calls: IntArray  # [m] the call's place among all, token * k + j
    tokens: IntArray  # [m] its token
    weights: FloatArray  # [m] its routing weight

    @classmethod
    def of(cls, ids: IntArray, weights: FloatArray) -> Self:
        """Returns the group of T tokens' calls for k experts each: `ids` and `weights` [T, k]."""
        tokens, k = ids.shape
        flat = ids.ravel()
        if tokens == 1:  # a token's experts are distinct
            return cls(flat, *_of_one_token(k), weights.ravel())
        order = np.argsort(flat.astype(np.int16), kind="stable")  # by radix, as of int64 it is not
        ordered = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        offsets = np.concatenate((starts, [len(flat)]))
        return cls(ordered[starts], offsets, order, order // k, weights.ravel()[order])

    def only(self, chosen: BoolArray) -> Self:
        """Returns the group of the chosen [n] experts."""
        if len(self.experts) == len(self.calls):  # one call each
            experts, calls = self.experts[chosen], self.calls[chosen]
            return type(self)(
                experts, self.offsets[: len(experts) + 1], calls, self.tokens[chosen], self.weights[chosen]
            )
        counts = np.diff(self.offsets)
        kept = np.repeat(chosen, counts)
        offsets = np.concatenate(([0], np.cumsum(counts[chosen])))
        return type(self)(self.experts[chosen], offsets, self.calls[kept], self.tokens[kept], self.weights[kept])

    def within(self, rows: IntArray) -> Self:
        """Returns the group of some tokens: `rows`, sorted, must be consecutive among the group's tokens."""
        kept = np.flatnonzero((self.tokens >= rows[0]) & (self.tokens <= rows[-1]))
        ends = np.searchsorted(kept, self.offsets)
        used = np.flatnonzero(np.diff(ends))
        offsets = np.append(ends[used], len(kept))
        return type(self)(self.experts[used], offsets, self.calls[kept], self.tokens[kept], self.weights[kept])


@functools.cache
def _of_one_token(k: int) -> tuple[IntArray, IntArray, IntArray]:
    return np.arange(k + 1), np.arange(k), np.zeros(k, np.int64)
