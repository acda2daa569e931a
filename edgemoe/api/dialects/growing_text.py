"""Reads a text that still grows, by parsers written as if it were whole, and copies JSON out of it.

A parser is a generator that yields when it needs more text. Text that it has read stays in the buffer until it is
cut off, so that an attempt that fails can be shown as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

import msgspec

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_NAME = 256  # characters of a function's or parameter's name, or of a header
MAX_HELD = 1 << 16  # characters that may be held back before they are classified


class MalformedOutput(Exception):
    """Raised when a parser meets text that it does not expect."""


def held_back(text: str, marks: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    if mark[0] not in text:
        return 0
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class GrowingText:
    """Holds the text that was not cut off yet, and the place that the parser has read up to."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._pushed = 0  # characters in all
        self._ended = False

    def push(self, text: str) -> None:
        """Appends text that has arrived."""
        self._text += text
        self._pushed += len(text)

    def end(self) -> None:
        """Marks the text as complete: no more is pushed."""
        self._ended = True

    @property
    def ended(self) -> bool:
        """Returns whether no more text comes."""
        return self._ended

    @property
    def read(self) -> int:
        """Returns how many characters were read and not cut off."""
        return self._at

    def cut(self, size: int | None = None) -> str:
        """Removes and returns the text that was read, or its first `size` characters."""
        size = self._at if size is None else size
        taken, self._text = self._text[:size], self._text[size:]
        self._at -= size
        return taken

    def unread(self, size: int) -> None:
        """Makes the last `size` characters, which were read and not cut off, unread."""
        self._at -= size

    def more(self) -> Reading[bool]:
        """Waits for more text. Returns False at the end."""
        pushed = self._pushed
        while self._pushed == pushed and not self._ended:
            yield
        return self._pushed > pushed

    def next(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str], limit: int = MAX_HELD) -> Reading[str]:
        """Reads all that matches `pattern`, of single characters. Raises MalformedOutput past `limit` characters."""
        found = ""
        while True:
            found += self.part(pattern)
            if len(found) > limit:
                raise MalformedOutput
            if self._at < len(self._text) or not (yield from self.more()):
                return found

    def part(self, pattern: re.Pattern[str]) -> str:
        """Reads the characters that have arrived and match `pattern`, which is of single characters."""
        match = pattern.match(self._text, self._at)
        found = match[0] if match else ""
        self._at += len(found)
        return found

    def one(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads one character that matches `pattern`. Returns it. Raises MalformedOutput."""
        letter = yield from self.next()
        if not letter or not pattern.fullmatch(letter):
            raise MalformedOutput
        self._at += 1
        return letter

    def space(self) -> Reading[str]:
        """Reads white space."""
        return (yield from self.run(SPACE))

    def begins(self, *wanted: str) -> Reading[str]:
        """Returns the one of `wanted` that comes next, without reading it; "" for none."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, wanted))]
            if found := next((one for one in wanted if rest.startswith(one)), ""):
                return found
            if not any(one.startswith(rest) for one in wanted) or not (yield from self.more()):
                return ""

    def accept(self, *wanted: str) -> Reading[str]:
        """Reads the one of `wanted` that comes next. Returns it; "" for none."""
        found = yield from self.begins(*wanted)
        self._at += len(found)
        return found

    def expect(self, *wanted: str) -> Reading[None]:
        """Reads `wanted`, one after the other, with white space before each. Raises MalformedOutput."""
        for one in wanted:
            yield from self.space()
            if not (yield from self.accept(one)):
                raise MalformedOutput

    def close(self, *marks: str) -> Reading[None]:
        """Reads `marks` as `expect` does, but lets those out that the end of the whole text has cut off."""
        for mark in marks:
            yield from self.space()
            if not (yield from self.accept(mark)) and (yield from self.next()):
                raise MalformedOutput

    def until(self, mark: str, limit: int = MAX_NAME) -> Reading[str]:
        """Reads up to `mark`, and it. Returns the text before it.

        Raises MalformedOutput, having read nothing, where there is no mark within `limit` characters.
        """
        longest = limit + len(mark)
        while (at := self._text.find(mark, self._at, self._at + longest)) < 0:
            if len(self._text) - self._at >= longest or not (yield from self.more()):
                raise MalformedOutput
        before, self._at = self._text[self._at : at], at + len(mark)
        return before

    def copy(self, marks: tuple[str, ...], write: Callable[[str], None], trim: bool = False) -> Reading[str]:
        """Reads up to and including the first of `marks`; passes the text before it to `write` as it arrives.

        Returns the mark. At the end of the text returns "", and keeps a possible beginning of a mark from `write`.
        With `trim`, white space before a mark is kept from `write`, too.
        """
        while True:
            at, mark = _first(self._text, marks, self._at)
            if mark and _may_grow(self._text[at:], marks) and not self._ended:
                mark = ""  # a longer one may begin there, too
            end = at if at >= 0 else len(self._text) - held_back(self._text[self._at :], marks)
            end = max(self._at, _trimmed(self._text, self._at, end) if trim else end)
            if end > self._at:
                read, self._at = self._text[self._at : end], end
                write(read)
            if mark:
                self._at += self._text[self._at :].index(mark) + len(mark)
                return mark
            if not (yield from self.more()):
                self._at = len(self._text)
                return ""


SPACE = re.compile(r"\s*")


def _first(text: str, marks: tuple[str, ...], start: int) -> tuple[int, str]:
    """Returns the position of the first mark and the longest mark that begins there; (-1, "") for none."""
    match = _any_of(marks).search(text, start)
    return (match.start(), match[0]) if match else (-1, "")


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _may_grow(text: str, marks: tuple[str, ...]) -> bool:
    return any(len(mark) > len(text) and mark.startswith(text) for mark in marks)


def _trimmed(text: str, start: int, end: int) -> int:
    """Returns `end` moved before the white space that precedes it, by MAX_NAME characters at most."""
    return max(start + len(text[start:end].rstrip()), end - MAX_NAME)


Write = Callable[[str], None]

MAX_DEPTH = 64
SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
HEX = re.compile(r"[0-9a-fA-F]")
ESCAPES = tuple(f"\\{letter}" for letter in '"\\/bfnrtu')


def is_scalar(text: str) -> bool:
    """Returns whether `text` is a JSON number or literal."""
    return text in ("true", "false", "null") or NUMBER.fullmatch(text) is not None


def is_object(text: str) -> bool:
    """Returns whether `text` is a JSON object."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def quoted(text: str) -> str:
    """Returns `text` as a JSON string."""
    return msgspec.json.encode(text).decode()


def copy_value(source: GrowingText, write: Write, depth: int = 0) -> Reading[None]:
    """Reads one JSON value and passes it to `write` as it comes. Raises MalformedOutput."""
    if depth > MAX_DEPTH:
        raise MalformedOutput
    match (yield from source.next()):
        case '"':
            yield from copy_string(source, write)
        case "{" | "[":
            yield from _copy_container(source, write, depth)
        case _:
            text = yield from source.run(SCALAR, MAX_NAME)
            if not is_scalar(text):
                raise MalformedOutput
            write(text)


def _copy_container(source: GrowingText, write: Write, depth: int) -> Reading[None]:
    begin = yield from source.accept("{", "[")
    end = "}" if begin == "{" else "]"
    write(begin)
    yield from _copy_space(source, write)
    if not (yield from source.begins(end)):
        while True:
            if begin == "{":
                yield from copy_string(source, write)
                yield from _copy_space(source, write)
                yield from _copy(source, write, ":")
                yield from _copy_space(source, write)
            yield from copy_value(source, write, depth + 1)
            yield from _copy_space(source, write)
            if not (yield from source.begins(",")):
                break
            yield from _copy(source, write, ",")
            yield from _copy_space(source, write)
    yield from _copy(source, write, end)


def _copy(source: GrowingText, write: Write, mark: str) -> Reading[None]:
    if not (yield from source.accept(mark)):
        raise MalformedOutput
    write(mark)


def _copy_space(source: GrowingText, write: Write) -> Reading[None]:
    write((yield from source.run(JSON_SPACE)))


JSON_SPACE = re.compile(r"[ \t\r\n]*")


def copy_string(source: GrowingText, write: Write) -> Reading[None]:
    """Reads one JSON string and passes it to `write` as it comes. Raises MalformedOutput."""
    yield from _copy(source, write, '"')
    while True:
        write(source.part(PLAIN))
        letter = yield from source.next()
        if letter and PLAIN.fullmatch(letter):
            continue
        found = yield from source.accept('"', *ESCAPES)
        write(found)
        if found == '"':
            return
        if not found:
            raise MalformedOutput
        if found == "\\u":
            for _ in range(4):
                write((yield from source.one(HEX)))


def string(source: GrowingText, limit: int = MAX_NAME) -> Reading[str]:
    """Reads one JSON string. Returns the decoded text. Raises MalformedOutput, also past `limit` characters."""
    parts: list[str] = []
    yield from copy_string(source, bounded(parts, limit))
    try:
        return str(msgspec.json.decode("".join(parts)))
    except (msgspec.MsgspecError, UnicodeError):
        raise MalformedOutput from None


def bounded(parts: list[str], limit: int = MAX_HELD) -> Write:
    """Returns a function that appends to `parts`, and raises MalformedOutput past `limit` characters in all."""
    size = 0

    def write(text: str) -> None:
        nonlocal size
        size += len(text)
        if size > limit:
            raise MalformedOutput
        parts.append(text)

    return write
