"""Runs a step as a transaction: batch, forward pass and sampling first, then the commit (see docs/design/engine.md).

A failed step changes nothing. It is computed again in parts, down to the sequence that fails alone. A probe token tells
a faulty request from a broken engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.sampler import NOT_A_NUMBER, SampledToken, prompt_logprobs_of, sample
from edgemoe.engine.scheduler import ChunkBudget, ScheduledWork, Scheduler
from edgemoe.engine.sequence import Sequence
from edgemoe.errors import EdgemoeError, RequestError, StageUnavailable, StoreError, code_of
from edgemoe.families.spec import ModelSpec
from edgemoe.types.arrays import IntArray
from edgemoe.types.request import Request, Sampling, TokenLogprob
from edgemoe.types.step import BLOCK_TOKENS, Batch, ExpertExecutor, RowSource, StateUse, StepMeta, StepRouting

if TYPE_CHECKING:
    from edgemoe.engine.grammar import GrammarCompiler


T = TypeVar("T")


def describe(works: Rows[ScheduledWork]) -> StepMeta:
    """Returns the works' next tokens laid end to end, with the sequence that each belongs to."""
    tokens: list[int] = []
    for seq, count, draft in works:
        tokens += [*seq.tokens[seq.computed : seq.computed + count], *draft]
    counts = [count + len(draft) for _, count, draft in works]
    drafted = [len(draft) for _, _, draft in works]
    return StepMeta(
        requests=tuple(work.seq.request.id for work in works),
        query_lens=np.array(counts),
        decode=np.array([work.seq.decoding for work in works]),
        tokens=np.array(tokens),
        positions=np.concatenate(
            [np.arange(work.seq.computed, work.seq.computed + count) for work, count in zip(works, counts, strict=True)]
        ),
        conversations=np.array([work.seq.conversation for work in works]),
        drafted=np.array(drafted if any(drafted) else [], np.int64),
    )


def make_batch(works: Rows[ScheduledWork], meta: StepMeta) -> Batch:
    """Returns the decoder's batch, which asks for logits of two kinds of tokens, sequence by sequence.

    These are the tokens of `prompt_logprob_positions`, then the sequence's last token if the step computes it, with the
    drafted tokens behind it.
    """
    wanted: list[int] = []
    query_lens: list[int] = []
    context_lens: list[int] = []
    block_tables: list[list[int]] = []
    window_tables: list[list[int]] = []
    for work, start in zip(works, np.cumsum(meta.query_lens) - meta.query_lens, strict=True):
        (seq, tokens, draft), first = work, int(start)
        context, last, rows = seq.computed + tokens, first + tokens - 1, 1 + len(draft)
        wanted += [first - seq.computed + place for place in seq.prompt_logprob_positions(tokens)]
        wanted += range(last, last + rows) if completes(work) else ()
        query_lens += [tokens, *[1] * len(draft)]
        context_lens += range(context, context + rows)
        block_tables += [seq.blocks] * rows
        window_tables += [seq.window_blocks] * rows if seq.window_blocks else ()
    return Batch(
        tokens=torch.from_numpy(meta.tokens),
        positions=torch.from_numpy(meta.positions),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=block_tables,
        logit_rows=torch.tensor(wanted, dtype=torch.int64),
        decode=bool(meta.decode.all()),
        states=[StateUse(work.seq.state, work.seq.next_states) for work in works if work.seq.next_states],
        window_tables=window_tables,
    )


def completes(work: ScheduledWork) -> bool:
    """Returns whether the step computes the sequence's last token, so that the next one can be sampled."""
    return work.tokens == work.seq.uncomputed


