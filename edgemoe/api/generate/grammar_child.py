"""The process that tries grammars, within bounds. Its arguments are the model's directory and its texts' end tokens."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgemoe.api.generate.grammar_check import MEMORY_BYTES, TRIAL_S, GrammarQuestion, GrammarVerdict
from edgemoe.guard import refuse_pickle
from edgemoe.heap import used_bytes
from edgemoe.helper.serving import bound_memory, serve
from edgemoe.types.request import PARSER_LIMITS, GrammarTrial, digest_of

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
            return GrammarVerdict(asked.number, reason=_reason(error))
        before_s, before_bytes = _cpu_s(), used_bytes()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return GrammarVerdict(asked.number, reason=_reason(matcher.get_error()))
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


def _reason(error: str) -> str:
    """What is wrong, without the place in the text and the parser's state."""
    return re.sub(r"^\d+\(\d+\): ", "", error.splitlines()[0])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Answers its parent's questions."""
    directory, eos = Path(sys.argv[1]), [int(one) for one in sys.argv[2:]]
    trials = GrammarTrials(LLTokenizer((directory / "tokenizer.json").read_text(), eos_token=eos or None))
    refuse_pickle()
    bound_memory(MEMORY_BYTES)
    serve(sys.stdin.buffer, sys.stdout.buffer, GrammarQuestion, trials.check, TRIAL_S)


if __name__ == "__main__":
    main()
