"""Splits a model's text into reasoning, answer and tool calls while it streams.

The families' chat templates use the same tags: <think> ... </think> around reasoning, and <tool_call> around one JSON
object with `name` and `arguments` (Hermes, Qwen3). Text that may still become a tag is held back. A tool call that is
not valid JSON, that is never closed, or whose function was not offered, is returned as text. Tags that are special
tokens of the tokenizer are omitted from text.
"""

from __future__ import annotations

import secrets
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from edgemoe.api.text.stop_strings import held_back

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class ToolCall:
    """One tool call of the model; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class Pieces:
    """Text, reasoning and tool calls that were recognised in a part of the output."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Marks:
    """Selects which tags to recognise. With all off, the whole output is the answer."""

    think: bool = False
    thinking: bool = False  # the prompt has already opened <think>
    calls: int = 0  # most tool calls to take
    functions: frozenset[str] | None = None  # names that a call may have; None: any

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the tags to recognise."""
        return ((THINK, END_THINK) if self.think or self.thinking else ()) + ((CALL, END_CALL) if self.calls else ())


class Parser:
    """Splits one output as it streams. Its state is "text", "think" or "call"."""

    def __init__(self, marks: Marks, special: Container[str] = ()) -> None:
        """Starts a parser. `special` are names of special tokens, which answers do not show."""
        self._special = tuple(name for name in marks.names if name in special)
        self._functions = marks.functions
        self._state: Literal["text", "think", "call"] = "think" if marks.thinking else "text"
        self._may_think = marks.think and not marks.thinking
        self._trim = marks.think or marks.calls > 0  # white space around reasoning and calls is layout
        self._at_start = self._trim
        self._calls_left = marks.calls
        self._called = False
        self._rest = ""

    @property
    def reasoning(self) -> bool:
        """Returns whether the text so far ends within reasoning."""
        return self._state == "think"

    @property
    def done(self) -> bool:
        """Returns whether all tool calls that may be taken have come, so that the rest is ignored."""
        return self._called and not self._calls_left

    def feed(self, text: str) -> Pieces:
        """Adds text. Returns what can be classified now and was not returned before."""
        pieces = Pieces()
        self._rest += text
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> Pieces:
        """Returns the rest at the end of the output."""
        pieces, rest, self._rest = Pieces(), self._rest, ""
        if self._state == "think":
            pieces.reasoning = rest.rstrip()
        else:
            pieces.text = self._shown(f"{CALL}{rest}") if self._state == "call" else self._answer(rest)
        return pieces

    def _step(self, pieces: Pieces) -> bool:
        """Consumes text up to the next tag. Returns False when more text is needed."""
        if self._state == "call":
            return self._take_call(pieces)
        if self._may_think and not THINK.startswith(self._rest.lstrip()[: len(THINK)]):
            self._may_think = False  # reasoning comes first or not at all
        marks = (*self._marks(), *self._special)
        at, mark = min(((at, mark) for mark in marks if (at := self._rest.find(mark)) >= 0), default=(-1, ""))
        if not mark:
            self._emit(pieces, self._rest_after(len(self._rest) - self._uncertain(marks)))
            return False
        before = self._rest_after(at)
        self._rest = self._rest[len(mark) :]
        self._emit(pieces, before.rstrip() if self._trim else before)
        self._enter(mark)
        return True

    def _marks(self) -> tuple[str, ...]:
        if self._state == "think":
            return (END_THINK,)
        return ((THINK,) if self._may_think else ()) + ((CALL,) if self._calls_left else ())

    def _uncertain(self, marks: tuple[str, ...]) -> int:
        """Returns how many characters at the end may belong to a tag, with the white space before it."""
        keep = held_back(self._rest, marks)
        before = self._rest[: len(self._rest) - keep]
        return keep + len(before) - len(before.rstrip()) if marks and self._trim else keep

    def _rest_after(self, size: int) -> str:
        head, self._rest = self._rest[:size], self._rest[size:]
        return head

    def _enter(self, mark: str) -> None:
        if mark not in self._marks():
            return  # a special token out of place
        self._state = {THINK: "think", END_THINK: "text", CALL: "call"}[mark]  # type: ignore[assignment]
        self._may_think = False
        self._at_start = True

    def _emit(self, pieces: Pieces, text: str) -> None:
        if self._state == "think":
            pieces.reasoning += self._answer(text)
        else:
            pieces.text += self._answer(text)

    def _answer(self, text: str) -> str:
        text = text.lstrip() if self._at_start else text
        self._at_start = self._at_start and not text
        return text

    def _take_call(self, pieces: Pieces) -> bool:
        inside, mark, rest = self._rest.partition(END_CALL)
        if not mark:
            return False
        call = tool_call(inside)
        if call is None or (self._functions is not None and call.name not in self._functions):
            pieces.text += self._shown(f"{CALL}{inside}{END_CALL}")
        else:
            pieces.calls.append(call)
            self._called = True
            self._calls_left -= 1
        self._state, self._rest, self._at_start = "text", rest, True
        return True

    def _shown(self, text: str) -> str:
        for name in self._special:
            text = text.replace(name, "")
        return text


def tool_call(text: str) -> ToolCall | None:
    """Returns the call written in `text`; None if it is not one."""
    try:
        call = msgspec.json.decode(text, type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
