"""Reads outputs in which tags set reasoning and tool calls apart from the answer.

White space around reasoning and calls is layout. Text that only looks like a call is shown as text.
"""

from __future__ import annotations

from edgemoe.api.dialects.growing_text import Malformed, Reading
from edgemoe.api.dialects.output_reader import OutputReader


def read_tagged(output: OutputReader) -> Reading[None]:
    """Reads one output to its end."""
    marks, (begin_think, end_think) = output.marks, output.marks.dialect.think
    if marks.begun == "reasoning":
        output.kind = "reasoning"
    elif marks.begun == "open" and (yield from _thinks_first(output)):
        output.begin("reasoning")
    while mark := (yield from output.copy(_next_marks(output))):
        if mark in _call_begins(output):
            output.source.unread(len(mark) if mark == marks.dialect.lone_begin else 0)
            if (yield from _calls(output)):
                output.begin("text")
        elif mark == begin_think and output.kind == "text" and marks.dialect.thinks_anywhere and marks.think:
            output.skip_read()
            output.begin("reasoning")
        elif mark == end_think and output.kind == "reasoning":
            output.skip_read()
            output.begin("text")
        else:
            output.show_read()  # a special token out of place
    if output.kind == "reasoning":
        output.show(output.source.take().rstrip())
    output.show_read()


def _thinks_first(output: OutputReader) -> Reading[bool]:
    """Reads the mark that begins reasoning where it comes first. Otherwise nothing but layout is read."""
    source, (begin_think, _) = output.source, output.marks.dialect.think
    try:
        yield from source.space()
        found = yield from source.accept(begin_think)
    except Malformed:  # too much white space
        found = ""
    if found:
        output.skip_read()
    else:
        output.show_read()
    return bool(found)


def _call_begins(output: OutputReader) -> tuple[str, ...]:
    dialect = output.marks.dialect
    if dialect.call is None or not output.takes_calls:
        return ()
    if output.kind == "reasoning" and not dialect.calls_while_thinking:
        return ()
    return dialect.section.begin if dialect.section else dialect.call.begin, dialect.lone_begin


def _next_marks(output: OutputReader) -> tuple[str, ...]:
    marks, (begin_think, end_think) = output.marks, output.marks.dialect.think
    if output.kind == "reasoning":
        think = end_think
    else:
        think = begin_think if marks.think and marks.dialect.thinks_anywhere else ""
    return tuple(dict.fromkeys(filter(None, (think, *_call_begins(output), *output.special))))


def _calls(output: OutputReader) -> Reading[bool]:
    """Reads a call, or all of a section. Returns whether there was any; what is none is shown."""
    dialect, source, any_call = output.marks.dialect, output.source, False
    assert dialect.call is not None
    if dialect.section is None:
        return (yield from output.call(dialect.call.read))
    while output.takes_calls:
        try:
            yield from source.space()
            found = yield from source.accept(dialect.call.begin, dialect.section.end)
        except Malformed:  # too much white space
            found = ""
        if found == dialect.section.end and any_call:
            output.skip_read()
            break
        if found != dialect.call.begin:
            output.show_read()
            break
        if not (yield from output.call(dialect.call.read)):
            break
        any_call = True
    return any_call
