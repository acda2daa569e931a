"""Tries grammars in bounded child processes: a schema of 150 bytes can take minutes and gigabytes to compile.

A trial compiles the grammar with the model's tokenizer and computes the first masks, as the engine will. A grammar
beyond `TRIAL_S` or `MEMORY` is refused, and delays only its principal. The child process is this module's `main`.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgemoe.api.generate.answer_grammar import GrammarCandidates
from edgemoe.errors import EngineUnavailable, HelperFailed, HelperMissing, InvalidRequest
from edgemoe.guard import refuse_pickle
from edgemoe.heap import used_bytes
from edgemoe.helper.child_process import HelperPool, MemoryBound, NumberedMessage, bound_addresses, serve
from edgemoe.types.bounds import Grammar
from edgemoe.types.grammar_faults import fault_in_words
from edgemoe.types.request import PARSER_LIMITS, GrammarTrial, digest_of

MODULE = "edgemoe.api.generate.grammar_trial"
TRIAL_S = 3.0  # of a processor, for trying one grammar
TRIED_TOKENS = 3  # of a text that follows the grammar
NICENESS = 10  # of the processes: streams come first
DEADLINE_S = 60.0  # by the clock, on a machine that does much else
LOAD_S, LOAD_BYTES = 20.0, 1 << 30  # of a processor and of memory, for reading the tokenizer
MEMORY = MemoryBound(128 << 20, 0, 256 << 20)  # beyond a process with its tokenizer


class GrammarQuestion(NumberedMessage, frozen=True):
    """Asks whether a Lark grammar can be honoured; `term`, where there is one, has to match some text."""

    lark: str
    term: str = ""


class GrammarVerdict(NumberedMessage, frozen=True):
    """Answers with the serialised grammar and its trial, or with why it cannot be honoured."""

    grammar: str = ""
    trial: GrammarTrial | None = None
    reason: str = ""
    unmatched: bool = False  # no text matches the term


class TriedGrammar(NamedTuple):
    """A grammar that the engine may compile."""

    grammar: Grammar
    trial: GrammarTrial


def grammar_command(directory: Path, eos: Sequence[int], trial_s: float = TRIAL_S) -> Sequence[str]:
    """Returns the command of a process that tries grammars for the model in `directory`.

    `eos` are the tokens that end the model's texts. One trial may take `trial_s` of a processor.
    """
    return (sys.executable, "-m", MODULE, str(directory), str(trial_s), *map(str, eos))


class GrammarChecker:
    """Owns the processes, which are started with the first grammars. `close` after use. One event loop."""

    def __init__(self, command: Sequence[str], deadline_s: float = DEADLINE_S) -> None:
        self._helpers = HelperPool(command, deadline_s)

    @property
    def busy(self) -> bool:
        """Returns whether a grammar is being tried."""
        return self._helpers.busy

    @property
    def pids(self) -> list[int]:
        """Returns the processes that wait for a grammar."""
        return self._helpers.pids

    async def first(self, choice: GrammarCandidates | None, principal: str = "") -> TriedGrammar | None:
        """Returns the first grammar of `choice` that can be honoured; None where there is none and need not be.

        Raises InvalidRequest where there has to be one, EngineUnavailable where no process can be started.
        """
        if choice is None:
            return None
        refusal: InvalidRequest | None = None
        for lark in choice.larks:
            try:
                return await self._tried(lark, choice, principal)
            except InvalidRequest as error:
                refusal = error
        if refusal is not None and not choice.optional:
            raise refusal
        return None

    async def close(self) -> None:
        """Ends the child processes."""
        await self._helpers.close()

    async def _tried(self, lark: str, choice: GrammarCandidates, principal: str) -> TriedGrammar:
        param, asked = choice.param, GrammarQuestion(0, lark, choice.term)
        try:
            verdict = await self._helpers.ask(asked, GrammarVerdict, principal=principal)
        except HelperMissing as error:
            raise EngineUnavailable(f"the process that tries grammars {error}; try again") from error
        except HelperFailed as error:
            why = f"{param} is too complex: to try it takes more than {TRIAL_S:g} s or {MEMORY.fixed_bytes >> 20} MiB; "
            raise InvalidRequest(f"{why}simplify the schema", param=param, code="invalid_grammar") from error
        return judged(verdict, param)


def judged(verdict: GrammarVerdict, param: str) -> TriedGrammar:
    """Returns the grammar. Raises InvalidRequest where it cannot be honoured."""
    if verdict.unmatched:
        param = f"{param}.regex"
        raise InvalidRequest(f"{param}: no text matches this", param=param, code="invalid_grammar")
    if verdict.trial is None:
        raise InvalidRequest(f"{param} cannot be honoured: {verdict.reason}", param=param, code="invalid_grammar")
    return TriedGrammar(verdict.grammar, verdict.trial)


FUEL = LLParserLimits(initial_lexer_fuel=100_000)  # enough to find out whether anything matches


class GrammarTrials:
    """Tries grammars with a tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, asked: GrammarQuestion) -> GrammarVerdict:
        """Returns whether the grammar can be honoured."""
        if asked.term and not _matchable(asked.term):
            return GrammarVerdict(asked.number, unmatched=True)
        grammar = str(LLMatcher.grammar_from_lark(asked.lark))
        if error := LLMatcher.validate_grammar(grammar):
            return GrammarVerdict(asked.number, reason=fault_in_words(error))
        before_s, before_bytes = _cpu_s(), used_bytes()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if not matcher.is_error():
            _begin_text(matcher, self._tokenizer.eos_token)
        if matcher.is_error():
            return GrammarVerdict(asked.number, reason=fault_in_words(matcher.get_error()))
        trial = GrammarTrial(digest_of(grammar), _cpu_s() - before_s, max(0, used_bytes() - before_bytes))
        return GrammarVerdict(asked.number, grammar, trial)


def _matchable(term: str) -> bool:
    """Whether some text matches, as far as `FUEL` tells; yes where it is not well formed, which is reported else."""
    grammar = str(LLMatcher.grammar_from_lark(f"start: {term}"))
    if LLMatcher.validate_grammar(grammar):
        return True
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=FUEL)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    return not (matcher.is_error() and "NoExtension" in matcher.get_error())


def _begin_text(matcher: LLMatcher, eos: int) -> None:
    """Computes the first masks, each behind the first token of the mask before, up to an error or the end."""
    for _ in range(TRIED_TOKENS):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        allowed = allowed[allowed != eos]
        if matcher.is_error() or not len(allowed) or not matcher.validate_tokens([int(allowed[0])]):
            return
        matcher.consume_token(int(allowed[0]))
        if matcher.is_error() or matcher.is_stopped():
            return


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Answers its parent's questions."""
    os.nice(NICENESS)
    directory, trial_s, eos = Path(sys.argv[1]), float(sys.argv[2]), [int(one) for one in sys.argv[3:]]
    bound_addresses(LOAD_BYTES)
    signal.setitimer(signal.ITIMER_PROF, LOAD_S)
    trials = GrammarTrials(
        LLTokenizer((directory / "tokenizer.json").read_text(encoding="utf-8"), eos_token=eos or None)
    )
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer, GrammarQuestion, trials.check, trial_s, memory=MEMORY)


if __name__ == "__main__":
    main()
