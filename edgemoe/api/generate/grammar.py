"""Builds the grammar that constrains sampling from `response_format` and `tool_choice`.

Each request has one llguidance Lark grammar. It is checked here (`validate_grammar` needs no tokenizer), so that a
schema that cannot be honoured is answered with status 400 and never reaches the engine. The grammar allows reasoning
first where the model may reason. Tags that are added tokens of the tokenizer appear in the grammar as tokens, because
llguidance treats an added token in angle brackets as special, and no string or regex matches a special token.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from edgemoe.api.schema import ResponseFormat, Tool
from edgemoe.api.text.output_parser import CALL, END_CALL, END_THINK, THINK
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json

MAX_GRAMMAR_BYTES = 1 << 20
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
AS_IN_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as tojson has it
TEXT = "plain: PLAIN\nPLAIN: /(.|\\n)*/"
BYTES = LLTokenizer("byte")
FUEL = LLParserLimits(initial_lexer_fuel=100_000)  # enough to find out whether anything matches
THOUGHT = r"/(.|\n)*/"
LAYOUT = r"layout: /[ \n]{0,4}/"


@dataclass(frozen=True, slots=True)
class Form:
    """Describes what may surround the constrained part: reasoning, and tags that are tokens."""

    tokens: Container[str] = ()  # names of the tokenizer's added tokens
    think: bool = False  # reasoning may come first
    thinking: bool = False  # reasoning has begun in the prompt

    def mark(self, name: str) -> str:
        """Returns the Lark term for a tag."""
        return name if name in self.tokens else f'"{name}"'

    def around(self, rules: str) -> str:
        """Returns the whole grammar, given rules that define `body`."""
        if not self.think:
            return f"start: body\n{rules}"
        start = "think layout" if self.thinking else "(think layout)?"
        return f"start: {start} body\n{self._reasoning()}\n{LAYOUT}\n{rules}"

    def _reasoning(self) -> str:
        begin = "" if self.thinking else f"{self.mark(THINK)} "
        if END_THINK in self.tokens:
            return f"think: {begin}THOUGHT {END_THINK}\nTHOUGHT: {THOUGHT}"
        return f"think: {begin}thought\nthought[lazy]: {THOUGHT[:-1]}<\\/think>/"


def response_grammar(asked: ResponseFormat | None, form: Form = Form()) -> str | None:
    """Returns the grammar of `response_format`; None for free text. Raises InvalidRequest."""
    match asked.type if asked else "text":
        case "text":
            return None
        case "json_object":
            body = json_rule({"type": "object"})
        case "json_schema":
            if asked is None or asked.json_schema is None or asked.json_schema.schema is None:
                raise InvalidRequest("json_schema needs a `schema`", param="response_format.json_schema.schema")
            body = json_rule(asked.json_schema.schema)
        case "regex":
            if asked is None or not asked.regex:
                raise InvalidRequest("a format of type regex needs a `regex`", param="response_format.regex")
            body = f"/{regex_to_lark(asked.regex)}/"
            _matchable(body, "response_format.regex")
        case other:
            raise InvalidRequest(
                f"response_format {other!r} is unknown; use text, json_object, json_schema or regex",
                param="response_format.type",
            )
    return _checked(form.around(f"body: {body}"), "response_format")


def tool_grammar(tools: Sequence[Tool], several: bool, form: Form = Form()) -> str:
    """Returns the grammar of one call, or `several`, to any of `tools`. Raises InvalidRequest."""
    rules = _call_rules([_call_schema(tool) for tool in tools], several, form)
    return _checked(form.around(f"body: calls\n{rules}"), "tools")


def free_grammar(tools: Sequence[Tool], several: bool, form: Form = Form()) -> str | None:
    """Returns a grammar of free text that may end in calls to any of `tools`.

    It constrains names, and arguments too where their schemas can be honoured. Returns None where the tokenizer has no
    tokens for the call tags, because a call cannot then be distinguished from text.
    """
    if CALL not in form.tokens or END_CALL not in form.tokens:
        return None
    for schemas in ([_call_schema(tool) for tool in tools], [_call_schema(tool, strict=False) for tool in tools]):
        with contextlib.suppress(InvalidRequest):
            return _checked(form.around(f"body: plain calls?\n{TEXT}\n{_call_rules(schemas, several, form)}"), "tools")
    return None


def _call_rules(schemas: Sequence[Json], several: bool, form: Form) -> str:
    begin, end = form.mark(CALL), form.mark(END_CALL)
    calls = " | ".join(f"call_{at}" for at in range(len(schemas)))
    rules = [
        f'call_{at}: {begin} "\\n" {json_rule(schema, AS_IN_TEMPLATES)} "\\n" {end}'
        for at, schema in enumerate(schemas)
    ]
    return "\n".join(['calls: call ("\\n" call){0,31}' if several else "calls: call", f"call: {calls}", *rules])


def _call_schema(tool: Tool, strict: bool = True) -> Json:
    parameters: Json = (strict and tool.function.parameters) or {"type": "object"}
    shared: Json = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        **shared,  # "#/$defs/..." is relative to the whole schema
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def json_rule(schema: Any, spacing: Json = COMPACT) -> str:
    """Returns the Lark term for a JSON value of this schema."""
    schema = {**schema, "x-guidance": spacing} if isinstance(schema, dict) else schema
    return f"%json {msgspec.json.encode(schema).decode()}"


def _checked(lark: str, param: str) -> str:
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
    grammar = str(LLMatcher.grammar_from_lark(lark))
    if error := LLMatcher.validate_grammar(grammar):
        reason = re.sub(r"^\d+\(\d+\): ", "", error.splitlines()[0])
        raise InvalidRequest(f"{param} cannot be honoured: {reason}", param=param, code="invalid_grammar")
    return grammar


def _matchable(term: str, param: str) -> None:
    """Raises InvalidRequest where `term` is well formed but no text matches it."""
    grammar = str(LLMatcher.grammar_from_lark(f"start: {term}"))
    if LLMatcher.validate_grammar(grammar):
        return  # `_checked` reports it
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=FUEL)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    if matcher.is_error() and "NoExtension" in matcher.get_error():
        raise InvalidRequest(f"{param}: no text matches this", param=param, code="invalid_grammar")
