"""Writes llguidance's Lark grammars: marks, free text, JSON, and tool calls in each form of a dialect.

Marks that are added tokens appear as tokens: llguidance treats an added token in angle brackets as special, and no
string or regex matches one. Parameters written as plain text are held to their type and `enum`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from edgemoe.api.dialects.argument_types import TEXT, kinds, properties, required, resolved
from edgemoe.api.dialects.dialect import ChannelMarks, Dialect
from edgemoe.api.dialects.tool_calls import BracedForm, NamedForm, ObjectForm, ParameterForm
from edgemoe.api.schema import Tool
from edgemoe.types.json_object import Json

COMPACT: Json = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
AS_IN_TEMPLATES: Json = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}  # as tojson has it
SPACED: Json = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # as the model likes
ANY_TEXT = r"/(.|\n)*/"
BREAK = '("\\n")?'


def json_rule(schema: Any, spacing: Json = COMPACT, *, exact: bool = False) -> str:
    """Returns the Lark term for a JSON value of this schema. Unless `exact`, unknown keywords are not enforced."""
    guidance = spacing if exact else {**spacing, "lenient": True, "coerce_one_of": True}
    schema = {**schema, "x-guidance": guidance} if isinstance(schema, dict) else schema
    return f"%json {msgspec.json.encode(schema).decode()}"


def literal(text: str) -> str:
    """Returns the Lark term for a text without tokens."""
    return json.dumps(text, ensure_ascii=False)


def any_text(texts: Sequence[str]) -> str:
    """Returns the Lark term for any of `texts`, as one lexeme: ten thousand rules could not be followed at once."""
    some = f"/(?:{'|'.join(_escaped(text) for text in texts if text)})/"
    return some if all(texts) else f"{some}?" if any(texts) else '""'


def one_of(terms: Iterable[str]) -> str:
    """Returns the Lark term for any of `terms`."""
    return f"({' | '.join(terms)})"


class LarkRules:
    """Collects a grammar's rules. `tokens` are the ids of the tokenizer's added tokens by name, `marks` a dialect's."""

    def __init__(self, tokens: Mapping[str, int], marks: Iterable[str]) -> None:
        self._ids = tokens
        self._tokens = sorted((mark for mark in marks if mark in tokens), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._rules: list[str] = []
        self._texts: dict[str, str] = {}  # by the mark that ends them

    def __str__(self) -> str:
        return "\n".join(self._rules)

    def mark(self, text: str) -> str:
        """Returns the Lark term for a mark, or a text that has tokens in it."""
        terms, at = [], 0
        for found in self._split.finditer(text):
            terms += [literal(text[at : found.start()])] if found.start() > at else []
            terms.append(found[0] if found[0].startswith("<") else f"<[{self._ids[found[0]]}]>")
            at = found.end()
        return " ".join([*terms, literal(text[at:])] if at < len(text) else terms)

    def add(self, name: str, body: str) -> str:
        """Adds a rule. Returns its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def named(self, prefix: str, body: str) -> str:
        """Adds a rule under a new name, which it returns."""
        return self.add(f"{prefix}_{len(self._rules)}", body)

    def text_until(self, end: str) -> str:
        """Returns the Lark term for any text and the mark that ends it."""
        if end not in self._texts:
            name = f"text_{len(self._texts)}"
            if end in self._tokens:
                self._texts[end] = f"{self.add(name.upper(), ANY_TEXT)} {self.mark(end)}"
            else:
                self.add(f"{name}[lazy]", f"{ANY_TEXT[:-1]}{_escaped(end)}/")
                self._texts[end] = name
        return self._texts[end]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


MAX_MORE = 31  # calls after the first
KEY = r"/[^<>{}:=\"\n]{1,64}/"
ANY_OBJECT: Json = {"type": "object"}


def tool_call_rules(rules: LarkRules, dialect: Dialect, tools: Sequence[Tool], several: bool, strict: bool) -> str:
    """Adds the rules of one call, or `several`, to any of `tools`. Returns the term for all of it."""
    calls = one_of(rules.named("call", _tool_call(rules, dialect, tool, strict)) for tool in tools)
    if dialect.call is None:  # whose every call ends the answer
        return calls
    section = dialect.section
    between = '"," " "?' if section is not None and section.is_list else BREAK
    many = f"{calls} ({between} {calls}){{0,{MAX_MORE}}}" if several else calls
    if section is None:
        return many
    if section.is_list:
        begin, end = rules.mark(section.begin), rules.mark(section.end) if section.end else ""
        return f'{begin} " "? "[" {BREAK} {many} {BREAK} "]" {end}'
    return f"{rules.mark(section.begin)} {BREAK} {many} {BREAK} {rules.mark(section.end)}"


def _tool_call(rules: LarkRules, dialect: Dialect, tool: Tool, strict: bool) -> str:
    name = tool.function.name
    schema: Json = (strict and tool.function.parameters) or ANY_OBJECT
    exact = bool(tool.function.strict)
    match dialect.call:
        case None:
            return f"{_header(rules, name)} {json_rule(schema, SPACED, exact=exact)}"
        case ObjectForm() as form:
            if not form.begin:  # in a list, of which some models write the arguments first
                orders = (_object(form, name, schema, flip) for flip in (False, True))
                return one_of(json_rule(order, SPACED, exact=exact) for order in orders)
            body = json_rule(_object(form, name, schema), AS_IN_TEMPLATES, exact=exact)
            return f'{rules.mark(form.begin)} "\\n" {body} "\\n" {rules.mark(form.end)}'
        case NamedForm() as form:
            return _named(rules, form, name, schema, exact)
        case ParameterForm() as form:
            return _with_parameters(rules, form, name, schema, exact)
        case BracedForm() as form:
            return _braced(rules, form, name, schema, exact)
        case other:
            raise AssertionError(f"no grammar for {other}")


def _header(rules: LarkRules, name: str) -> str:
    """Returns the term for the header of a call: the recipient stands before the channel or behind it."""
    channel, to = rules.mark(f"{ChannelMarks.CHANNEL}commentary"), literal(f" to=functions.{name}")
    kind = f'(" "? {rules.mark(ChannelMarks.CONSTRAIN)}? "json")?'
    return f"({channel} {to} | {to} {channel}) {kind} {rules.mark(ChannelMarks.MESSAGE)}"


def _object(form: ObjectForm, name: str, schema: Json, arguments_first: bool = False) -> Json:
    members: list[tuple[str, Json]] = [(form.name, {"const": name}), (form.arguments[0], schema)]
    shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        **shared,  # "#/$defs/..." is relative to the whole schema
        "type": "object",
        "properties": dict(reversed(members) if arguments_first else members),
        "required": [form.name, form.arguments[0]],
        "additionalProperties": False,
    }


def _named(rules: LarkRules, form: NamedForm, name: str, schema: Json, exact: bool) -> str:
    given = f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/" if form.names_are_ids else literal(name)
    fence = (' "\\n"', f' "\\n" {literal(form.fence)}') if form.fence else ("", "")
    head = f"{rules.mark(form.begin + form.before_name)} {given} {rules.mark(form.after_name)}{fence[0]}"
    return f"{head} {json_rule(schema, SPACED, exact=exact)}{fence[1]} {rules.mark(form.end)}"


def _with_parameters(rules: LarkRules, form: ParameterForm, name: str, schema: Json, exact: bool) -> str:
    terms = [rules.mark(form.begin), BREAK if form.before_name else "", rules.mark(form.before_name + name)]
    terms += [rules.mark(form.after_name), BREAK]
    given = properties(schema)
    needed = required(schema)
    for key, value in given.items():
        term = f"{_parameter(rules, form, literal(key), value, schema, exact)} {BREAK}"
        terms.append(term if key in needed else f"({term})?")
    if not given and schema.get("additionalProperties") is not False:
        terms.append(f"({_parameter(rules, form, KEY, None, schema, exact)} {BREAK}){{0,{MAX_MORE}}}")
    ends = f" {BREAK} ".join(map(rules.mark, form.end))
    return " ".join(filter(None, [*terms, ends]))


def _parameter(rules: LarkRules, form: ParameterForm, key: str, schema: Any, root: Json, exact: bool) -> str:
    between = f" {BREAK} ".join(map(rules.mark, form.after_key))
    head = f"{rules.mark(form.before_key)} {key} {between}{' ' + BREAK if form.layout else ''}"
    end = f"{BREAK if form.layout else ''} {rules.mark(form.after_value)}"
    if choices := _texts(schema, root):
        return f"{head} {choices} {end}"
    allowed = kinds(schema, root)
    if allowed <= TEXT or "string" in allowed:
        return f"{head} {rules.text_until(form.after_value)}"
    return f"{head} {json_rule(_within(schema, root), AS_IN_TEMPLATES, exact=exact)} {end}"


def _within(schema: Any, root: Json) -> Json:
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def _texts(schema: Any, root: Json) -> str:
    """Returns the term for the strings that a schema lists; "" where it does not, or lists other values, too."""
    schema = resolved(schema, root)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not listed or not all(isinstance(one, str) for one in listed):
        return ""
    return any_text(listed)


def _braced(rules: LarkRules, form: BracedForm, name: str, schema: Json, exact: bool) -> str:
    quote, anything = rules.mark(form.quote), _anything(rules, form)
    given = properties(schema)
    needed = required(schema)
    members = []
    for key in sorted(given):
        texts = _texts(given[key], schema)
        if texts:
            value = f"{quote} {texts} {quote}"
        elif kinds(given[key], schema) == TEXT:
            value = f"{quote} {rules.text_until(form.quote)}"
        elif kinds(given[key], schema) & {"object", "array", "string"} or not kinds(given[key], schema):
            value = anything
        else:
            value = json_rule(_within(given[key], schema), COMPACT, exact=exact)
        members.append((rules.named("member", f"{literal(f'{key}:')} {value}"), key in needed))
    closed = schema.get("additionalProperties") is False
    inside = _in_order(rules, members) if given else "" if closed else f'(member_any ("," member_any){{0,{MAX_MORE}}})?'
    return f'{rules.mark(form.begin)} {literal(f"{form.before_name}{name}{{")} {inside} "}}" {rules.mark(form.end)}'


def _in_order(rules: LarkRules, members: Sequence[tuple[str, bool]]) -> str:
    """Returns the term for members in order with commas between them; optional members may be missing."""
    choices: list[str] = []
    optional, rest = True, ""
    for name, needed in reversed(members):
        choices = [f"{name} {rest}"] if needed else [f"{name} {rest}", *choices]
        optional = optional and not needed
        rest = rules.named("rest", f'"," {name} {rest}' if needed else f'("," {name})? {rest}')
    return one_of(choices) + ("?" if optional else "")


def _anything(rules: LarkRules, form: BracedForm) -> str:
    if "\nany_value: " not in f"\n{rules}":
        text = f"{rules.mark(form.quote)} {rules.text_until(form.quote)}"
        rules.add("member_any", f'{KEY} ":" any_value')
        plain = json_rule({"type": ["number", "boolean", "null"]})
        some = f'"[" (any_value ("," any_value){{0,{MAX_MORE}}})? "]"'
        members = f'"{{" (member_any ("," member_any){{0,{MAX_MORE}}})? "}}"'
        rules.add("any_value", f"{text} | {plain} | {some} | {members}")
    return "any_value"
