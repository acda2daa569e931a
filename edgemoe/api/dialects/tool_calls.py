"""Parses tool calls in each form that models write them in, while they stream.

A form's `read` begins behind its first mark, and raises MalformedOutput for other text. A call is passed on in
pieces, none before its function is known to be one that the request offers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Literal, Protocol

from edgemoe.api.dialects.argument_types import TEXT, WORDS, as_json, kinds, properties
from edgemoe.api.dialects.growing_text import (
    MAX_DEPTH,
    MAX_HELD,
    MAX_NAME,
    GrowingText,
    MalformedOutput,
    Reading,
    Write,
    bounded,
    copy_string,
    copy_value,
    is_object,
    is_scalar,
    quoted,
    string,
)
from edgemoe.types.json_object import Json

PieceKind = Literal["text", "reasoning", "call"]
ToolCallEnd = Literal["", "complete", "cut", "broken"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Names one tool call. `index` counts the calls of the answer."""

    index: int
    name: str
    id: str


@dataclass(slots=True)
class OutputPiece:
    """A part of the output. A call's `text` is JSON text of its arguments, and `raw` the text that the model wrote."""

    kind: PieceKind
    text: str
    call: ToolCall | None = None
    raw: str = ""
    begins: bool = False  # the call's first piece
    ended: ToolCallEnd = ""  # how the call ended, in its last piece
    around: PieceKind = "text"  # the kind of text that the call stands in

    def __bool__(self) -> bool:
        return bool(self.text or self.begins or self.ended)


class OutputPieces:
    """Collects pieces. Adjacent pieces of one text or call are joined."""

    def __init__(self) -> None:
        self._pieces: list[OutputPiece] = []

    def __iter__(self) -> Iterator[OutputPiece]:
        return iter(self._pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: OutputPiece) -> None:
        """Appends a piece, joined to the last one if both are of one text or call."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind == piece.kind and last.call is piece.call:
            last.text += piece.text
            last.raw += piece.raw
            last.ended = last.ended or piece.ended
        elif piece or piece.raw:
            self._pieces.append(copy(piece))

    def extend(self, other: OutputPieces) -> None:
        """Appends all pieces of `other`."""
        for piece in other:
            self.add(piece)

    def of(self, kind: PieceKind) -> list[OutputPiece]:
        """Returns the pieces of one kind."""
        return [piece for piece in self._pieces if piece.kind == kind]

    def text(self, kind: PieceKind = "text") -> str:
        """Returns the text of all pieces of one kind."""
        return "".join(piece.text for piece in self._pieces if piece.kind == kind)

    def drop_broken_tool_calls(self) -> None:
        """Turns malformed calls back into the text that the model wrote."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            kept = piece.kind != "call" or piece.ended in ("complete", "cut")
            self.add(piece if kept else OutputPiece(piece.around, piece.raw))


OfferedFunctions = Mapping[str, Json | None]  # the parameters' schema of each function that may be called


class ToolCallBuilder:
    """Collects the arguments of one call."""

    def __init__(
        self,
        source: GrowingText,
        emit: Callable[[OutputPiece], None],
        functions: OfferedFunctions | None,
        index: int,
        id: str,
    ) -> None:
        """Takes the call's `id`, for where the model gives none."""
        self._id = id
        self._source = source
        self._emit = emit
        self._functions = functions
        self._index = index
        self._call: ToolCall | None = None
        self._new = False
        self._pending: list[tuple[str, int]] = []  # texts, and how much of the source was read at each

    @property
    def is_named(self) -> bool:
        """Returns whether the function is known."""
        return self._call is not None

    @property
    def is_passed_on(self) -> bool:
        """Returns whether a piece of the call was passed on."""
        return self.is_named and not self._new

    @property
    def parameters(self) -> Json:
        """Returns the schema of the function's parameters; {} where there is none."""
        return (self._functions or {}).get(self._call.name if self._call else "") or {}

    def begin(self, name: str, id: str = "") -> None:
        """Names the function, once. Raises MalformedOutput where it was not offered."""
        if self.is_named or not name or (self._functions is not None and name not in self._functions):
            raise MalformedOutput
        self._call = ToolCall(self._index, name, id or self._id)
        self._new = True

    def write(self, text: str) -> None:
        """Appends JSON text to the arguments, and notes how far the source was read for it."""
        self._pending.append((text, self._source.read))

    def pass_on(self) -> None:
        """Passes on the known arguments, but no text that may end them: a broken call's arguments never look whole."""
        held = self._pending[-1:] if self._pending and self._pending[-1][0].endswith("}") else []
        passed = self._pending[: len(self._pending) - len(held)]
        if self._call is not None and passed:
            self._add(passed, passed[-1][1], "")
            self._pending = [(text, read - passed[-1][1]) for text, read in held]

    def complete(self) -> None:
        """Ends the call, which has been read to its end."""
        assert self._call is not None
        self._add(self._pending, self._source.read, "complete")

    def cut_off(self) -> None:
        """Ends the call, whose function is known, with the arguments so far."""
        assert self._call is not None
        self._add(self._pending, self._source.read, "cut")
        self._source.cut()

    def give_up(self) -> str:
        """Ends a call that cannot be read on. Returns the text that was read of it and is not in any piece."""
        if self.is_passed_on:
            self._emit(OutputPiece("call", "", self._call, ended="broken"))
        return self._source.cut()

    def _add(self, passed: list[tuple[str, int]], read: int, ended: ToolCallEnd) -> None:
        arguments = "".join(text for text, _ in passed)
        self._emit(OutputPiece("call", arguments, self._call, self._source.cut(read), begins=self._new, ended=ended))
        self._new = False


