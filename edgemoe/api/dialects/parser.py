"""Splits one output into text, reasoning and tool calls while it streams.

What may still become a mark is held back. A call is passed on as it comes, once its function is known to have been
offered. A call that turns out to be none is shown as text from where it was not passed on.
"""

from __future__ import annotations

from collections.abc import Container

from edgemoe.api.dialects.channels import read_channels
from edgemoe.api.dialects.dialect import Marks
from edgemoe.api.dialects.output_reader import OutputReader
from edgemoe.api.dialects.pieces import Pieces
from edgemoe.api.dialects.tagged import read_tagged


class Parser:
    """Parses one output."""

    def __init__(self, marks: Marks, special: Container[str] = ()) -> None:
        """Starts a parser. `special` are names of special tokens, which answers do not show."""
        self._output = OutputReader(marks, tuple(name for name in marks.names if name in special))
        read = read_channels if marks.dialect.call is None else read_tagged
        self._reading = read(self._output)
        next(self._reading, None)

    @property
    def reasoning(self) -> bool:
        """Returns whether the text so far ends within reasoning."""
        return self._output.kind == "reasoning"

    @property
    def done(self) -> bool:
        """Returns whether all tool calls that may be taken have come, so that the rest is ignored."""
        return self._output.done

    def feed(self, text: str) -> Pieces:
        """Adds text. Returns what can be classified now and was not returned before."""
        if text:
            self._output.source.push(text)
            next(self._reading, None)
        return self._output.collected()

    def flush(self) -> Pieces:
        """Returns the rest at the end of the output."""
        self._output.source.end()
        next(self._reading, None)
        return self._output.collected()
