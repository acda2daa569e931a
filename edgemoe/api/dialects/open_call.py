"""One tool call while it is read: nothing of it is said before its function is known to have been offered."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgemoe.api.dialects.growing_text import GrowingText, Malformed
from edgemoe.api.dialects.pieces import Ended, OutputPiece, ToolCall
from edgemoe.types.arrays import Json

Functions = Mapping[str, Json | None]  # the parameters' schema of each function that may be called


class OpenCall:
    """Collects the arguments of one call."""

    def __init__(
        self, source: GrowingText, emit: Callable[[OutputPiece], None], functions: Functions | None, index: int
    ) -> None:
        self._source = source
        self._emit = emit
        self._functions = functions
        self._index = index
        self._call: ToolCall | None = None
        self._new = False
        self._unsaid: list[tuple[str, int]] = []  # texts, and how much of the source was read at each

    @property
    def begun(self) -> bool:
        """Returns whether the function is known."""
        return self._call is not None

    @property
    def said(self) -> bool:
        """Returns whether a piece of the call was passed on."""
        return self.begun and not self._new

    @property
    def parameters(self) -> Json:
        """Returns the schema of the function's parameters; {} where there is none."""
        return (self._functions or {}).get(self._call.name if self._call else "") or {}

    def begin(self, name: str, id: str = "") -> None:
        """Names the function, once. Raises Malformed where it was not offered."""
        if self.begun or not name or (self._functions is not None and name not in self._functions):
            raise Malformed
        self._call = ToolCall(self._index, name, id) if id else ToolCall(self._index, name)
        self._new = True

    def write(self, text: str) -> None:
        """Appends JSON text to the arguments: what was read of the source so far."""
        self._unsaid.append((text, self._source.read))

    def say(self) -> None:
        """Passes on the arguments that are known, but not what may end them: those of a broken call are never whole."""
        held = self._unsaid[-1:] if self._unsaid and self._unsaid[-1][0].endswith("}") else []
        said = self._unsaid[: len(self._unsaid) - len(held)]
        if self._call is not None and said:
            self._add(said, said[-1][1], "")
            self._unsaid = [(text, read - said[-1][1]) for text, read in held]

    def complete(self) -> None:
        """Ends the call, which has been read to its end."""
        assert self._call is not None
        self._add(self._unsaid, self._source.read, "complete")

    def give_up(self) -> str:
        """Ends a call that cannot be read on. Returns the text that was read of it and is not in any piece."""
        if self.said:
            self._emit(OutputPiece("call", "", self._call, ended="broken"))
        return self._source.take()

    def _add(self, said: list[tuple[str, int]], read: int, ended: Ended) -> None:
        arguments = "".join(text for text, _ in said)
        self._emit(OutputPiece("call", arguments, self._call, self._source.take(read), begins=self._new, ended=ended))
        self._new = False
