"""Builds the grammar that constrains sampling from `response_format` and `tool_choice`, and bounds their schemas.

A `GrammarCandidates` lists Lark grammars, the best first; the first that passes its trial is used. The grammar allows
reasoning first where the model may reason, and constrains the answer (in channels: the final message).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, DecimalException
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import structs

from edgemoe.api.body_bounds import MAX_VALUES
from edgemoe.api.dialects.dialect import HERMES, ChannelMarks, Dialect, OutputStart
from edgemoe.api.generate.json_schema import has_patterns, prepared
from edgemoe.api.generate.tool_call_grammar import (
    ANY_TEXT,
    BREAK,
    LarkRules,
    any_text,
    json_rule,
    tool_call_rules,
)
from edgemoe.api.schema import ResponseFormat, Tool
from edgemoe.api.schema_forms import usual_schema
from edgemoe.errors import InvalidRequest

MAX_DEPTH = 64
MAX_MULTIPLE = 1_000_000  # multipleOf, read without its decimal point
MAX_LEAST = 1_000_000  # minLength and the like
MAX_MOST = 2**31 - 1  # maxLength and the like
MAX_PATTERN_CHARS = 16 << 10
MAX_REPETITIONS = 100_000  # of counted repetitions within each other: (a{100}){1000}
MAX_MEMBERS = {
    "enum": 10_000,
    "anyOf": 1_000,
    "oneOf": 1_000,
    "allOf": 200,
    "prefixItems": 1_000,
    "type": 16,
    "required": 2_000,
    "properties": 2_000,
    "patternProperties": 100,
    "$defs": 2_000,
    "definitions": 2_000,
}
MAX_OPTIONAL = 480  # properties of one object that may be missing: any of them may come next
LEAST = ("minLength", "minItems", "minProperties", "minContains")
MOST = ("maxLength", "maxItems", "maxProperties", "maxContains")
KEYWORDS = frozenset((*MAX_MEMBERS, *LEAST, *MOST, "multipleOf", "pattern"))  # that have bounds

_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])[^\]\\]*(?:\\.[^\]\\]*)*\]|\{(\d*)(?:,(\d*))?\}|.", re.DOTALL)


def check_schema(schema: Any, where: str) -> None:
    """Raises InvalidRequest where a schema, which is at `where` in the body, is out of bounds."""
    values, level = 1, [schema]
    for depth in range(MAX_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return
        values += sum(map(len, level))
        if values > MAX_VALUES:
            raise _beyond(where, f"has more than {MAX_VALUES} values")
        if depth == MAX_DEPTH and any(level):
            raise _beyond(_path_of(level[0], schema, where)[:256], f"is nested more than {MAX_DEPTH} deep")
        for value in level:
            if isinstance(value, dict) and (fault := _fault_of_keywords(value)) is not None:
                raise _beyond(f"{_path_of(value, schema, where)}.{fault[0]}", fault[1])
        level = [member for value in level for member in (value.values() if isinstance(value, dict) else value)]


def _path_of(wanted: Any, schema: Any, where: str) -> str:
    """Returns the path of a value in a schema, which is at `where`. Only refusals take that time."""
    stack = [(schema, where)]
    while stack:
        value, path = stack.pop()
        if value is wanted:
            return path
        if isinstance(value, dict):
            stack.extend((each, f"{path}.{str(key)[:64]}") for key, each in value.items())
        elif isinstance(value, list):
            stack.extend((each, f"{path}[{at}]") for at, each in enumerate(value))
    return where


def check_pattern(pattern: str, where: str) -> None:
    """Raises InvalidRequest where a regular expression is out of bounds."""
    if fault := _fault_of_pattern(pattern):
        raise _beyond(where, fault)


def _fault_of_pattern(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"has {len(pattern)} characters, more than the {MAX_PATTERN_CHARS} allowed"
    if (most := repetitions(pattern)) > MAX_REPETITIONS:
        return f"repeats a part {most} times, more than the {MAX_REPETITIONS} allowed"
    return ""


def repetitions(pattern: str) -> int:
    """Returns how often the most repeated part of a regular expression may occur by counted repetitions."""
    groups = [1]  # the most within each open group
    last = 1  # of the part that a repetition would follow
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
        elif text[0] == "{" and (piece[1] or piece[2]):
            last *= max(1, *(int(bound[:12]) for bound in piece.groups() if bound))
        else:
            last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups)


def _fault_of_keywords(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the first keyword of a schema that is out of bounds, and how; None where all are within."""
    for keyword in KEYWORDS & schema.keys():
        value, most = schema[keyword], MAX_MEMBERS.get(keyword, 0)
        if most and isinstance(value, list | dict) and len(value) > most:
            return keyword, f"has {len(value)} members, more than the {most} allowed"
        most = MAX_LEAST if keyword in LEAST else MAX_MOST if keyword in MOST else 0
        if most and isinstance(value, int | float) and value > most:
            return keyword, f"is more than the {most} allowed"
        if keyword == "properties" and (fault := _fault_of_optional(value, schema.get("required"))):
            return keyword, fault
        if keyword == "multipleOf" and (fault := _fault_of_multiple(value)):
            return keyword, fault
        if keyword == "pattern" and isinstance(value, str) and (fault := _fault_of_pattern(value)):
            return keyword, fault
        if keyword == "patternProperties" and isinstance(value, dict):
            faults = ((f"{keyword}[{at}]", _fault_of_pattern(pattern)) for at, pattern in enumerate(value))
            if found := next((one for one in faults if one[1]), None):
                return found
    return None


