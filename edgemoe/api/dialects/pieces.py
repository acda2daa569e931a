"""What an output consists of, in order: text, reasoning and tool calls, each in pieces that follow each other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "reasoning", "call"]
Ended = Literal["", "complete", "broken"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Names one tool call. `index` counts the calls of the answer."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class OutputPiece:
    """A part of the output. A call's `text` is JSON text of its arguments, and `raw` what the model wrote for it."""

    kind: Kind
    text: str
    call: ToolCall | None = None
    raw: str = ""
    begins: bool = False  # the call's first piece
    ended: Ended = ""  # what became of the call, in its last piece

    def __bool__(self) -> bool:
        return bool(self.text or self.begins or self.ended)


class Pieces:
    """Collects pieces. Those that belong together are joined."""

    def __init__(self) -> None:
        self._pieces: list[OutputPiece] = []

    def __iter__(self) -> Iterator[OutputPiece]:
        return iter(self._pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: OutputPiece) -> None:
        """Appends what follows."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind == piece.kind and last.call is piece.call:
            last.text += piece.text
            last.raw += piece.raw
            last.ended = last.ended or piece.ended
        elif piece or piece.raw:
            self._pieces.append(OutputPiece(piece.kind, piece.text, piece.call, piece.raw, piece.begins, piece.ended))

    def extend(self, other: Pieces) -> None:
        """Appends all pieces of `other`."""
        for piece in other:
            self.add(piece)

    def of(self, kind: Kind) -> list[OutputPiece]:
        """Returns the pieces of one kind."""
        return [piece for piece in self._pieces if piece.kind == kind]

    def text(self, kind: Kind = "text") -> str:
        """Returns the text of all pieces of one kind."""
        return "".join(piece.text for piece in self._pieces if piece.kind == kind)

    def settle(self) -> None:
        """Turns calls that were not completed back into the text that the model wrote."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            kept = piece.kind != "call" or piece.ended == "complete"
            self.add(piece if kept else OutputPiece("text", piece.raw))