def token_blocks(works: Rows[ScheduledWork]) -> IntArray:
    """Returns the KV block of each of the step's tokens that are not drafts."""
    blocks: list[int] = []
    for seq, count, _ in works:
        blocks += [seq.blocks[place // BLOCK_TOKENS] for place in range(seq.computed, seq.computed + count)]
    return np.array(blocks)


def rows_of(works: Rows[ScheduledWork]) -> IntArray:
    """Returns the rows of the step's tokens that are not drafts."""
    drafted = np.concatenate([np.repeat([False, True], (count, len(draft))) for _, count, draft in works])
    return np.flatnonzero(~drafted)


def following_tokens(works: Rows[ScheduledWork]) -> IntArray:
    """Returns the tokens of prompts that the step after this one is likely to compute."""
    tokens: list[int] = []
    for seq, count, _ in works:
        end = seq.computed + count
        tokens += seq.tokens[end : end + count]
    return np.array(tokens, np.int64)


KINDS, PHASES = ("steps", "seconds", "experts", "tokens"), ("prefill", "decode")


class StepDecoder(Protocol):
    """Computes logits: the engine's interface to the model."""

    def forward(self, batch: Batch, kv: Any, experts: ExpertExecutor) -> torch.Tensor:
        """Returns logits of the rows that the batch asks for, float32 [R, V]. Raises StoreError."""


class StepExperts(ExpertExecutor, Protocol):
    """Computes experts, and collects the routing per step."""

    def begin_step(self, meta: StepMeta) -> npt.NDArray[np.int16]:
        """Starts collecting. Drops the routing of a step that failed before its end.

        Returns the array of the routing [L, T, k], which is filled with -1 first, and then layer by layer.
        """

    def end_step(self) -> StepRouting:
        """Returns the step's routing."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: decoder, experts, KV cache, grammars, and its table of rows, if it has one."""

    spec: ModelSpec
    decoder: StepDecoder
    experts: StepExperts
    kv: Any  # of as many blocks and, in its `states`, slots as the engine's budget has
    device: torch.device
    grammars: GrammarCompiler | None = None
    table: RowSource | None = None


@dataclass(frozen=True, slots=True)
class StepObservers:
    """Functions that are called with each step, on the compute thread."""

    observe: Callable[[StepRouting], None] | None = None  # with the routing, after a step
    # with each step before it runs, and the array of its routing: see `StepExperts.begin_step`
    expect: Callable[[StepMeta, npt.NDArray[np.int16]], None] | None = None


class ForwardResult(NamedTuple):
    """The result of a step's forward pass, which changes nothing until it is committed."""

    works: Rows[ScheduledWork]
    logits: torch.Tensor  # float32 [R, V], of the rows that `make_batch` wants
    routing: StepRouting
    step_s: float


class ForwardRunner:
    """Runs forward passes, commits them, and counts steps, seconds, tokens and experts."""

    def __init__(
        self,
        model: LoadedModel,
        blocks: BlockManager,
        chunk_budget: ChunkBudget,
        watchers: StepObservers,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # by phase ("prefill" where a prompt is in the step): steps, seconds, experts touched in all layers, and tokens
        self.totals: dict[tuple[str, str], float] = dict.fromkeys(product(KINDS, PHASES), 0.0)
        self.started_s: float | None = None  # of the step, or the attempt at it, that the compute thread is in
        self._ids: npt.NDArray[np.int16] = np.empty((0, 0, 0), np.int16)  # see `StepExperts.begin_step`
        self.stage_ended_s = -math.inf  # when this box last computed its layers for another box
        self._reached: tuple[float | None, int] = None, 0  # when the step began, and layers whose gates have chosen
        self._since_s = 0.0
        self._model, self._watchers = model, watchers
        self._blocks, self._chunk_budget, self.clock = blocks, chunk_budget, clock

    @property
    def layers_begun(self) -> int:
        """Counts the layers that the current step, or the last one, has begun. May be read on any thread."""
        return int(np.count_nonzero(self._ids[:, :1, :1] >= 0))

    def standstill_s(self) -> float:
        """Returns the seconds since a caller last saw the step begin another layer; 0 between steps.

        Serves one caller, on any thread, that polls. A slow step does not count as hanging while it begins layers.
        """
        now_s, started_s = self.clock(), self.started_s
        reached = started_s, self.layers_begun
        if reached != self._reached:
            self._reached, self._since_s = reached, now_s
        return 0.0 if started_s is None else now_s - self._since_s

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Counts the whole `with` block as part of the step in `standstill_s`, because a thread may hang anywhere."""
        self.started_s = self.clock()
        try:
            yield
        finally:
            self.started_s = None

    @torch.inference_mode()
    def compute(self, works: Rows[ScheduledWork]) -> ForwardResult:
        """Runs the works' forward pass and changes nothing. Raises StoreError."""
        meta = describe(works)
        batch = make_batch(works, meta)
        self.expect_tokens(meta.tokens)
        self.expect_tokens(following_tokens(works))
        started_s = self.started_s = self.clock()
        ids = self._ids = self._model.experts.begin_step(meta)
        if self._watchers.expect is not None:
            self._watchers.expect(meta, ids)
        logits = self._model.decoder.forward(batch, self._model.kv, self._model.experts)
        return ForwardResult(works, logits, self._model.experts.end_step(), self.clock() - started_s)

    def expect_tokens(self, tokens: IntArray) -> None:
        """Begins to read rows of tokens that will be computed soon, if the model has such."""
        if self._model.table is not None and len(tokens):
            self._model.table.begin_reads(tokens)

    def commit(self, step: ForwardResult) -> int:
        """Counts the step's tokens, without drafts, as computed, and adds to the totals.

        Returns the number of distinct experts, summed over layers.
        """
        works, _, routing, step_s = step
        meta = routing.meta
        ids = routing.ids[:, rows_of(works)] if len(meta.drafted) else routing.ids
        self._blocks.observe(token_blocks(works), ids)
        for seq, tokens, _ in works:
            self._blocks.advance(seq, tokens)
        decoding, prompt_tokens = int(meta.decode.sum()), meta.prompt_tokens
        if prompt_tokens:
            self._chunk_budget.observe(prompt_tokens, step_s)
        phase = "prefill" if prompt_tokens else "decode"
        self.totals["steps", phase] += 1
        self.totals["seconds", phase] += step_s
        experts = count_active_experts(routing.ids)
        self.totals["experts", phase] += experts
        self.totals["tokens", "prefill"] += prompt_tokens
        self.totals["tokens", "decode"] += decoding
        return experts

    @torch.inference_mode()
    def compute_stage(self, meta: StepMeta, compute: Callable[[], T]) -> T:
        """Returns the result of `compute`, which runs this box's layers for another box. Counts the step."""
        began_s = self.clock()
        with self.in_step():
            self._ids = self._model.experts.begin_step(meta)
            result = compute()
            routing = self._model.experts.end_step()
            self.stage_ended_s = self.clock()
        phase = "decode" if meta.decode.all() else "prefill"
        self.totals["steps", phase] += 1
        self.totals["seconds", phase] += self.clock() - began_s
        self.totals["experts", phase] += count_active_experts(routing.ids)
        self.totals["tokens", "decode"] += int(meta.decode.sum())
        self.totals["tokens", "prefill"] += meta.prompt_tokens
        self.report(routing)
        return result

    def accept_draft(self, seq: Sequence, ids: npt.NDArray[np.int16]) -> None:
        """Counts the last token of `seq`, which a committed step computed as a draft with routing `ids` [L, 1, k]."""
        self._blocks.observe(np.array([seq.blocks[seq.computed // BLOCK_TOKENS]]), ids)
        self._blocks.advance(seq, 1)
        self.totals["tokens", "decode"] += 1

    def report(self, routing: StepRouting) -> None:
        """Hands a step's routing, without rejected drafts, to `observe`."""
        if self._watchers.observe is not None:
            self._watchers.observe(routing)


def count_active_experts(ids: npt.NDArray[np.int16]) -> int:
    """Counts the distinct experts of a routing [L, T, k], summed over layers. A layer that did not run has -1."""
    layers = len(ids)
    touched = np.zeros((layers, int(ids.max()) + 2), np.bool_)
    touched[np.arange(layers)[:, None, None], ids] = True  # -1 is the last column
    return int(touched[:, :-1].sum())


log = logging.getLogger(__name__)

FATAL_ERRORS = (MemoryError, torch.AcceleratorError)  # never one request's fault
PROBE_REQUEST = Request(id="\0nobody's", prompt=(0,), sampling=Sampling(), seed=0)


class UncheckedDraft(NamedTuple):
    """The drafted tokens of one sequence that are still to be checked."""

    tokens: tuple[int, ...]
    logits: torch.Tensor  # [n, V] behind each of these tokens
    work: int  # the sequence's place among the step's works
    row: int  # of the first token among the step's tokens

    def rest(self) -> UncheckedDraft:
        """Returns the draft without its first token."""
        return UncheckedDraft(self.tokens[1:], self.logits[1:], self.work, self.row + 1)


class SequenceOutcome(NamedTuple):
    """A step's result for one sequence: a token, an error, or None while its prompt is not all computed."""

    seq: Sequence
    sampled: SampledToken | EdgemoeError | None
    draft: UncheckedDraft | None = None  # goes on with the token, if that is its first


class UncommittedStep(NamedTuple):
    """A step that is computed and sampled, but not committed."""

    computed: ForwardResult
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]]
    outcomes: list[SequenceOutcome]


class CommittedStep(NamedTuple):
    """A committed step, and how many tokens of each work's draft were accepted so far, [S]."""

    computed: ForwardResult
    accepted: IntArray
    step_s: float  # with sampling
    experts: int  # distinct ones, summed over layers


class StepRunner:
    """Runs steps for the loop, and finds the sequence at fault when one fails."""

    def __init__(self, runner: ForwardRunner, scheduler: Scheduler) -> None:
        self.blamed = 0  # requests that ended with an exception of their own
        self._runner, self._scheduler = runner, scheduler
        self._checking: CommittedStep | None = None  # whose drafts are being checked

    def run(self, works: Rows[ScheduledWork], again: bool = False) -> list[SequenceOutcome]:
        """Computes and commits one step, or several smaller ones after a failure.

        `again` says that these works were part of a step that failed. Raises FATAL_ERRORS, and any error that a probe
        token raises too.
        """
        began_s = time.perf_counter()
        try:
            attempt = self._compute_and_sample(works)
        except FATAL_ERRORS:
            raise
        except Exception as error:
            if any(work.draft for work in works):  # the drafts may be at fault
                return self.run(self._scheduler.drop_drafts(works), again)
            return self._run_parts(works, again, error)
        tokens, step_s = len(attempt.computed.routing.meta.tokens), time.perf_counter() - began_s
        self._scheduler.step_shares.prices.observe(tokens, step_s)
        return self._commit(attempt, step_s)

    def check_drafts(self, outcomes: Rows[SequenceOutcome]) -> list[SequenceOutcome]:
        """Samples the tokens behind drafted ones that were right, and counts these as computed.

        `outcomes` are the last ones whose token was delivered and is their draft's first. Returns the next ones. A
        sequence that fails is left out: the next step computes its token without drafts.
        """
        step, agreed = self._checking, [(each.seq, each.draft) for each in outcomes if each.draft is not None]
        if step is None or not agreed:
            return []
        try:
            logits = torch.cat([draft.logits[:1] for _, draft in agreed])
            sampled = sample(logits, [seq for seq, _ in agreed])
        except FATAL_ERRORS:
            raise
        except Exception as error:
            log.warning("drafts cannot be checked", exc_info=error)
            return []
        found = []
        for (seq, draft), token in zip(agreed, sampled, strict=True):
            if isinstance(token, SampledToken):
                self._runner.accept_draft(seq, step.computed.routing.ids[:, draft.row : draft.row + 1])
                step.accepted[draft.work] += 1
                found.append(SequenceOutcome(seq, token, draft.rest()))
        return found

    def end_drafts(self) -> None:
        """Reports the step whose drafts were checked, if there is one."""
        if (step := self._checking) is not None:
            self._checking = None
            self._runner.report(step.computed.routing.without_rejected(step.accepted))
            self._observe_speed(step)

    def _observe_speed(self, step: CommittedStep) -> None:
        routing, speculation = step.computed.routing, self._scheduler.speculation
        if speculation is not None and routing.meta.decode.all():
            speculation.observe(step)

    def _run_parts(self, works: Rows[ScheduledWork], again: bool, error: Exception) -> list[SequenceOutcome]:
        """Computes a failed step in smaller ones, down to the sequence that fails alone."""
        if isinstance(error, StageUnavailable):  # all need it
            return [SequenceOutcome(work.seq, error) for work in works]
        if isinstance(error, StoreError):
            if len(works) == 1:
                return [SequenceOutcome(works[0].seq, error)]
            size = 1  # each failure may have waited for other boxes
        elif len(works) == 1 and again:
            return [self._blame_after_probe(works[0].seq, error)]
        else:
            size = -(-len(works) // 2)
        parts = [works[first : first + size] for first in range(0, len(works), size)]
        return [outcome for part in parts for outcome in self.run(part, again=True)]

    def restart(self, seq: Sequence, error: EdgemoeError) -> bool:
        """Has `seq` computed once more where its scores are no numbers. Returns False where it has to end.

        Any earlier block may hold the bad numbers. So its blocks leave the prefix cache, whether `seq` ends or not.
        """
        if code_of(error) != NOT_A_NUMBER:
            return False
        log.warning("scores are not numbers", extra={"request": seq.request.id, "again": seq.restarted})
        self._scheduler.restart(seq)
        if seq.restarted:
            return False
        seq.restarted = True
        if not seq.emitted:  # else they have been told
            seq.prompt_logprobs.clear()
        return True

    def blame(self, seq: Sequence, error: Exception) -> EdgemoeError:
        """Returns the error with which the request that raised `error` ends, and logs it if it is not one of ours."""
        if isinstance(error, EdgemoeError):
            return error
        self.blamed += 1
        log.error("a request cannot be computed", extra={"request": seq.request.id}, exc_info=error)
        why = f"the engine cannot go on with this request: {type(error).__name__}; see its log"
        return RequestError(why, code="request_failed")

    def _compute_and_sample(self, works: Rows[ScheduledWork]) -> UncommittedStep:
        computed = self._runner.compute(works)
        prompt_logprobs, logits, row = [], computed.logits, 0
        last: list[int] = []
        drafts: list[UncheckedDraft | None] = []
        ends = computed.routing.meta.sure_rows.tolist()
        for at, work in enumerate(works):
            if places := work.seq.prompt_logprob_positions(work.tokens):
                prompt_logprobs.append(
                    (work.seq, prompt_logprobs_of(work.seq, logits[row : row + len(places)], places))
                )
            row += len(places) + completes(work)
            last += [row - 1] * completes(work)
            behind = logits[row : row + len(work.draft)]
            drafts.append(UncheckedDraft(work.draft, behind, at, ends[at] + 1) if work.draft else None)
            row += len(work.draft)
        done = [work.seq for work in works if completes(work)]
        chosen = sample(logits if len(last) == len(logits) else logits[last], done) if done else ()
        next_tokens = [each.token for each in chosen if isinstance(each, SampledToken)]
        self._runner.expect_tokens(np.array(next_tokens, np.int64))
        sampled = iter(chosen)
        outcomes = [
            SequenceOutcome(work.seq, next(sampled) if completes(work) else None, draft)
            for work, draft in zip(works, drafts, strict=True)
        ]
        return UncommittedStep(computed, prompt_logprobs, outcomes)

    def _commit(self, attempt: UncommittedStep, step_s: float) -> list[SequenceOutcome]:
        """Commits the step's results. Runs no code that a request's settings can make raise."""
        experts = self._runner.commit(attempt.computed)
        for seq, lines in attempt.prompt_logprobs:
            seq.prompt_logprobs += lines
        step = CommittedStep(attempt.computed, np.zeros(len(attempt.outcomes), np.int64), step_s, experts)
        if len(attempt.computed.routing.meta.drafted):
            self._checking = step
        else:
            self._runner.report(attempt.computed.routing)
            self._observe_speed(step)
        return attempt.outcomes

    def _blame_after_probe(self, seq: Sequence, error: Exception) -> SequenceOutcome:
        """Returns the sequence's error if a probe token can be computed. Else raises the probe's error."""
        probe = Sequence(PROBE_REQUEST, (), 1, 0.0, math.inf)
        probe.blocks = seq.blocks[-1:]  # not shared: the sequence has still to write to it
        probe.window_blocks = seq.window_blocks[-1:]  # as little
        probe.next_states = [(1, slot) for _, slot in seq.next_states[-1:]]  # as little
        with contextlib.suppress(StoreError):  # an expert that is not here does not mean that the engine is broken
            self._compute_and_sample([ScheduledWork(probe, 1)])
        return SequenceOutcome(seq, self.blame(seq, error))
