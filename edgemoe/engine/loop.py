"""The step loop of the compute thread: queues requests, computes steps, and emits each step's tokens at once.

A request that fails ends alone (see `steps`). A missing expert affects only requests whose tokens need it. These
are retried one by one, up to their deadline if a box that is away has the expert. Any other exception ends the loop,
because the state is then in doubt. The front starts another engine and submits its requests again, with their tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from edgemoe.engine.sampler import SampledToken
from edgemoe.engine.scheduler import ScheduledWork, Scheduler
from edgemoe.engine.sequence import Sequence, check_request
from edgemoe.engine.steps import FATAL_ERRORS, ForwardRunner, SequenceOutcome, StepRunner
from edgemoe.errors import (
    DeadlineExceeded,
    EdgemoeError,
    EngineUnavailable,
    MissingPart,
    QueueFull,
    StoreError,
    code_of,
)
from edgemoe.types.request import Emission, Request, RequestLimits

if TYPE_CHECKING:
    from edgemoe.engine.grammar import GrammarCompiler, GrammarMatcher

log = logging.getLogger(__name__)
T = TypeVar("T")
Emit = Callable[[list[Emission]], None]
MAX_INBOX = 8192  # messages that wait for the end of the step
LONGEST_WAIT_S = 3600.0  # longest sleep without checking the deadlines
REPORT_SHARE = 0.125  # of a request's timeout, after which its progress is reported again
RETRY_S = (0.05, 0.5)  # between the first attempts at a step that lacks an expert, and after many


class StepLoop:
    """Owns the engine's requests. `submit`, `cancel`, `call`, `ask`, `drain`, `stop` may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ForwardRunner,
        limits: RequestLimits,
        emit: Emit,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        missing_expert_timeout_s: float = 0.0,
    ) -> None:
        """Calls `emit` on the compute thread with the emissions of each step.

        A request whose expert is missing is retried for `missing_expert_timeout_s`. Where a box that is away has the
        expert, it is retried up to its deadline, if it has one.
        """
        self.finished = Counter[str]()  # by reason: stop | length | error | cancelled
        self._missing_expert_timeout_s = missing_expert_timeout_s
        self.steps, self._runner = StepRunner(runner, scheduler), runner
        self._scheduler, self._limits = scheduler, limits
        self._emit, self._grammars, self._clock = emit, grammars, clock
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: dict[str, Sequence] = {}
        self._out: list[Emission] = []
        self._draining = self._stopped = False
        self._queue_moves = 0  # as of the last step

    # --- from any thread

    def submit(
        self, request: Request, emitted: tuple[int, ...], attempt: int, remaining_s: float, waited_s: float = 0.0
    ) -> None:
        """Queues `request`, `waited_s` old, to go on after `emitted`. Its tokens, or its refusal, go to `emit`.

        It ends where it makes no progress for `remaining_s`.
        """
        now_s = self._clock()
        seq = Sequence(request, emitted, attempt, now_s - waited_s, now_s + remaining_s, remaining_s)
        full = self._inbox.qsize() >= MAX_INBOX
        self._inbox.put(lambda: self._refuse(seq) if full else self._accept(seq))

    def cancel(self, request: str, attempt: int) -> None:
        """Drops the request before the next step, if it still runs as `attempt`."""
        self._inbox.put(lambda: self._cancel(request, attempt))

    def call(self, deed: Callable[[], None]) -> None:
        """Runs `deed`, which must not raise, on the compute thread between steps."""
        self._inbox.put(deed)

    def ask(self, deed: Callable[[], T]) -> Future[T]:
        """Runs `deed` like `call`. Returns the future of its result, or of the exception that it raises.

        A deed whose future is cancelled before is not run. FATAL_ERRORS end the loop, too.
        """
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(deed())
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, FATAL_ERRORS):
                    raise

        self.call(run)
        return done

    def drain(self) -> None:
        """Refuses new requests from now on; accepted ones are finished."""
        self._inbox.put(lambda: setattr(self, "_draining", True))

    def stop(self) -> None:
        """Ends `run` after the current step."""
        self._inbox.put(lambda: setattr(self, "_stopped", True))

    # --- on the compute thread

    def run(self) -> None:
        """Runs steps until stopped, and sleeps while there is nothing to do."""
        while not self._stopped:
            if not self.step():
                self._sleep()

    def step(self) -> bool:
        """Runs the inbox and computes one step. Returns False if nothing could be computed."""
        with self._runner.in_step():
            self._run_inbox()
            now_s = self._clock()
            for seq in self._scheduler.expired(now_s):
                late = DeadlineExceeded(f"the request made no progress for {seq.timeout_s:g} s (api.request_timeout_s)")
                self._finish(seq, "error", seq.missing_expert or late)
            works = [] if self._stopped else self._scheduler.schedule(now_s)
            self._compute_step(works)
            self._note_progress(works)
            self._flush_emissions()
            return any(work.seq.missing_expert is None or not work.seq.blocks for work in works)  # or it made room

    def _sleep(self) -> None:
        now_s, requests = self._clock(), self._requests.values()
        ends = [min(seq.deadline_s, seq.retry_s if seq.missing_expert else math.inf) for seq in requests]
        timeout_s = min(LONGEST_WAIT_S, max(0.0, min(ends) - now_s)) if ends else None
        if not self._stopped:
            with suppress(Empty):
                self._inbox.get(timeout=timeout_s)()

    def _run_inbox(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()

    def _flush_emissions(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._emit(out)

    # --- requests come and go

    def _accept(self, seq: Sequence) -> None:
        older = self._requests.get(seq.request.id)
        if older is not None and older.attempt >= seq.attempt:
            return
        if older is not None:
            self._remove(older)
        with self._failing_alone(seq):
            emitted = seq.tokens[seq.prompt_tokens :]
            check_request(seq.request, emitted, self._limits, grammars=self._grammars is not None)
            if self._draining:
                raise EngineUnavailable("the engine is shutting down")
            self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        if finish := self._length_finish(seq):
            self._emit_end(seq, finish)
            return
        self._requests[seq.request.id] = seq
        if refused := self._scheduler.add(seq):
            self._refuse(refused)
        if refused is not seq:
            self._start_compiling(seq)

    def _start_compiling(self, seq: Sequence) -> None:
        if (grammar := seq.sampling.grammar) is not None and self._grammars is not None:
            emitted, who = seq.tokens[seq.prompt_tokens :], seq.identity.principal
            seq.compiling = self._grammars.matcher(grammar, emitted, seq.sampling.grammar_trial, who)
            seq.compiling.add_done_callback(
                lambda future: self._inbox.put(lambda: self._on_grammar_compiled(seq, future))
            )

    def _on_grammar_compiled(self, seq: Sequence, compiling: Future[GrammarMatcher]) -> None:
        if self._requests.get(seq.request.id) is not seq or compiling.cancelled():
            return
        with self._failing_alone(seq):
            seq.matcher = compiling.result()
            seq.ready = True
            if seq.matcher.finished:
                self._finish(seq, "stop")

    def limit(self, limits: RequestLimits) -> None:
        """Applies other limits from now on, and ends requests that are too long for them. On the compute thread."""
        self._limits = limits
        for seq in list(self._requests.values()):
            with self._failing_alone(seq):
                check_request(seq.request, (), limits, grammars=self._grammars is not None)
                if finish := self._length_finish(seq):
                    self._finish(seq, finish)

    def _refuse(self, seq: Sequence) -> None:
        error = QueueFull("the queue is full; try again later", retry_after_s=self._scheduler.retry_after_s())
        if (known := self._requests.get(seq.request.id)) is seq:
            del self._requests[seq.request.id]
        elif known is not None and known.attempt < seq.attempt:
            self._remove(known)
        self._emit_end(seq, "error", error)

    def _cancel(self, request: str, attempt: int) -> None:
        if (seq := self._requests.get(request)) is not None and seq.attempt == attempt:
            self.finished["cancelled"] += 1
            self._remove(seq)

    def _remove(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        del self._requests[seq.request.id]

    def _finish(self, seq: Sequence, finish: str, error: EdgemoeError | None = None) -> None:
        self._remove(seq)
        self._emit_end(seq, finish, error)

    @contextmanager
    def _failing_alone(self, seq: Sequence) -> Iterator[None]:
        """Ends `seq` alone with an exception that the `with` block raises."""
        try:
            yield
        except FATAL_ERRORS:
            raise
        except Exception as raised:
            error = self.steps.blame(seq, raised)
            if self._requests.get(seq.request.id) is seq:
                self._remove(seq)
            self._emit_end(seq, "error", error)

    def _emit_end(self, seq: Sequence, finish: str, error: EdgemoeError | None = None) -> None:
        self._add_emission(
            seq,
            index=seq.emitted,
            finish=finish,
            error=str(error) if error else "",
            error_code=code_of(error) if error else "",
            retry_after_s=error.retry_after_s if isinstance(error, QueueFull) else 0.0,
        )

    def _add_emission(self, seq: Sequence, *, index: int, **fields: Any) -> None:
        cached_tokens = seq.cached_tokens or 0 if index == seq.first_index else 0
        (accepted, rejected), seq.checked_drafts = seq.checked_drafts, [0, 0]
        self._out.append(
            Emission(
                request=seq.request.id,
                attempt=seq.attempt,
                index=index,
                cached_tokens=cached_tokens,
                prompt_logprobs=() if index else tuple(seq.prompt_logprobs),
                accepted_drafts=accepted,
                rejected_drafts=rejected,
                **fields,
            )
        )
        if fields["finish"]:
            self.finished[fields["finish"]] += 1

    # --- the step

    def _compute_step(self, works: list[ScheduledWork]) -> None:
        """Computes one step; sequences whose expert was missing in the last one run alone, after the others.

        They pause between attempts, because each attempt computes the layers up to that expert.
        """
        now_s = self._clock()
        alone = [work for work in works if work.seq.missing_expert and work.seq.retry_s <= now_s]
        if whole := [work for work in works if not work.seq.missing_expert]:
            self._run_works(whole)
        for work in alone:
            self._run_works([work])

    def _run_works(self, works: list[ScheduledWork]) -> None:
        blamed = self.steps.blamed
        outcomes = self.steps.run(works)
        while outcomes:
            outcomes = self.steps.check_drafts([outcome for outcome in outcomes if self._use_outcome(outcome)])
        self.steps.end_drafts()
        if self.steps.blamed > blamed:
            self.check_integrity()

    def _use_outcome(self, outcome: SequenceOutcome) -> bool:
        """Delivers a token, or ends or retries the sequence. Returns whether its draft went on with that token."""
        seq, sampled, draft = outcome
        if isinstance(sampled, StoreError):
            self._retry_or_fail(seq, sampled)
            return False
        seq.missing_expert = None
        if isinstance(sampled, SampledToken):
            drafted = draft.tokens if draft is not None else ()
            agrees = drafted[:1] == (sampled.token,)
            seq.checked_drafts[0] += agrees
            seq.checked_drafts[1] += 0 if agrees else len(drafted)
            with self._failing_alone(seq):
                self._deliver_token(seq, sampled)
            return agrees and self._requests.get(seq.request.id) is seq
        if sampled is not None and not self.steps.restart(seq, sampled):
            self._finish(seq, "error", sampled)
        return False

    def _note_progress(self, works: list[ScheduledWork]) -> None:
        """Moves the deadlines of the requests that were computed, and of the waiting ones if their queue has moved."""
        now_s, before = self._clock(), self._queue_moves
        self._queue_moves = self._scheduler.admissions + self.finished.total()
        moved = [work.seq for work in works if work.seq.missing_expert is None]
        moved += self._scheduler.waiting if self._queue_moves > before else ()
        for seq in moved:
            seq.deadline_s = max(seq.deadline_s, now_s + seq.timeout_s)
            if self._requests.get(seq.request.id) is seq and now_s - seq.reported_s >= seq.timeout_s * REPORT_SHARE:
                seq.reported_s = now_s
                self._add_emission(seq, index=seq.emitted, finish="")

    def _retry_or_fail(self, seq: Sequence, error: StoreError) -> None:
        """Keeps the request for a retry, or ends it where the expert is damaged or has been missing for too long."""
        now_s, shortest_s, longest_s = self._clock(), *RETRY_S
        may_return = isinstance(error, MissingPart) and error.away and math.isfinite(seq.timeout_s)
        if seq.missing_expert is None:
            seq.retry_pause_s = shortest_s
            if may_return:
                log.warning("a request waits for a box", extra={"request": seq.request.id, "why": str(error)})
        if seq.missing_expert is None or may_return:
            seq.missing_since_s = now_s
        seq.missing_expert = error
        if not isinstance(error, MissingPart) or now_s - seq.missing_since_s >= self._missing_expert_timeout_s:
            self._finish(seq, "error", error)
        seq.retry_s, seq.retry_pause_s = now_s + seq.retry_pause_s, min(2 * seq.retry_pause_s, longest_s)

    def _deliver_token(self, seq: Sequence, sampled: SampledToken) -> None:
        """Adds the token, or ends `seq`. The grammar may raise, so it runs before anything is changed."""
        stopped = sampled.token in seq.sampling.stop_token_ids
        if seq.matcher is not None and not stopped:
            seq.matcher.accept(sampled.token)
        complete = seq.matcher is not None and seq.matcher.finished
        if stopped:
            self._scheduler.fairness.add_answer(seq.identity, seq.emitted)
            self._finish(seq, "stop")
        else:
            self._append_token(seq, sampled, complete)

    def _append_token(self, seq: Sequence, sampled: SampledToken, complete: bool) -> None:
        index = seq.emitted
        seq.tokens.append(sampled.token)
        self._scheduler.fairness.add_service(seq.identity, 0, 1)
        finish = "stop" if complete else self._length_finish(seq)
        if finish:
            self._scheduler.fairness.add_answer(seq.identity, seq.emitted)
            self._remove(seq)
        self._add_emission(
            seq, index=index, token=sampled.token, logprob=sampled.logprob, top=sampled.top, finish=finish
        )

    def _length_finish(self, seq: Sequence) -> str:
        """Returns "length" if `seq` has reached its longest length, else ""."""
        if seq.emitted >= seq.sampling.max_tokens or len(seq.tokens) >= self._limits.context_tokens:
            return "length"
        return ""

    def check_integrity(self) -> None:
        """Raises AssertionError unless the queues hold exactly the requests and their blocks; between steps."""
        self._scheduler.check_integrity()
        held = [*self._scheduler.running, *self._scheduler.waiting]
        assert {id(seq) for seq in held} == {id(seq) for seq in self._requests.values()}