def _fault_of_optional(listed: Any, needed: Any) -> str:
    if not isinstance(listed, dict) or len(listed) <= MAX_OPTIONAL:
        return ""
    optional = len(listed.keys() - set(map(str, needed if isinstance(needed, list) else ())))
    if optional <= MAX_OPTIONAL:
        return ""
    return f"lists {optional} that may be missing, more than the {MAX_OPTIONAL} allowed; name more in `required`"


def _fault_of_multiple(multiple: Any) -> str:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return ""  # llguidance refuses it with a message of its own
    try:
        digits = int("".join(map(str, Decimal(repr(multiple)).normalize().as_tuple().digits)))
        whole = int(multiple) if multiple >= 1 else 0
    except (DecimalException, ValueError, OverflowError):
        return "is not a number that can be counted in"
    if max(digits, whole) > MAX_MULTIPLE:
        return f"has more digits than {MAX_MULTIPLE}, the largest multiple allowed, point left out"
    return ""


def _beyond(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {why}", param=where, code="invalid_grammar")


MAX_GRAMMAR_BYTES = 1 << 20
LAYOUT = r"layout: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class GrammarCandidates:
    """Holds Lark grammars, the best first; where none can be honoured and it is not `optional`, the last says why."""

    larks: tuple[str, ...]
    param: str  # the field that asks for it
    optional: bool = False
    term: str = ""  # of a regular expression: some text must match it


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Describes the marks, reasoning and headers that may surround the constrained part."""

    tokens: Mapping[str, int] = field(default_factory=dict)  # ids of the tokenizer's added tokens by name
    dialect: Dialect = HERMES
    begun: OutputStart = "answer"

    @property
    def has_tokens(self) -> bool:
        """Returns whether the marks around calls are tokens."""
        return all(mark in self.tokens for mark in self.dialect.around_tool_calls)

    def rules(self) -> LarkRules:
        """Returns an empty set of rules."""
        dialect = self.dialect
        marks = (*dialect.think, *(dialect.wrapper or ()), *dialect.tool_call_marks, *dialect.others)
        return LarkRules(self.tokens, marks)

    def closed(self, rules: LarkRules) -> str:
        """Returns the term for the mark that ends the text of an answer, and the layout behind it."""
        return f"({rules.mark(self.dialect.wrapper[1])} {BREAK} {BREAK})" if self.dialect.wrapper else ""

    def around(self, rules: LarkRules, answer: str, instead: str = "") -> str:
        """Returns the whole grammar of an `answer`, or of the term that may come `instead`, which has no header."""
        if self.dialect.call is None:
            return self._in_channels(rules, answer, instead)
        body = " | ".join(filter(None, (answer, instead)))
        if self.dialect.wrapper is not None:
            opened, closed = rules.mark(self.dialect.wrapper[0]), self.closed(rules)
            body = f"({opened} {BREAK})? ({BREAK} {closed})? ({body}) ({BREAK} {closed})?"
        if self.begun in ("answer", "text"):
            return f"start: {body}\n{rules}"
        begin, end = self.dialect.think
        think = rules.text_until(end)
        think = f"{think} layout" if self.begun == "reasoning" else f"({BREAK} {rules.mark(begin)} {think} layout)?"
        return f"start: {think} body\nbody: {body}\n{LAYOUT}\n{rules}"

    def _in_channels(self, rules: LarkRules, answer: str, instead: str) -> str:
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
    asked: ResponseFormat | None, form: AnswerForm = AnswerForm(), tools: Sequence[Tool] = (), several: bool = False
) -> GrammarCandidates | None:
    """Returns the grammar of `response_format`; None for free text. Raises InvalidRequest.

    In place of the answer there may be a call to any of `tools`, or `several`.
    """
    if asked is None or asked.type == "text":
        return None
    bodies, term = _format_terms(asked)
    either: list[str] = []
    for body in bodies:
        either += _with_tool_calls(tools, several, form, _around(form, body))
    alone = [_bounded(form.around(form.rules(), body), "response_format") for body in bodies]
    return GrammarCandidates((*either, *alone), "response_format", term=term)


def _around(form: AnswerForm, body: str) -> Callable[[LarkRules, str], str]:
    return lambda rules, calls: form.around(rules, body, calls)


def _format_terms(asked: ResponseFormat) -> tuple[list[str], str]:
    """Returns the Lark terms of a format, the best first, and that of a regular expression. Raises InvalidRequest."""
    schema = asked.schema if asked.schema is not None else asked.value
    match asked.type:
        case "json_object" | "json" if schema is None:
            return [json_rule({"type": "object"})], ""
        case "json_object" | "json_schema" | "json":
            return _schema_terms(asked, schema), ""
        case "regex":
            regex = asked.regex or asked.pattern or asked.value
            if not regex or not isinstance(regex, str):
                raise InvalidRequest("a format of type regex needs a `regex`", param="response_format.regex")
            check_pattern(regex, "response_format.regex")
            term = f"/{regex_to_lark(regex)}/"
            return [term], term
        case "choice" if asked.choice:
            return [any_text(asked.choice)], ""
        case "grammar":
            return [_grammar_term(asked.grammar or asked.value)], ""
        case other:
            raise InvalidRequest(
                f"response_format {other!r} is unknown; use text, json_object, json_schema, regex or grammar",
                param="response_format.type",
            )


def _schema_terms(asked: ResponseFormat, schema: Any) -> list[str]:
    """Returns the terms of a schema: with its patterns, then without, unless it is strict."""
    where, strict = "response_format.schema", bool(asked.strict)
    if asked.json_schema is not None and (given := asked.json_schema.own_schema) is not None:
        where, schema = "response_format.json_schema.schema", given
        strict = strict or bool(asked.json_schema.strict)
    if isinstance(schema, str):
        schema = _decoded_schema(schema, where)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("json_schema needs a `schema`", param="response_format.json_schema.schema")
    check_schema(schema, where)
    schema = usual_schema(schema)
    check_schema(schema, where)
    loose = not strict and has_patterns(schema)
    return [
        json_rule(prepared(schema, exact=strict, patterns=patterns), exact=strict)
        for patterns in ((True, False) if loose else (True,))
    ]


def _decoded_schema(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{where}: text that is no JSON: {error}", param=where, code="invalid_type") from None


def _grammar_term(text: Any) -> str:
    """Returns the term of a grammar in llama.cpp's GBNF or in Lark. Raises InvalidRequest."""
    where = "response_format.grammar"
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest("a format of type grammar needs a `grammar`", param=where)
    if len(text) > MAX_PATTERN_CHARS:
        raise _beyond(where, f"has {len(text)} characters, more than the {MAX_PATTERN_CHARS} allowed")
    try:
        return f"%lark {{\n{any_to_lark(text)}\n}}"
    except Exception as error:  # it raises bare ones, too
        reason = " ".join(str(error).split())[:200]
        raise InvalidRequest(f"{where} cannot be read: {reason}", param=where, code="invalid_grammar") from None


def tool_grammar(tools: Sequence[Tool], several: bool, form: AnswerForm = AnswerForm()) -> GrammarCandidates:
    """Returns the grammar of one call, or `several`, to any of `tools`. Raises InvalidRequest.

    Where the schemas cannot be honoured, the parameters of tools that are not strict may be any object.
    """
    _check_tools(tools)
    larks = []
    for offered in (*_variants(tools), *_without_schemas(tools)):
        rules = form.rules()
        calls = rules.add("calls", tool_call_rules(rules, form.dialect, offered, several, strict=True))
        larks.append(_bounded(form.around(rules, "", calls), "tools"))
    return GrammarCandidates(tuple(larks), "tools")


def free_grammar(tools: Sequence[Tool], several: bool, form: AnswerForm = AnswerForm()) -> GrammarCandidates | None:
    """Returns a grammar of free text that may end in calls to any of `tools`.

    It constrains names, and arguments too where their schemas can be honoured. Returns None where the tokenizer has no
    tokens for the marks of calls, because a call cannot then be distinguished from text.
    """

    def text_or(rules: LarkRules, calls: str) -> str:
        rules.add("PLAIN", ANY_TEXT)
        if form.dialect.call is None:
            return form.around(rules, "PLAIN", calls)
        closed = f"{form.closed(rules)}?" if form.dialect.wrapper is not None else ""
        return form.around(rules, f"PLAIN {closed} {calls}?")

    return (
        GrammarCandidates(_with_tool_calls(tools, several, form, text_or), "tools", optional=True)
        if form.has_tokens
        else None
    )


def _with_tool_calls(
    tools: Sequence[Tool], several: bool, form: AnswerForm, whole: Callable[[LarkRules, str], str]
) -> tuple[str, ...]:
    """Returns the grammars that `whole` makes of rules, and of the name of that for calls.

    All but the last constrain arguments, for which their schemas have to be honoured.
    """
    larks: list[str] = []

    def add(offered: Sequence[Tool], strict: bool) -> None:
        rules = form.rules()
        calls = rules.add("calls", tool_call_rules(rules, form.dialect, offered, several, strict))
        larks.append(_bounded(whole(rules, calls), "tools"))

    with contextlib.suppress(InvalidRequest):
        _check_tools(tools)
        for offered in _variants(tools):
            add(offered, strict=True)
    with contextlib.suppress(InvalidRequest):
        if tools:
            add(tools, strict=False)
    return tuple(larks)


def _variants(tools: Sequence[Tool]) -> list[list[Tool]]:
    """Returns the tools with prepared schemas: with all patterns, then without the patterns of tools not strict."""
    if not tools:
        return []
    loose = any(has_patterns(tool.function.parameters) and not tool.function.strict for tool in tools)
    return [[_prepared_tool(tool, patterns) for tool in tools] for patterns in ((True, False) if loose else (True,))]


def _without_schemas(tools: Sequence[Tool]) -> list[list[Tool]]:
    """Returns the tools with the schemas of strict ones only; none where all are strict."""
    bare = [
        _prepared_tool(tool, patterns=True)
        if tool.function.strict
        else structs.replace(tool, function=structs.replace(tool.function, parameters=None))
        for tool in tools
    ]
    return [bare] if any(not tool.function.strict for tool in tools) else []


def _prepared_tool(tool: Tool, patterns: bool) -> Tool:
    schema = prepared(tool.function.parameters, exact=bool(tool.function.strict), patterns=patterns, any_types=True)
    return structs.replace(tool, function=structs.replace(tool.function, parameters=schema))


def _check_tools(tools: Sequence[Tool]) -> None:
    for at, tool in enumerate(tools):
        check_schema(tool.function.parameters, f"tools[{at}].function.parameters")


def _bounded(lark: str, param: str) -> str:
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
    return lark
