"""Splits an output into text, reasoning and tool calls while it streams.

Text that may still become a mark is held back. A tool call is passed on as it arrives, once its function is known to be
offered. The rest of a call that turns out malformed is shown as text.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Container
from functools import partial

from edgemoe.api.dialects.dialect import ChannelMarks, OutputMarks, ToolCallSection
from edgemoe.api.dialects.growing_text import MAX_NAME, GrowingText, MalformedOutput, Reading, copy_value
from edgemoe.api.dialects.tool_calls import OutputPiece, OutputPieces, PieceKind, ToolCallBuilder, ToolCallForm


def item_id(kind: str, answer: str, index: int) -> str:
    """Returns the id of a part of an answer, in OpenAI's form."""
    return f"{kind}_{hashlib.blake2b(f'{answer} {index}'.encode(), digest_size=12).hexdigest()}"


class OutputReader:
    """Collects the pieces that a parser has recognised. `special` are the marks that are never shown."""

    def __init__(self, marks: OutputMarks, special: tuple[str, ...]) -> None:
        self.source = GrowingText()
        self.marks = marks
        self.special = special
        self.kind: PieceKind = "text"  # the kind of text being read
        self._taken = 0  # calls
        self._begun = 0  # calls, including broken ones
        self._out = OutputPieces()
        self._fresh = marks.trims and marks.begun != "text"  # white space that comes next is layout
        self._between = ""
        self._shown: set[PieceKind] = set()
        self._call: ToolCallBuilder | None = None
        self.is_cut = False  # the output has ended at its greatest length
        self.answer = secrets.token_hex(12)  # from which the ids of calls are made

    @property
    def done(self) -> bool:
        """Returns whether all tool calls that may be taken have come, so that the rest is ignored."""
        return 0 < self._taken == self.marks.calls

    @property
    def is_new(self) -> bool:
        """Returns whether text is being read and none was shown."""
        return self.kind == "text" and "text" not in self._shown

    @property
    def takes_tool_calls(self) -> bool:
        """Returns whether another tool call may be taken."""
        return self._taken < self.marks.calls

    def collected(self) -> OutputPieces:
        """Returns the pieces recognised since the last call."""
        if self._call is not None:
            self._call.pass_on()
        collected, self._out = self._out, OutputPieces()
        return collected

    def begin(self, kind: PieceKind, between: str = "") -> None:
        """Begins text or reasoning, with `between` before it where there was some of the same kind."""
        self.kind = kind
        self._fresh = self.marks.trims
        self._between = between if kind in self._shown else ""

    def show(self, text: str) -> None:
        """Passes on text, or reasoning, without special marks."""
        if text := self._laid_out(text):
            self._out.add(OutputPiece(self.kind, text))
            self._fresh, self._between = False, ""
            self._shown.add(self.kind)

    def _laid_out(self, text: str) -> str:
        """Returns the part of the next text that clients see."""
        text = self._without_special(text)
        text = text.lstrip() if self._fresh else text
        return self._between + text if text else ""

    def _without_special(self, text: str) -> str:
        for name in self.special:
            text = text.replace(name, "")
        return text

    def _add_tool_call(self, piece: OutputPiece) -> None:
        piece.around = self.kind
        piece.raw = self._laid_out(piece.raw) if piece.begins else self._without_special(piece.raw)
        self._out.add(piece)

    def show_read(self) -> None:
        """Passes on all that was read and not passed on."""
        self.show(self.source.cut())

    def skip_read(self) -> None:
        """Omits all that was read and not passed on."""
        self.source.cut()

    def copy(self, marks: tuple[str, ...]) -> Reading[str]:
        """Passes on the text before the first of `marks`, and reads the mark. Returns it; "" at the end."""

        def pass_on(_: str) -> None:
            self.show_read()

        return (yield from self.source.copy(marks, pass_on, self.marks.trims))

    def call(self, read: Callable[[GrowingText, ToolCallBuilder], Reading[None]]) -> Reading[bool]:
        """Reads one call by `read`. Shows the text that was read and returns False if it is malformed."""
        id, functions = item_id("call", self.answer, self._begun), self.marks.functions
        self._call = call = ToolCallBuilder(self.source, self._add_tool_call, functions, self._begun, id)
        try:
            yield from read(self.source, call)
            call.complete()
        except MalformedOutput:
            if self.is_cut and call.is_named:
                call.cut_off()
                return False
            if call.is_passed_on:  # it is text or reasoning, which goes on
                self._fresh, self._between = False, ""
                self._shown.add(self.kind)
            self.show(call.give_up())
            return False
        finally:
            self._call = None
            self._begun += call.is_passed_on
        self._taken += 1
        return True


BETWEEN_MESSAGES = "\n\n"


