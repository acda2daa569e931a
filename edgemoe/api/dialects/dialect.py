"""The records that describe a dialect, and what one output may hold of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgemoe.api.dialects.call_forms import CallForm
from edgemoe.api.dialects.open_call import Functions


@dataclass(frozen=True, slots=True)
class CallSection:
    """Marks around all calls of one answer."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """How a dialect's chat templates want the messages of a conversation."""

    reasoning: str = "reasoning_content"  # the field of an assistant message that has its reasoning
    arguments_as_text: bool = False  # of tool calls; else as objects
    one_call_a_message: bool = False
    describes_tools: bool = False  # each tool has a description, "" where none is given
    results_in_call: bool = False  # results of tools as `tool_responses` of the message that called them
    efforts: tuple[tuple[str, str], ...] = ()  # OpenAI's reasoning efforts that the model does not know, and its own


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family of models writes reasoning and tool calls."""

    name: str
    signs: tuple[str, ...]  # it is spoken where a chat template, or a tokenizer, has all of these
    call: CallForm | None  # None: the output is messages with headers, which name a channel and a recipient
    think: tuple[str, str] = ("<think>", "</think>")
    section: CallSection | None = None
    lone_begin: str = ""  # a mark inside a call that begins one, too: some models leave out what is before it
    thinks_anywhere: bool = False  # not only at the start
    calls_while_thinking: bool = False  # a call ends reasoning that was not closed
    ends: tuple[str, ...] = ()  # tokens that end an answer, beside those that the model's files name
    others: tuple[str, ...] = ()  # special tokens that the parser must see, beside the marks
    history: HistoryForm = field(default=HistoryForm())

    @property
    def around_calls(self) -> tuple[str, ...]:
        """Returns the marks that only a call can have, at its beginning and end."""
        if self.call is None:
            return self.others
        return (self.section.begin, self.section.end) if self.section else (self.call.marks[0], self.call.marks[-1])

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Returns the marks of calls."""
        return (*self.call.marks, *self.around_calls) if self.call else ()


# What the prompt has begun: nothing, so that reasoning may come first; reasoning; the answer; or even text of it.
Begun = Literal["open", "reasoning", "answer", "text"]


@dataclass(frozen=True, slots=True)
class Marks:
    """Selects what to recognise in one output. With all off, the whole output is the answer."""

    dialect: Dialect
    begun: Begun = "answer"
    calls: int = 0  # most tool calls to take
    functions: Functions | None = None  # those that a call may name; None: any

    @property
    def think(self) -> bool:
        """Returns whether reasoning may come."""
        return self.begun in ("open", "reasoning") or self.dialect.thinks_anywhere

    @property
    def trims(self) -> bool:
        """Returns whether white space around reasoning and calls is layout."""
        return self.think or self.calls > 0 or self.dialect.call is None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the marks to recognise, and to omit from text where they are special tokens."""
        think = self.dialect.think if self.think else ()
        calls = self.dialect.call_marks if self.calls else ()
        return tuple(dict.fromkeys(filter(None, (*think, *calls, *(self.dialect.others if self.trims else ())))))
