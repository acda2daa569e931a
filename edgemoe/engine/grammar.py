"""Constrains output by grammars: llguidance says which tokens may come next.

A resubmitted request's state is rebuilt from its tokens. A grammar is compiled here only after a trial in a bounded
process (`GrammarTrial`). Time and memory of the later masks are bounded here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgemoe.errors import InvalidRequest
from edgemoe.helper.turns import FairTurns
from edgemoe.types.grammar_faults import fault_in_words
from edgemoe.types.request import PARSER_LIMITS, GrammarTrial

# Compiled grammars that are kept for the next request: apps send the same schema again and again.
CACHED, CACHED_BYTES = 64, 96 << 20
THREADS, EACH = 2, 1  # that compile, and of one principal's
NICENESS = 10  # of these threads: steps come first
MASKS_S, MASK_S = 1.0, 0.02  # processor time for the masks of one request: a fixed part, and a part for each token
BUDGET_BYTES = 512 << 20  # of all compiled grammars, grammars of running requests included
LEAST_BYTES = 1 << 20  # of a compiled grammar
# The lexer's states are made as masks need them. Measured: 2 to 85 MB in a second of masks, and 48 MB of all states.
GROWTH_BYTES_PER_S, GROWTH_BYTES = 64 << 20, 48 << 20


class CompiledGrammar:
    """A compiled grammar. All matchers of it share its lexer's states."""

    def __init__(self, matcher: LLMatcher, own_bytes: int) -> None:
        self.matcher, self.own_bytes = matcher, max(LEAST_BYTES, own_bytes)
        self.masks_s = 0.0  # of a processor, that its masks have taken
        self.reported_bytes = self.own_bytes  # when the budget was last looked at

    @property
    def bytes(self) -> int:
        """Returns about how many bytes it takes."""
        return self.own_bytes + min(GROWTH_BYTES, int(GROWTH_BYTES_PER_S * self.masks_s))


class GrammarMatcher:
    """Tracks one sequence's position in its grammar."""

    def __init__(
        self, grammar: CompiledGrammar, emitted: Sequence[int], on_growth: Callable[[CompiledGrammar], None]
    ) -> None:
        """Starts after the tokens emitted so far. Raises InvalidRequest where they do not follow the grammar.

        Calls `on_growth` for each further LEAST_BYTES; it raises InvalidRequest where the grammar is too large.
        """
        self._grammar, self._on_growth = grammar, on_growth
        self._matcher = grammar.matcher.deep_copy()
        self._masks_s, self._tokens = 0.0, 0
        for token in emitted:
            self._matcher.consume_token(token)
            self._check()

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Sets bit t of `mask` [V / 32] for each token t that may come next. Raises InvalidRequest."""
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._add_time(time.thread_time() - began_s)

    def accept(self, token: int) -> None:
        """Advances by `token`. Raises InvalidRequest where the grammar does not allow it."""
        began_s = time.thread_time()
        self._tokens += 1
        self._matcher.consume_token(token)
        self._add_time(time.thread_time() - began_s)

    @property
    def finished(self) -> bool:
        """Returns whether the grammar is complete, so that only the end may follow."""
        return bool(self._matcher.is_stopped())

    def _add_time(self, seconds: float) -> None:
        self._masks_s += seconds
        self._grammar.masks_s += seconds
        self._check()
        if self._masks_s > MASKS_S + MASK_S * self._tokens:
            raise InvalidRequest(
                f"the grammar is too complex: after {self._tokens} tokens its masks have taken {self._masks_s:.1f} s. "
                f"Allowed are {MASKS_S:g} s and {MASK_S:g} s a token; simplify the schema",
                code="invalid_grammar",
            )
        if self._grammar.bytes - self._grammar.reported_bytes >= LEAST_BYTES:
            self._grammar.reported_bytes = self._grammar.bytes
            self._on_growth(self._grammar)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar cannot be followed: {fault_in_words(self._matcher.get_error())}", code="invalid_grammar"
            )


def _yield_to_steps() -> None:
    """Lowers the priority of the calling thread, which on Linux is one of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class CompileJob:
    """A grammar in line for a compile thread, and the future of its request."""

    def __init__(self, grammar: str, own_bytes: int, emitted: Sequence[int]) -> None:
        self.grammar, self.own_bytes, self.emitted = grammar, own_bytes, emitted
        self.future: Future[GrammarMatcher] = Future()


