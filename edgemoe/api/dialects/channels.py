"""Reads outputs that are messages with headers, each for one channel and perhaps one recipient [Harmony].

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>

A message to a function that was not offered, or whose content is no JSON object, is shown as text. The answer's
end is a call's, too, because engines keep the token that ended it to themselves.
"""

from __future__ import annotations

import re
from functools import partial

from edgemoe.api.dialects.growing_text import MAX_NAME, GrowingText, Malformed, Reading
from edgemoe.api.dialects.json_text import copy_value
from edgemoe.api.dialects.open_call import OpenCall
from edgemoe.api.dialects.output_reader import OutputReader
from edgemoe.api.dialects.pieces import Kind

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
HEADER = re.compile(
    r"(?:<\|start\|>\s*assistant)?\s*(?:to=(?P<to>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>\w+)\s*)?"
    r"(?:to=(?P<for>[^\s<]+)\s*)?(?:(?:<\|constrain\|>)?\s*\w+\s*)?"
)
BETWEEN_MESSAGES = "\n\n"


def read_channels(output: OutputReader) -> Reading[None]:
    """Reads one output to its end."""
    if output.marks.begun in ("reasoning", "text"):
        yield from _copy(output, "reasoning" if output.marks.begun == "reasoning" else "text")
    while (yield from output.source.next()):
        yield from _message(output, *(yield from _header(output)))


def _header(output: OutputReader) -> Reading[tuple[str, str]]:
    """Reads a header. Returns the channel and the recipient; "" for what is not there, as where there is no header."""
    source = output.source
    try:
        yield from source.space()
        if not (yield from source.begins(START, CHANNEL, CONSTRAIN, "to=")):
            raise Malformed
        header = HEADER.fullmatch((yield from source.until(MESSAGE, 2 * MAX_NAME)))
        if header is None:
            raise Malformed
    except Malformed:
        yield from source.accept(START)
        output.begin("text", BETWEEN_MESSAGES)
        output.show_read()
        return "", ""
    return header["channel"] or "", header["to"] or header["for"] or ""


def _message(output: OutputReader, channel: str, recipient: str) -> Reading[None]:
    """Reads the content of a message, and the mark that ends it."""
    kind: Kind = "reasoning" if channel == "analysis" and not recipient else "text"
    output.begin(kind, BETWEEN_MESSAGES)
    if recipient and output.takes_calls:
        if (yield from output.call(partial(_call, recipient.removeprefix("functions.")))):
            return
    elif recipient:
        output.show_read()
    else:
        output.skip_read()
    yield from _copy(output, kind)


def _copy(output: OutputReader, kind: Kind) -> Reading[None]:
    """Passes on content up to the mark that ends it, or the next message."""
    output.kind = kind
    while mark := (yield from output.copy(tuple(dict.fromkeys((*ENDS, START, *output.special))))):
        if mark in ENDS:
            output.skip_read()
            return
        if mark == START:
            output.source.unread(len(mark))
            return
        output.show_read()
    if output.kind == "reasoning":
        output.show(output.source.take().rstrip())
    output.show_read()


def _call(name: str, source: GrowingText, call: OpenCall) -> Reading[None]:
    call.begin(name)
    yield from source.space()
    if (yield from source.next()) != "{":
        raise Malformed
    yield from copy_value(source, call.write)
    yield from source.space()
    if not (yield from source.accept(*ENDS)) and (yield from source.next()):
        raise Malformed
