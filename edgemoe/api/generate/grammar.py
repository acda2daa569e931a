"""Builds the grammar that constrains sampling from `response_format` and `tool_choice`.

Each request has one llguidance Lark grammar, the first of its `GrammarChoice` that can be honoured, so that a schema
that cannot be is answered with status 400 and never reaches the engine. The grammar allows reasoning first where the
model may reason; it constrains the answer, which in a dialect with channels is the final one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from llguidance import regex_to_lark

from edgemoe.api.dialects.dialect import HERMES, Begun, ChannelMarks, Dialect
from edgemoe.api.generate.call_grammar import call_rules
from edgemoe.api.generate.lark import ANY_TEXT, BREAK, Rules, json_rule
from edgemoe.api.generate.schema_bounds import check_pattern, check_schema
from edgemoe.api.schema import ResponseFormat, Tool
from edgemoe.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 1 << 20
LAYOUT = r"layout: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class GrammarChoice:
    """Holds Lark grammars, the best first; where none can be honoured and it is not `optional`, the last says why."""

    larks: tuple[str, ...]
    param: str  # the field that asks for it
    optional: bool = False
    term: str = ""  # of a regular expression: some text must match it


@dataclass(frozen=True, slots=True)
class Form:
    """Describes what may surround the constrained part."""

    tokens: Container[str] = ()  # names of the tokenizer's added tokens
    dialect: Dialect = HERMES
    begun: Begun = "answer"

    @property
    def has_tokens(self) -> bool:
        """Returns whether the marks around calls are tokens."""
        return all(mark in self.tokens for mark in self.dialect.around_calls)

    def rules(self) -> Rules:
        """Returns an empty set of rules."""
        return Rules(self.tokens, (*self.dialect.think, *self.dialect.call_marks, *self.dialect.others))

    def around(self, rules: Rules, answer: str, instead: str = "") -> str:
        """Returns the whole grammar of an `answer`, or of what may come `instead`, without the answer's header."""
        if self.dialect.call is None:
            return self._in_channels(rules, answer, instead)
        body = " | ".join(filter(None, (answer, instead)))
        if self.begun in ("answer", "text"):
            return f"start: {body}\n{rules}"
        begin, end = self.dialect.think
        think = rules.text_until(end)
        think = f"{think} layout" if self.begun == "reasoning" else f"({BREAK} {rules.mark(begin)} {think} layout)?"
        return f"start: {think} body\nbody: {body}\n{LAYOUT}\n{rules}"

    def _in_channels(self, rules: Rules, answer: str, instead: str) -> str:
        def header(channel: str) -> str:
            return rules.mark(f"{ChannelMarks.CHANNEL}{channel}{ChannelMarks.MESSAGE}")

        end = f'{rules.text_until(ChannelMarks.END)} {rules.mark(ChannelMarks.START)} "assistant"'
        if self.begun == "text":
            return f"start: {answer or instead}\n{rules}"
        rest = " | ".join(filter(None, (f"{header('final')} {answer}" if answer else "", instead)))
        begun = f"{end} " if self.begun == "reasoning" else ""
        messages = f"({header('analysis')} {end} | {header('commentary')} {end})*"
        return f"start: {begun}{messages} body\nbody: {rest}\n{rules}"


def response_grammar(
    asked: ResponseFormat | None, form: Form = Form(), tools: Sequence[Tool] = (), several: bool = False
) -> GrammarChoice | None:
    """Returns the grammar of `response_format`; None for free text. Raises InvalidRequest.

    In place of the answer there may be a call to any of `tools`, or `several`.
    """
    term = ""
    match asked.type if asked else "text":
        case "text":
            return None
        case "json_object":
            body = json_rule({"type": "object"})
        case "json_schema":
            if asked is None or asked.json_schema is None or asked.json_schema.schema is None:
                raise InvalidRequest("json_schema needs a `schema`", param="response_format.json_schema.schema")
            check_schema(asked.json_schema.schema, "response_format.json_schema.schema")
            body = json_rule(asked.json_schema.schema)
        case "regex":
            if asked is None or not asked.regex:
                raise InvalidRequest("a format of type regex needs a `regex`", param="response_format.regex")
            check_pattern(asked.regex, "response_format.regex")
            body = term = f"/{regex_to_lark(asked.regex)}/"
        case other:
            raise InvalidRequest(
                f"response_format {other!r} is unknown; use text, json_object, json_schema or regex",
                param="response_format.type",
            )
    either = _with_calls(tools, several, form, lambda rules, calls: form.around(rules, body, calls))
    alone = _bounded(form.around(form.rules(), body), "response_format")
    return GrammarChoice((*either, alone), "response_format", term=term)


def tool_grammar(tools: Sequence[Tool], several: bool, form: Form = Form()) -> GrammarChoice:
    """Returns the grammar of one call, or `several`, to any of `tools`. Raises InvalidRequest."""
    _check_tools(tools)
    rules = form.rules()
    calls = rules.add("calls", call_rules(rules, form.dialect, tools, several, strict=True))
    return GrammarChoice((_bounded(form.around(rules, "", calls), "tools"),), "tools")


def free_grammar(tools: Sequence[Tool], several: bool, form: Form = Form()) -> GrammarChoice | None:
    """Returns a grammar of free text that may end in calls to any of `tools`.

    It constrains names, and arguments too where their schemas can be honoured. Returns None where the tokenizer has no
    tokens for the marks of calls, because a call cannot then be distinguished from text.
    """

    def text_or(rules: Rules, calls: str) -> str:
        rules.add("PLAIN", ANY_TEXT)
        return (
            form.around(rules, "PLAIN", calls) if form.dialect.call is None else form.around(rules, f"PLAIN {calls}?")
        )

    return (
        GrammarChoice(_with_calls(tools, several, form, text_or), "tools", optional=True) if form.has_tokens else None
    )


def _with_calls(
    tools: Sequence[Tool], several: bool, form: Form, whole: Callable[[Rules, str], str]
) -> tuple[str, ...]:
    """Returns the grammars that `whole` makes of rules, and of the name of that for calls.

    The first constrains arguments, for which their schemas have to be honoured, the second does not.
    """
    larks = []
    for strict in (True, False) if tools else ():
        with contextlib.suppress(InvalidRequest):
            if strict:
                _check_tools(tools)
            rules = form.rules()
            calls = rules.add("calls", call_rules(rules, form.dialect, tools, several, strict))
            larks.append(_bounded(whole(rules, calls), "tools"))
    return tuple(larks)


def _check_tools(tools: Sequence[Tool]) -> None:
    for at, tool in enumerate(tools):
        check_schema(tool.function.parameters, f"tools[{at}].function.parameters")


def _bounded(lark: str, param: str) -> str:
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
    return lark
