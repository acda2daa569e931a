"""Copies a JSON value out of a growing text, piece by piece, while it is checked."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from edgemoe.api.dialects.growing_text import MAX_HELD, MAX_NAME, GrowingText, Malformed, Reading

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
    """Reads one JSON value and passes it to `write` as it comes. Raises Malformed."""
    if depth > MAX_DEPTH:
        raise Malformed
    match (yield from source.next()):
        case '"':
            yield from copy_string(source, write)
        case "{" | "[":
            yield from _copy_container(source, write, depth)
        case _:
            text = yield from source.run(SCALAR, MAX_NAME)
            if not is_scalar(text):
                raise Malformed
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
        raise Malformed
    write(mark)


def _copy_space(source: GrowingText, write: Write) -> Reading[None]:
    write((yield from source.run(SPACE)))


SPACE = re.compile(r"[ \t\r\n]*")


def copy_string(source: GrowingText, write: Write) -> Reading[None]:
    """Reads one JSON string and passes it to `write` as it comes. Raises Malformed."""
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
            raise Malformed
        if found == "\\u":
            for _ in range(4):
                write((yield from source.one(HEX)))


def string(source: GrowingText, limit: int = MAX_NAME) -> Reading[str]:
    """Reads one JSON string. Returns what it says. Raises Malformed, also past `limit` characters."""
    parts: list[str] = []
    yield from copy_string(source, bounded(parts, limit))
    try:
        return str(msgspec.json.decode("".join(parts)))
    except (msgspec.MsgspecError, UnicodeError):
        raise Malformed from None


def bounded(parts: list[str], limit: int = MAX_HELD) -> Write:
    """Returns a function that appends to `parts`, and raises Malformed past `limit` characters in all."""
    size = 0

    def write(text: str) -> None:
        nonlocal size
        size += len(text)
        if size > limit:
            raise Malformed
        parts.append(text)

    return write
