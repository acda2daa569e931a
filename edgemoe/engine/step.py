"""One step as a transaction: computed and sampled first, booked then, so that a step that fails leaves nothing behind.

What fails is computed again in parts, down to the sequence that makes a step fail alone: its request ends with an
error, and the others go on with the tokens that they would have had. Before a request is blamed, a token of nobody's
is computed: where that fails too, or where the device or the process's memory gives out, it is the engine that is
broken, and the error is raised.
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
from edgemoe.engine.sampler import Sampled, sample, tell_prompt
from edgemoe.engine.scheduler import Work
from edgemoe.engine.sequence import Sequence
from edgemoe.errors import EdgemoeError, RequestError, StoreError
from edgemoe.types.request import Request, Sampling, TokenLogprob

log = logging.getLogger(__name__)

BROKEN = (MemoryError, torch.AcceleratorError)  # never one request's fault
NOBODYS = Request(id="\0nobody's", prompt=(0,), sampling=Sampling(), seed=0)


class Outcome(NamedTuple):
    """What a step came to for one sequence: a token, an error, or None where its prompt has not ended yet."""

    seq: Sequence
    sampled: Sampled | EdgemoeError | None


class Attempt(NamedTuple):
    """A step that is computed and not booked."""

    computed: Computed
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprob]]]
    outcomes: list[Outcome]


class Steps:
    """Runs steps for the loop and tells whose fault it is when one fails."""

    def __init__(self, runner: Runner) -> None:
        self.blamed = 0  # requests that ended because of what they raised
        self._runner = runner

    def run(self, works: Rows[Work], again: bool = False) -> list[Outcome]:
        """One step, or as many as it takes; `again`: these works were in one that failed."""
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

    def blame(self, seq: Sequence, error: Exception) -> EdgemoeError:
        """The error that the request ends with, which has raised `error`."""
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
            if places := work.seq.places_to_tell(work.tokens):
                prompt_logprobs.append((work.seq, tell_prompt(work.seq, logits[row : row + len(places)], places)))
            row += len(places) + completes(work)
            last += [row - 1] * completes(work)
        done = [work.seq for work in works if completes(work)]
        sampled = iter(sample(logits[last] if prompt_logprobs else logits, done) if done else ())
        outcomes = [Outcome(work.seq, next(sampled) if completes(work) else None) for work in works]
        return Attempt(computed, prompt_logprobs, outcomes)

    def _commit(self, attempt: Attempt) -> list[Outcome]:
        """Keeps what was computed; nothing of it depends on what a request says."""
        self._runner.commit(attempt.computed)
        for seq, lines in attempt.prompt_logprobs:
            seq.prompt_logprobs += lines
        return attempt.outcomes

    def _condemn(self, seq: Sequence, error: Exception) -> Outcome:
        """The sequence's end, if nobody's token can be computed. Raises what the engine raises otherwise."""
        probe = Sequence(NOBODYS, (), 1, 0.0, math.inf)
        probe.blocks = seq.blocks[-1:]  # which it does not share, as it has a token to compute
        with contextlib.suppress(StoreError):  # an expert that is not here does not mean that the engine is broken
            self._attempt([Work(probe, 1)])
        return Outcome(seq, self.blame(seq, error))
