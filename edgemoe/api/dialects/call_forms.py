"""The forms in which models write one tool call, and how each is read.

A form reads from behind its first mark to its end, and raises Malformed where the text is something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from edgemoe.api.dialects.growing_text import MAX_HELD, MAX_NAME, GrowingText, Malformed, Reading
from edgemoe.api.dialects.json_text import (
    MAX_DEPTH,
    Write,
    bounded,
    copy_string,
    copy_value,
    is_object,
    is_scalar,
    quoted,
    string,
)
from edgemoe.api.dialects.open_call import OpenCall
from edgemoe.api.dialects.values import TEXT, WORDS, as_json, kinds, properties


class CallForm(Protocol):
    """How a call is written: `begin` is its first mark."""

    @property
    def begin(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns all that may be special tokens of a tokenizer."""

    def read(self, source: GrowingText, call: OpenCall) -> Reading[None]:
        """Reads a call from behind `begin` on."""


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """One JSON object with the function's name and its arguments (Hermes, Qwen3)."""

    begin: str
    end: str
    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end

    def read(self, source: GrowingText, call: OpenCall) -> Reading[None]:
        held: list[str] = []  # arguments that come before the name
        yield from source.expect("{")
        given = False
        while True:
            yield from source.space()
            key = yield from string(source)
            yield from source.expect(":")
            yield from source.space()
            if key == self.name:
                call.begin((yield from string(source)))
            elif key in self.arguments and not given:
                given = True
                yield from _arguments(source, call.write if call.begun else bounded(held))
            else:
                yield from copy_value(source, bounded([]))
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}", self.end)
        if not call.begun:
            raise Malformed
        if held or not given:
            call.write("".join(held) or "{}")


def _arguments(source: GrowingText, write: Write) -> Reading[None]:
    """Reads arguments: an object, text that holds one, or null for none."""
    match (yield from source.next()):
        case "{":
            yield from copy_value(source, write)
        case '"':
            text = yield from string(source, MAX_HELD)
            if not is_object(text):
                raise Malformed
            write(text)
        case _:
            yield from copy_value(source, bounded([]))
            write("{}")


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The function's name between marks, then its arguments as JSON (DeepSeek, Kimi-K2)."""

    begin: str
    after_name: str
    end: str
    before_name: str = ""
    fence: str = ""  # stands behind the arguments, before `end`
    names_are_ids: bool = False  # "functions.NAME:NUMBER" is the call's id

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.after_name, self.end

    def read(self, source: GrowingText, call: OpenCall) -> Reading[None]:
        if self.before_name:
            yield from source.expect(self.before_name)
        name = (yield from source.until(self.after_name)).strip()
        if self.names_are_ids:
            call.begin(name.removeprefix("functions.").rpartition(":")[0] or name, name)
        else:
            call.begin(name)
        yield from source.space()
        if (yield from source.next()) != "{":
            raise Malformed
        yield from copy_value(source, call.write)
        yield from source.expect(*filter(None, (self.fence, self.end)))


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """The function's name, then each parameter between marks, as text (Qwen3-Coder, GLM-4.5, MiniMax-M2)."""

    begin: str
    before_name: str
    after_name: str  # "": the name ends where a parameter or the end begins
    before_key: str
    after_key: tuple[str, ...]
    after_value: str
    end: tuple[str, ...]  # only the first must be there
    layout: bool = False  # one line break on either side of a value is layout

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.before_key, *self.after_key, self.after_value, *self.end

    def read(self, source: GrowingText, call: OpenCall) -> Reading[None]:
        call.begin((yield from self._name(source)))
        keys: set[str] = set()
        while True:
            yield from source.space()
            if not (yield from source.accept(self.before_key)):
                break
            key = (yield from source.until(self.after_key[0])).strip()
            if key in keys:
                raise Malformed
            yield from source.expect(*self.after_key[1:])
            call.write(f"{', ' if keys else '{'}{quoted(key)}: ")
            keys.add(key)
            yield from self._value(source, call, key)
        yield from source.expect(self.end[0])
        for mark in self.end[1:]:
            yield from source.space()
            yield from source.accept(mark)
        call.write("}" if keys else "{}")

    def _name(self, source: GrowingText) -> Reading[str]:
        if self.before_name:
            yield from source.expect(self.before_name)
        if self.after_name:
            return (yield from source.until(self.after_name)).strip()
        parts: list[str] = []
        mark = yield from source.copy((self.before_key, self.end[0]), bounded(parts, MAX_NAME))
        source.unread(len(mark))
        return "".join(parts).strip()

    def _value(self, source: GrowingText, call: OpenCall, key: str) -> Reading[None]:
        if self.layout:
            yield from source.accept("\n")
        ends = (f"\n{self.after_value}", self.after_value) if self.layout else (self.after_value,)
        allowed = kinds(properties(call.parameters).get(key), call.parameters)
        if allowed <= TEXT:
            yield from _text(source, call.write, ends)
            return
        parts: list[str] = []
        if not (yield from source.copy(ends, bounded(parts))):
            raise Malformed
        call.write(as_json("".join(parts), allowed))


@dataclass(frozen=True, slots=True)
class BracedCall:
    """The function's name, then braces with bare keys and with strings between marks of their own (Gemma 4)."""

    begin: str
    before_name: str
    quote: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.quote, self.end

    def read(self, source: GrowingText, call: OpenCall) -> Reading[None]:
        yield from source.expect(self.before_name)
        name = yield from source.until("{")
        source.unread(1)
        call.begin(name.strip())
        yield from self._value(source, call.write, 0)
        yield from source.expect(self.end)

    def _value(self, source: GrowingText, write: Write, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        match (yield from source.accept("{", "[", self.quote)):
            case "{":
                yield from self._members(source, write, "{", "}", depth)
            case "[":
                yield from self._members(source, write, "[", "]", depth)
            case self.quote:
                yield from _text(source, write, (self.quote,))
            case _ if (yield from source.next()) == '"':
                yield from copy_string(source, write)
            case _:
                text = (yield from source.run(BARE, MAX_NAME)).strip()
                if not text:
                    raise Malformed
                word = WORDS.get(text, text)
                write(word if is_scalar(word) else quoted(text))

    def _members(self, source: GrowingText, write: Write, begin: str, end: str, depth: int) -> Reading[None]:
        between = begin
        while True:
            yield from source.space()
            if between == begin and (yield from source.accept(end)):
                write(begin + end)
                return
            write(between)
            if begin == "{":
                write(f"{quoted((yield from self._key(source)))}: ")
                yield from source.space()
            yield from self._value(source, write, depth + 1)
            yield from source.space()
            if not (yield from source.accept(",")):
                break
            between = ", "
        yield from source.expect(end)
        write(end)

    def _key(self, source: GrowingText) -> Reading[str]:
        if (yield from source.accept(self.quote)):
            key = yield from source.until(self.quote)
            yield from source.expect(":")
            return key
        return (yield from source.until(":")).strip().strip('"')


BARE = re.compile(r"[^,{}\[\]<\n]*")


def _text(source: GrowingText, write: Write, ends: tuple[str, ...]) -> Reading[None]:
    """Reads text up to one of `ends`, which it passes on as a JSON string."""
    write('"')
    if not (yield from source.copy(ends, lambda text: write(quoted(text)[1:-1]))):
        raise Malformed
    write('"')
