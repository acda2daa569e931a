"""Writes parts of llguidance's Lark grammars: marks, free text, JSON.

Tags that are added tokens of the tokenizer appear as tokens, because llguidance treats an added token in angle brackets
as special, and no string or regex matches a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from typing import Any

import msgspec

from edgemoe.types.arrays import Json

COMPACT: Json = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
AS_IN_TEMPLATES: Json = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}  # as tojson has it
SPACED: Json = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # as the model likes
ANY_TEXT = r"/(.|\n)*/"
BREAK = '("\\n")?'


def json_rule(schema: Any, spacing: Json = COMPACT) -> str:
    """Returns the Lark term for a JSON value of this schema."""
    schema = {**schema, "x-guidance": spacing} if isinstance(schema, dict) else schema
    return f"%json {msgspec.json.encode(schema).decode()}"


def literal(text: str) -> str:
    """Returns the Lark term for a text without tokens."""
    return json.dumps(text, ensure_ascii=False)


def one_of(terms: Iterable[str]) -> str:
    """Returns the Lark term for any of `terms`."""
    return f"({' | '.join(terms)})"


class Rules:
    """Collects a grammar's rules. `tokens` are the names of the tokenizer's added tokens, `marks` a dialect's."""

    def __init__(self, tokens: Container[str], marks: Iterable[str]) -> None:
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
            terms.append(found[0])
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
                self._texts[end] = f"{self.add(name.upper(), ANY_TEXT)} {end}"
            else:
                self.add(f"{name}[lazy]", f"{ANY_TEXT[:-1]}{_escaped(end)}/")
                self._texts[end] = name
        return self._texts[end]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
