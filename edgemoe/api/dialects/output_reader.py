"""What parsers of all dialects share: how text, reasoning and calls are passed on."""

from __future__ import annotations

from collections.abc import Callable

from edgemoe.api.dialects.dialect import Marks
from edgemoe.api.dialects.growing_text import GrowingText, Malformed, Reading
from edgemoe.api.dialects.open_call import OpenCall
from edgemoe.api.dialects.pieces import Kind, OutputPiece, Pieces


class OutputReader:
    """Passes on what a parser has recognised. `special` are the marks that are never shown."""

    def __init__(self, marks: Marks, special: tuple[str, ...]) -> None:
        self.source = GrowingText()
        self.marks = marks
        self.special = special
        self.kind: Kind = "text"  # what is being read
        self._taken = 0  # calls
        self._begun = 0  # calls, broken ones among them
        self._out = Pieces()
        self._fresh = marks.trims and marks.begun != "text"  # white space that comes next is layout
        self._between = ""
        self._shown: set[Kind] = set()
        self._call: OpenCall | None = None

    @property
    def done(self) -> bool:
        """Returns whether all tool calls that may be taken have come, so that the rest is ignored."""
        return 0 < self._taken == self.marks.calls

    @property
    def takes_calls(self) -> bool:
        """Returns whether another tool call may be taken."""
        return self._taken < self.marks.calls

    def collected(self) -> Pieces:
        """Returns what was recognised since the last call."""
        if self._call is not None:
            self._call.say()
        collected, self._out = self._out, Pieces()
        return collected

    def begin(self, kind: Kind, between: str = "") -> None:
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
        """Returns what is shown of text that comes next."""
        text = self._without_special(text)
        text = text.lstrip() if self._fresh else text
        return self._between + text if text else ""

    def _without_special(self, text: str) -> str:
        for name in self.special:
            text = text.replace(name, "")
        return text

    def _add_call(self, piece: OutputPiece) -> None:
        piece.raw = self._laid_out(piece.raw) if piece.begins else self._without_special(piece.raw)
        self._out.add(piece)

    def show_read(self) -> None:
        """Passes on all that was read and not passed on."""
        self.show(self.source.take())

    def skip_read(self) -> None:
        """Omits all that was read and not passed on."""
        self.source.take()

    def copy(self, marks: tuple[str, ...]) -> Reading[str]:
        """Passes on what comes before the first of `marks`, and reads that. Returns it; "" at the end."""

        def pass_on(_: str) -> None:
            self.show_read()

        return (yield from self.source.copy(marks, pass_on, self.marks.trims))

    def call(self, read: Callable[[GrowingText, OpenCall], Reading[None]]) -> Reading[bool]:
        """Reads one call by `read`. Returns False, having shown what was read, where it is none."""
        self._call = call = OpenCall(self.source, self._add_call, self.marks.functions, self._begun)
        try:
            yield from read(self.source, call)
            call.complete()
        except Malformed:
            if call.said:  # it is text, which goes on
                self._fresh, self._between = False, ""
                self._shown.add("text")
            self.show(call.give_up())
            return False
        finally:
            self._call = None
            self._begun += call.said
        self._taken += 1
        return True
