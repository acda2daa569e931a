"""The grammars that the API asks for, checked in this process as its helper checks them."""

from __future__ import annotations

from functools import cache
from typing import Any

from llguidance import LLTokenizer
from tokenizers import AddedToken

from edgemoe.api.dialects import dialect as table
from edgemoe.api.generate import answer_grammar as grammar
from edgemoe.api.generate.answer_grammar import GrammarCandidates
from edgemoe.api.generate.grammar_trial import GrammarQuestion, GrammarTrials, judged
from edgemoe.errors import InvalidRequest
from support.dialect_kit import TOKEN, marks_of
from support.front_kit import byte_level_tokenizer


@cache
def trials() -> GrammarTrials:
    """Makes grammar trials with the marks of all dialects as tokens."""
    marks = {mark for one in table.DIALECTS for mark in marks_of(one)}
    tokenizer = byte_level_tokenizer(marks=())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks) if TOKEN.fullmatch(mark)])
    return GrammarTrials(LLTokenizer(tokenizer.to_str()))


def first(choice: GrammarCandidates | None) -> str | None:
    """Returns the first grammar of a choice that compiles, as `GrammarChecker.first` does."""
    if choice is None:
        return None
    refusal = None
    for lark in choice.larks:
        try:
            return judged(trials().check(GrammarQuestion(1, lark, choice.term)), choice.param).grammar
        except InvalidRequest as error:
            refusal = error
    if refusal is not None and not choice.optional:
        raise refusal
    return None


def response_grammar(*args: Any, **more: Any) -> str | None:
    return first(grammar.response_grammar(*args, **more))


def tool_grammar(*args: Any, **more: Any) -> str:
    found = first(grammar.tool_grammar(*args, **more))
    assert found is not None
    return found


def free_grammar(*args: Any, **more: Any) -> str | None:
    return first(grammar.free_grammar(*args, **more))
