"""The process that checks grammars, in bounds: `MEMORY_BYTES` of addresses, `MOST_S` for a question."""

from __future__ import annotations

import re
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from edgemoe.api.generate.grammar_check import CHECK_S, MEMORY_BYTES, GrammarQuestion, GrammarVerdict
from edgemoe.guard import refuse_pickle
from edgemoe.helper.serving import serve

MOST_S = int(2 * CHECK_S)  # for the case that nobody is there to end it
FUEL = LLParserLimits(initial_lexer_fuel=100_000)  # enough to find out whether anything matches


def check(asked: GrammarQuestion) -> GrammarVerdict:
    """Returns whether the grammar can be honoured."""
    signal.alarm(MOST_S)
    try:
        grammar, reason = _validated(asked.lark)
        if asked.term and not _matchable(asked.term):
            return GrammarVerdict(asked.number, unmatched=True)
        return GrammarVerdict(asked.number, grammar, reason)
    finally:
        signal.alarm(0)


def _validated(lark: str) -> tuple[str, str]:
    grammar = str(LLMatcher.grammar_from_lark(lark))
    if error := LLMatcher.validate_grammar(grammar):
        return "", re.sub(r"^\d+\(\d+\): ", "", error.splitlines()[0])
    return grammar, ""


def _matchable(term: str) -> bool:
    """Whether some text matches, as far as `FUEL` tells; yes where it is not well formed, which is reported else."""
    grammar = str(LLMatcher.grammar_from_lark(f"start: {term}"))
    if LLMatcher.validate_grammar(grammar):
        return True
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=FUEL)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    return not (matcher.is_error() and "NoExtension" in matcher.get_error())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    refuse_pickle()
    serve(sys.stdin.buffer, sys.stdout.buffer, GrammarQuestion, check)
