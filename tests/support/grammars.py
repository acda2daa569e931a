"""The grammars that the API asks for, checked in this process as its helper checks them."""

from __future__ import annotations

from typing import Any

from edgemoe.api.generate import grammar
from edgemoe.api.generate.grammar import GrammarChoice
from edgemoe.api.generate.grammar_check import GrammarQuestion, judged
from edgemoe.api.generate.grammar_child import check
from edgemoe.errors import InvalidRequest


def first(choice: GrammarChoice | None) -> str | None:
    """What `GrammarChecker.first` returns."""
    if choice is None:
        return None
    refusal = None
    for lark in choice.larks:
        try:
            return judged(check(GrammarQuestion(1, lark, choice.term)), choice.param)
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