class GrammarCompiler:
    """Compiles grammars on threads of its own, by principals in turn: a complex one delays no step."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, "grammar", _yield_to_steps)
        self._turns: FairTurns[CompileJob] = FairTurns(THREADS, EACH)
        self._lock = threading.Lock()  # guards the turns and the fields below
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._all: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()  # also evicted grammars that requests still use

    @property
    def bytes(self) -> int:
        """Returns about how many bytes all compiled grammars take."""
        return sum(one.bytes for one in self._all)

    def matcher(
        self, grammar: str, emitted: Sequence[int], trial: GrammarTrial | None = None, principal: str = ""
    ) -> Future[GrammarMatcher]:
        """Returns a future matcher that has accepted the tokens emitted so far. The future raises InvalidRequest.

        One that is cancelled before its turn is not compiled.
        """
        job = CompileJob(grammar, 0 if trial is None else trial.bytes, emitted)
        with self._lock:
            self._turns.put(principal, job)
        self._threads.submit(self._run_jobs)
        return job.future

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run_jobs(self) -> None:
        """Compiles jobs by turns until none may run. A principal's next job follows its current one, in its thread."""
        while True:
            with self._lock:
                turn = self._turns.next_job()
            if turn is None:
                return
            (principal, job), began_s = turn, time.monotonic()
            try:
                if job.future.set_running_or_notify_cancel():
                    self._resolve(job)
            finally:
                with self._lock:
                    self._turns.give_back(principal, time.monotonic() - began_s)

    def _resolve(self, job: CompileJob) -> None:
        try:
            found = GrammarMatcher(self._compiled(job), job.emitted, self._on_growth)
        except InvalidRequest as error:
            job.future.set_exception(error.with_traceback(None))  # which would keep the grammar
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(found)

    def _compiled(self, job: CompileJob) -> CompiledGrammar:
        with self._lock:
            if (known := self._kept.get(job.grammar)) is not None:
                self._kept.move_to_end(job.grammar)
                return known
        compiled = CompiledGrammar(self._compile(job.grammar), job.own_bytes)
        with self._lock:
            self._kept[job.grammar] = compiled
            self._all.add(compiled)
            while len(self._kept) > CACHED or (len(self._kept) > 1 and self._kept_bytes() > CACHED_BYTES):
                self._kept.popitem(last=False)
        self._on_growth(compiled)
        return compiled

    def _kept_bytes(self) -> int:
        return sum(one.bytes for one in self._kept.values())

    def _compile(self, grammar: str) -> LLMatcher:
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if compiled.is_error():
            raise InvalidRequest(
                f"the grammar is not valid: {fault_in_words(compiled.get_error())}", code="invalid_grammar"
            )
        return compiled

    def _on_growth(self, grammar: CompiledGrammar) -> None:
        """Forgets grammars while all exceed the budget. Raises InvalidRequest where `grammar` is the largest then."""
        with self._lock:
            while self.bytes > BUDGET_BYTES and self._kept:
                self._kept.popitem(last=False)  # which frees it, unless a request follows it
            if self.bytes <= BUDGET_BYTES or grammar.bytes < max(one.bytes for one in self._all):
                return
        raise InvalidRequest(
            f"the grammar is too large: it takes about {grammar.bytes >> 20} MiB, and all grammars together "
            f"may take {BUDGET_BYTES >> 20}; simplify the schema",
            code="invalid_grammar",
        )
