"""Runs a step as a transaction: computes and samples first, commits afterwards, so that a failed step changes nothing.

A step that failed is computed again in parts, down to the sequence that fails alone: its request ends with an error,
and the others get the tokens that they would have had. Before a request is blamed, a probe of one token that belongs
to no request is computed. Where the probe fails too, or where memory or the device fails, the engine is broken, and the
error is raised.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from edgemoe.engine.batch import completes
from edgemoe.engine.runner import Computed, Runner
from edgemoe.engine.sampling.sampler import NOT_A_NUMBER, Sampled, sample, tell_prompt
from edgemoe.engine.scheduler import Scheduler, Work
from edgemoe.engine.sequence import Sequence
from edgemoe.errors import EdgemoeError, RequestError, StoreError, code_of
from edgemoe.types.request import Request, Sampling, TokenLogprob

log = logging.getLogger(__name__)

BROKEN = (MemoryError, torch.AcceleratorError)  # never one request's fault
NOBODYS = Request(id="\0nobody's", prompt=(0,), sampling=Sampling(), seed=0)


class Outcome(NamedTuple):
    """A step's result for one sequence: a token, an error, or None while its prompt is not all computed."""

    seq: Sequence
    sampled: Sampled | EdgemoeError | None


class Attempt(NamedTuple):
    """A step that is computed and sampled, but not committed."""

    computed: Computed
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]]
    outcomes: list[Outcome]


class Steps:
    """Runs steps for the loop, and finds the sequence at fault when one fails."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.blamed = 0  # requests that ended because of what they raised
        self._runner, self._scheduler = runner, scheduler

    def run(self, works: Rows[Work], again: bool = False) -> list[Outcome]:
        """Computes and commits one step, or several smaller ones after a failure.

        `again` says that these works were part of a step that failed. Raises what breaks the engine.
        """
        try:
            attempt = self._attempt(works)
        except BROKEN:
            raise
        except StoreError as error:
            if len(works) == 1:
                return [Outcome(works[0].seq, error)]
            size = 1  # each failure may have waited for other boxes
        except Exception as error:
            if len(works) == 1 and again:
                return [self._condemn(works[0].seq, error)]
            size = -(-len(works) // 2)
        else:
            return self._commit(attempt)
        parts = [works[first : first + size] for first in range(0, len(works), size)]
        return [outcome for part in parts for outcome in self.run(part, again=True)]

    def restart(self, seq: Sequence, error: EdgemoeError) -> bool:
        """Has `seq` computed once more where its scores are no numbers. Returns False where it has to end.

        The numbers may have been lost in any block before, and are as lost to whoever goes on from there. So nobody
        does, whether `seq` ends or not.
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

    def _attempt(self, works: Rows[Work]) -> Attempt:
        computed = self._runner.compute(works)
        prompt_logprobs, logits, row = [], computed.logits, 0
        last: list[int] = []
        for work in works:
            if places := work.seq.prompt_logprob_positions(work.tokens):
                prompt_logprobs.append((work.seq, tell_prompt(work.seq, logits[row : row + len(places)], places)))
            row += len(places) + completes(work)
            last += [row - 1] * completes(work)
        done = [work.seq for work in works if completes(work)]
        sampled = iter(sample(logits[last] if prompt_logprobs else logits, done) if done else ())
        outcomes = [Outcome(work.seq, next(sampled) if completes(work) else None) for work in works]
        return Attempt(computed, prompt_logprobs, outcomes)

    def _commit(self, attempt: Attempt) -> list[Outcome]:
        """Keeps what was computed. Runs no code that a request's settings can make raise."""
        self._runner.commit(attempt.computed)
        for seq, lines in attempt.prompt_logprobs:
            seq.prompt_logprobs += lines
        return attempt.outcomes

    def _condemn(self, seq: Sequence, error: Exception) -> Outcome:
        """Returns the sequence's error if a probe token can be computed. Raises what the probe raises otherwise."""
        probe = Sequence(NOBODYS, (), 1, 0.0, math.inf)
        probe.blocks = seq.blocks[-1:]  # not shared: the sequence has still to write to it
        probe.next_states = [(1, slot) for _, slot in seq.next_states[-1:]]  # as little
        with contextlib.suppress(StoreError):  # an expert that is not here does not mean that the engine is broken
            self._attempt([Work(probe, 1)])
        return Outcome(seq, self.blame(seq, error))
