"""From `response_format` and `tool_choice` to the grammar that the engine samples under.

One llguidance Lark grammar per request, checked here (`validate_grammar` needs no tokenizer), so that a schema that
cannot be honoured is a 400 and never reaches the engine. Where the model may reason first, the grammar lets it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, regex_to_lark

from edgemoe.api.parse import CALL, END_CALL
from edgemoe.api.schema import ResponseFormat, Tool
from edgemoe.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 1 << 20
GUIDANCE = {"whitespace_pattern": r"[ \n\t]{0,40}"}  # white space without end is how small models get stuck
REASONING = r"think[lazy]: /<think>(.|\n)*<\/think>/"
REST_OF_REASONING = r"think[lazy]: /(.|\n)*<\/think>/"
LAYOUT = r"layout: /[ \n]{0,4}/"


def response_grammar(form: ResponseFormat | None, *, think: bool = False, thinking: bool = False) -> str | None:
    """The grammar of `response_format`; None for free text. `think`: reasoning may come first; `thinking`: has begun.

    Raises InvalidRequest.
    """
    match form.type if form else "text":
        case "text":
            return None
        case "json_object":
            body = json_rule({"type": "object"})
        case "json_schema":
            if form is None or form.json_schema is None or form.json_schema.schema is None:
                raise InvalidRequest("json_schema needs a `schema`", param="response_format.json_schema.schema")
            body = json_rule(form.json_schema.schema)
        case "regex":
            if form is None or not form.regex:
                raise InvalidRequest("a format of type regex needs a `regex`", param="response_format.regex")
            body = f"/{regex_to_lark(form.regex)}/"
        case other:
            raise InvalidRequest(
                f"response_format {other!r} is unknown; use text, json_object, json_schema or regex",
                param="response_format.type",
            )
    return _checked(_with_reasoning(f"body: {body}", think, thinking), "response_format")


def tool_grammar(tools: Sequence[Tool], *, several: bool, think: bool = False, thinking: bool = False) -> str:
    """The grammar of one call, or `several`, to any of `tools`. Raises InvalidRequest."""
    calls = [_call_schema(tool) for tool in tools]
    call = " | ".join(f"call_{at}" for at in range(len(calls)))
    rules = [f'call_{at}: "{CALL}\\n" {json_rule(schema)} "\\n{END_CALL}"' for at, schema in enumerate(calls)]
    body = 'call ("\\n" call){0,31}' if several else "call"
    return _checked(_with_reasoning("\n".join([f"body: {body}", f"call: {call}", *rules]), think, thinking), "tools")


def _call_schema(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object"}
    shared: dict[str, Any] = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }  # "#/$defs/..." is
    return {
        **shared,  # relative to the whole schema
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def json_rule(schema: Any) -> str:
    """The Lark term for a JSON value of this schema."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": GUIDANCE}
    return f"%json {msgspec.json.encode(schema).decode()}"


def _with_reasoning(rules: str, think: bool, thinking: bool) -> str:
    if thinking:
        return f"start: think layout body\n{REST_OF_REASONING}\n{LAYOUT}\n{rules}"
    if think:
        return f"start: (think layout)? body\n{REASONING}\n{LAYOUT}\n{rules}"
    return f"start: body\n{rules}"


def _checked(lark: str, param: str) -> str:
    if len(lark) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
    grammar = str(LLMatcher.grammar_from_lark(lark))
    if error := LLMatcher.validate_grammar(grammar):
        reason = re.sub(r"^\d+\(\d+\): ", "", error.splitlines()[0])
        raise InvalidRequest(f"{param} cannot be honoured: {reason}", param=param, code="invalid_grammar")
    return grammar