PART_OF_ESCAPE = re.compile(r"\\\\(u[0-9a-fA-F]{0,3})?$")
ENDS_OF = {"{": "}", "[": "]"}


def completed_object(text: str) -> str:
    """Returns the JSON object that `text` begins, without an incomplete member; a string may be incomplete."""
    ends: list[str] = []
    whole = ""  # the object as of the last complete member
    in_string = escaped = False
    for at, letter in enumerate(text):
        if in_string:
            in_string, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            in_string = True
        elif letter in ENDS_OF:
            ends.append(ENDS_OF[letter])
            whole = text[: at + 1] + "".join(reversed(ends))
        elif letter in "]}" and ends:
            ends.pop()
            whole = text[: at + 1] + "".join(reversed(ends))
        elif letter == ",":
            whole = text[:at] + "".join(reversed(ends))
    body = PART_OF_ESCAPE.sub("", text) + '"' if in_string else text
    longest = body + "".join(reversed(ends))
    return next((one for one in (text, longest, whole) if is_object(one)), "{}")


class ToolCallForm(Protocol):
    """How a call is written: `begin` is its first mark."""

    @property
    def begin(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns all that may be special tokens of a tokenizer."""

    def read(self, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
        """Reads a call from behind `begin` on."""


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """One JSON object with the function's name and its arguments (Hermes, Qwen3); without marks in a list of calls."""

    begin: str = ""
    end: str = ""
    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end

    def read(self, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
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
                yield from _arguments(source, call.write if call.is_named else bounded(held))
            else:
                yield from copy_value(source, bounded([]))
            yield from source.space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        if not call.is_named:
            raise MalformedOutput
        if held or not given:
            call.write("".join(held) or "{}")
        if self.end:
            yield from source.close(self.end)


def _arguments(source: GrowingText, write: Write) -> Reading[None]:
    """Reads arguments: an object, text that holds one, or null for none."""
    match (yield from source.next()):
        case "{":
            yield from copy_value(source, write)
        case '"':
            text = yield from string(source, MAX_HELD)
            if not is_object(text):
                raise MalformedOutput
            write(text)
        case _:
            yield from copy_value(source, bounded([]))
            write("{}")


@dataclass(frozen=True, slots=True)
class NamedForm:
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

    def read(self, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
        if self.before_name:
            yield from source.expect(self.before_name)
        name = (yield from source.until(self.after_name)).strip()
        if self.names_are_ids:
            call.begin(name.removeprefix("functions.").rpartition(":")[0] or name, name)
        else:
            call.begin(name)
        yield from source.space()
        if (yield from source.next()) != "{":
            raise MalformedOutput
        yield from copy_value(source, call.write)
        yield from source.close(*filter(None, (self.fence, self.end)))


@dataclass(frozen=True, slots=True)
class ParameterForm:
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

    def read(self, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
        call.begin((yield from self._name(source)))
        keys: set[str] = set()
        while True:
            yield from source.space()
            if not (yield from source.accept(self.before_key)):
                break
            key = (yield from source.until(self.after_key[0])).strip()
            if key in keys:
                raise MalformedOutput
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

    def _value(self, source: GrowingText, call: ToolCallBuilder, key: str) -> Reading[None]:
        if self.layout:
            yield from source.accept("\n")
        ends = (f"\n{self.after_value}", self.after_value) if self.layout else (self.after_value,)
        following = (
            f"\n{self.before_key}",
            "\n" + "\n".join(self.end),
        )  # if the model omits `after_value`
        allowed = kinds(properties(call.parameters).get(key), call.parameters)
        if allowed <= TEXT:
            end = yield from _text(source, call.write, (*ends, *following))
        else:
            parts: list[str] = []
            end = yield from source.copy((*ends, *following), bounded(parts))
            if not end:
                raise MalformedOutput
            call.write(as_json("".join(parts), allowed))
        source.unread(len(end) if end in following else 0)


@dataclass(frozen=True, slots=True)
class BracedForm:
    """The function's name, then braces with bare keys and with strings between marks of their own (Gemma 4)."""

    begin: str
    before_name: str
    quote: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.quote, self.end

    def read(self, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
        yield from source.expect(self.before_name)
        name = yield from source.until("{")
        source.unread(1)
        call.begin(name.strip())
        yield from self._value(source, call.write, 0)
        yield from source.close(self.end)

    def _value(self, source: GrowingText, write: Write, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise MalformedOutput
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
                    raise MalformedOutput
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


def _text(source: GrowingText, write: Write, ends: tuple[str, ...]) -> Reading[str]:
    """Reads text up to one of `ends`, which it passes on as a JSON string. Returns the end."""
    write('"')
    end = yield from source.copy(ends, lambda text: write(quoted(text)[1:-1]))
    if not end:
        raise MalformedOutput
    write('"')
    return end