def read_tagged(output: OutputReader) -> Reading[None]:
    """Reads one output to its end."""
    marks, (begin_think, end_think) = output.marks, output.marks.dialect.think
    begin_answer, end_answer = marks.dialect.wrapper or ("", "")
    if marks.begun == "reasoning":
        output.kind = "reasoning"
        yield from _thinks_first(output)  # again
    elif marks.begun == "open" and (yield from _thinks_first(output)):
        output.begin("reasoning")
    wrapped = False
    while mark := (yield from output.copy((*_next_marks(output), *((end_answer,) if wrapped else ())))):
        if mark in _tool_call_begins(output):
            output.source.unread(len(mark) if mark in marks.dialect.lone_begins else 0)
            if (yield from _calls(output)):
                output.begin("text")
        elif mark == begin_think and output.kind == "text" and marks.dialect.thinks_anywhere and marks.think:
            output.skip_read()
            output.begin("reasoning")
        elif mark == end_think and output.kind == "reasoning":
            output.skip_read()
            output.begin("text")
        elif mark == begin_answer and not wrapped and output.is_new:
            output.skip_read()
            output.begin("text")
            wrapped = True
        elif mark == end_answer and wrapped and (yield from _ends_answer(output)):
            output.skip_read()
            output.begin("text", BETWEEN_MESSAGES)
            wrapped = False
        else:
            output.show_read()  # a special token out of place
    if output.kind == "reasoning":
        output.show(output.source.cut().rstrip())
    output.show_read()


def _thinks_first(output: OutputReader) -> Reading[bool]:
    """Reads the mark that begins reasoning where it comes first. Otherwise nothing but layout is read."""
    source, (begin_think, _) = output.source, output.marks.dialect.think
    try:
        yield from source.space()
        found = yield from source.accept(begin_think)
    except MalformedOutput:  # too much white space
        found = ""
    if found:
        output.skip_read()
    else:
        output.show_read()
    return bool(found)


def _ends_answer(output: OutputReader) -> Reading[bool]:
    """Reads white space behind a mark that may end the answer. Returns whether only calls, or nothing, follow it."""
    try:
        yield from output.source.space()
    except MalformedOutput:  # too much white space
        return False
    if not (yield from output.source.next()):
        return True
    begins = _tool_call_begins(output)
    return bool(begins) and bool((yield from output.source.begins(*begins)))


def _tool_call_begins(output: OutputReader) -> tuple[str, ...]:
    return output.marks.dialect.tool_call_begins if output.takes_tool_calls else ()


def _next_marks(output: OutputReader) -> tuple[str, ...]:
    marks, (begin_think, end_think) = output.marks, output.marks.dialect.think
    if output.kind == "reasoning":
        think = end_think
    else:
        think = begin_think if marks.think and marks.dialect.thinks_anywhere else ""
    answer = marks.dialect.wrapper[0] if marks.dialect.wrapper and output.is_new else ""
    return tuple(dict.fromkeys(filter(None, (think, answer, *_tool_call_begins(output), *output.special))))


def _calls(output: OutputReader) -> Reading[bool]:
    """Reads a call, or all of a section. Returns whether there was a call; other text is shown."""
    dialect, source, any_tool_call = output.marks.dialect, output.source, False
    assert dialect.call is not None
    if dialect.section is None:
        return (yield from output.call(dialect.call.read))
    if dialect.section.is_list:
        return (yield from _listed_tool_calls(output, dialect.call, dialect.section))
    while output.takes_tool_calls:
        try:
            yield from source.space()
            found = yield from source.accept(dialect.call.begin, dialect.section.end)
        except MalformedOutput:  # too much white space
            found = ""
        if found == dialect.section.end and any_tool_call:
            output.skip_read()
            break
        if found != dialect.call.begin:
            if not any_tool_call:
                output.show_read()
            break
        if not (yield from output.call(dialect.call.read)):
            break
        any_tool_call = True
    return any_tool_call


def _listed_tool_calls(output: OutputReader, form: ToolCallForm, section: ToolCallSection) -> Reading[bool]:
    """Reads a JSON list of calls, and the mark that ends the section if there is one. Returns whether any was read."""
    source, between, any_tool_call = output.source, "[", False
    try:
        while output.takes_tool_calls:
            yield from source.space()
            if not (yield from source.accept(between)):
                break
            if not (yield from output.call(form.read)):
                return any_tool_call
            between, any_tool_call = ",", True
        if any_tool_call:
            yield from source.expect("]")
            output.skip_read()
            yield from source.expect(*filter(None, (section.end,)))
            output.skip_read()
    except MalformedOutput:  # some models omit the end
        pass
    if not any_tool_call:
        output.show_read()
    return any_tool_call


RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME = re.compile(r"\s*(\w*)")
END = re.compile("|".join(map(re.escape, ChannelMarks.ENDS)))


def read_channels(output: OutputReader) -> Reading[None]:
    """Reads one output to its end."""
    if output.marks.begun in ("reasoning", "text"):
        yield from _copy(output, "reasoning" if output.marks.begun == "reasoning" else "text")
    while (yield from output.source.next()):
        header = yield from _header(output)
        output.skip_read()
        if header is not None:
            yield from _message(output, *header)


def _header(output: OutputReader) -> Reading[tuple[str, str] | None]:
    """Reads a header. Returns its last channel and its recipient, "" for each that is missing.

    Returns None where it breaks off: behind a mark that ends a message, or at the end of the output.
    """
    source = output.source
    begin = ""
    try:
        yield from source.space()
        begin = yield from source.begins(ChannelMarks.START, ChannelMarks.CHANNEL, ChannelMarks.CONSTRAIN, "to=")
        if not begin:
            raise MalformedOutput
        header = yield from source.until(ChannelMarks.MESSAGE, 2 * MAX_NAME)
    except MalformedOutput:
        if begin.startswith("<") and source.ended:
            yield from source.copy(ChannelMarks.ENDS, lambda _: None)
            return None
        yield from source.accept(ChannelMarks.START)
        output.begin("text", BETWEEN_MESSAGES)
        output.show_read()
        return "", ""
    if end := END.search(header):
        source.unread(len(header) - end.end() + len(ChannelMarks.MESSAGE))
        return None
    first, *channels = header.partition(ChannelMarks.CONSTRAIN)[0].split(ChannelMarks.CHANNEL)
    last = channels[-1] if channels else ""
    recipient = RECIPIENT.search(last) or RECIPIENT.search(first)
    channel = NAME.match(last)
    return channel[1] if channel else "", recipient[1] if recipient else ""


def _message(output: OutputReader, channel: str, recipient: str) -> Reading[None]:
    """Reads the content of a message, and the mark that ends it."""
    kind: PieceKind = "reasoning" if channel == "analysis" and not recipient else "text"
    output.begin(kind, BETWEEN_MESSAGES)
    is_call = recipient and output.takes_tool_calls
    if is_call and (yield from output.call(partial(_call, recipient.removeprefix("functions.")))):
        return
    yield from _copy(output, kind)


def _copy(output: OutputReader, kind: PieceKind) -> Reading[None]:
    """Passes on content up to the mark that ends it, or the next message."""
    output.kind = kind
    marks = tuple(dict.fromkeys((*ChannelMarks.ENDS, ChannelMarks.START, *output.special)))
    while mark := (yield from output.copy(marks)):
        if mark in ChannelMarks.ENDS:
            output.skip_read()
            return
        if mark == ChannelMarks.START:
            output.source.unread(len(mark))
            return
        output.show_read()
    if output.kind == "reasoning":
        output.show(output.source.cut().rstrip())
    output.show_read()


def _call(name: str, source: GrowingText, call: ToolCallBuilder) -> Reading[None]:
    call.begin(name)
    yield from source.space()
    if (yield from source.next()) != "{":
        raise MalformedOutput
    yield from copy_value(source, call.write)
    yield from source.space()
    if not (yield from source.accept(*ChannelMarks.ENDS)) and (yield from source.next()):
        raise MalformedOutput


class OutputParser:
    """Parses one output."""

    def __init__(self, marks: OutputMarks, special: Container[str] = ()) -> None:
        """Starts a parser. `special` are names of special tokens, which answers do not show."""
        self._output = OutputReader(marks, tuple(name for name in marks.names if name in special))
        read = read_channels if marks.dialect.call is None else read_tagged
        self._reading = read(self._output)
        next(self._reading, None)

    def name(self, answer: str) -> None:
        """Makes the ids of calls from the name of the answer: the same ones for the same output."""
        self._output.answer = answer

    @property
    def reasoning(self) -> bool:
        """Returns whether the text so far ends within reasoning."""
        return self._output.kind == "reasoning"

    @property
    def done(self) -> bool:
        """Returns whether all tool calls that may be taken have come, so that the rest is ignored."""
        return self._output.done

    def feed(self, text: str) -> OutputPieces:
        """Adds text. Returns the pieces that can be classified now and were not returned before."""
        if text:
            self._output.source.push(text)
            next(self._reading, None)
        return self._output.collected()

    def flush(self, *, is_cut: bool = False) -> OutputPieces:
        """Returns the rest at the end of the output. A call that its greatest length has cut keeps its arguments."""
        self._output.is_cut = is_cut
        self._output.source.end()
        next(self._reading, None)
        return self._output.collected()
