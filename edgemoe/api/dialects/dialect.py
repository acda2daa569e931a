"""Describes the dialects in which model families write reasoning and tool calls, and chooses a model's dialect.

Sources: [Hermes], [Harmony], [Qwen-XML], [GLM-4], [MiniMax-M2], [Gemma-4], [DeepSeek], [Kimi-K2], [Hunyuan-A13B],
[ERNIE], [Granite-3], [Mistral-Calls], [Response-Template].
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from edgemoe.api.dialects.tool_calls import (
    BracedForm,
    NamedForm,
    ObjectForm,
    OfferedFunctions,
    ParameterForm,
    ToolCallForm,
)
from edgemoe.types.json_object import Json


@dataclass(frozen=True, slots=True)
class ToolCallSection:
    """Marks around all calls of one answer."""

    begin: str
    end: str = ""  # "": none
    other_begin: str = ""  # another mark that may begin it
    is_list: bool = False  # the calls are a JSON list


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """How a dialect's chat templates want the messages of a conversation."""

    reasoning: str = "reasoning_content"  # the field of an assistant message that has its reasoning
    one_tool_call_a_message: bool = False
    results_in_tool_call: bool = False  # results of tools as `tool_responses` of the message that called them
    tool_calls_in_text: str = (
        ""  # mark before a JSON list of calls, in the text of messages to templates without tool_calls
    )
    result_role: str = ""  # of results of tools, in templates that name it
    id_chars: int = 0  # letters and digits that a call's id must have; 0: any
    efforts: tuple[tuple[str, str], ...] = ()  # OpenAI's reasoning efforts that the model does not know, and its own


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family of models writes reasoning and tool calls."""

    name: str
    signs: tuple[str, ...]  # a chat template, or a tokenizer, that contains them all is of this dialect
    call: ToolCallForm | None  # None: the output is messages with headers, which name a channel and a recipient
    other_signs: tuple[str, ...] = ()  # in place of `signs`, for templates without tools
    takes_tool_calls: bool = True  # False: the form of calls is unknown, and requests with tools are refused
    think: tuple[str, str] = ("<think>", "</think>")
    section: ToolCallSection | None = None
    wrapper: tuple[str, str] | None = None  # marks around an answer
    thinks_anywhere: bool = False  # not only at the start
    ends: tuple[str, ...] = ()  # tokens that end an answer, beside the end tokens in the model's files
    others: tuple[str, ...] = ()  # further special tokens that the parser must see
    history: HistoryForm = field(default=HistoryForm())

    @property
    def around_tool_calls(self) -> tuple[str, ...]:
        """Returns the marks that only a call can have, at its beginning and end."""
        if self.call is None:
            return self.others
        around = (self.section.begin, self.section.end) if self.section else (self.call.marks[0], self.call.marks[-1])
        return tuple(filter(None, around))

    @property
    def tool_call_begins(self) -> tuple[str, ...]:
        """Returns the marks that begin calls, `lone_begins` among them."""
        if self.call is None:
            return ()
        first = (self.section.begin, self.section.other_begin) if self.section else (self.call.begin,)
        return tuple(filter(None, (*first, *self.lone_begins)))

    @property
    def lone_begins(self) -> tuple[str, ...]:
        """Returns marks within calls that begin them where a model omits the mark before."""
        if self.section is not None and not self.section.is_list and self.call is not None:
            return (self.call.begin,)
        inner = self.call.before_name if isinstance(self.call, ParameterForm) else ""
        return (inner,) if inner else ()

    @property
    def tool_call_marks(self) -> tuple[str, ...]:
        """Returns the marks of calls."""
        return (
            tuple(filter(None, (*self.call.marks, *self.around_tool_calls, *self.tool_call_begins)))
            if self.call
            else ()
        )


# The part that the prompt has begun: none, so that reasoning may come first; reasoning; the answer; text of it.
OutputStart = Literal["open", "reasoning", "answer", "text"]


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """Selects the marks to recognise in one output. With all off, the whole output is the answer."""

    dialect: Dialect
    begun: OutputStart = "answer"
    calls: int = 0  # most tool calls to accept
    functions: OfferedFunctions | None = None  # functions that a call may name; None: any

    @property
    def think(self) -> bool:
        """Returns whether reasoning may come."""
        return self.begun in ("open", "reasoning") or self.dialect.thinks_anywhere

    @property
    def trims(self) -> bool:
        """Returns whether white space around reasoning and calls is layout."""
        return self.think or self.calls > 0 or self.dialect.call is None or self.dialect.wrapper is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the marks to recognise, and to omit from text where they are special tokens."""
        think = (*(self.dialect.think if self.think else ()), *(self.dialect.wrapper or ()))
        calls = self.dialect.tool_call_marks if self.calls else ()
        return tuple(dict.fromkeys(filter(None, (*think, *calls, *(self.dialect.others if self.trims else ())))))


class ChannelMarks:
    """The special tokens of outputs that are messages with headers [Harmony]."""

    START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
    END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
    ENDS = (END, CALL, RETURN)
    ALL = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)


HERMES = Dialect(
    name="hermes",
    signs=("<tool_call>", "</tool_call>"),
    call=ObjectForm("<tool_call>", "</tool_call>"),
)
PLAIN = replace(HERMES, name="plain", signs=(), takes_tool_calls=False)
ERNIE = replace(HERMES, name="ernie", signs=(*HERMES.signs, "<response>"), wrapper=("<response>", "</response>"))
HUNYUAN = Dialect(
    name="hunyuan",
    signs=("<tool_calls>",),
    other_signs=("<|startoftext|>", "<|extra_0|>"),
    call=ObjectForm(),
    section=ToolCallSection("<tool_calls>", "</tool_calls>", is_list=True),
    wrapper=("<answer>", "</answer>"),
)
GRANITE = Dialect(
    name="granite",
    signs=("<|start_of_role|>",),
    call=ObjectForm(),
    section=ToolCallSection("<|tool_call|>", other_begin="<tool_call>", is_list=True),
    wrapper=("<response>", "</response>"),
    history=HistoryForm(tool_calls_in_text="<|tool_call|>", result_role="tool_response"),
)
MISTRAL = Dialect(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    call=ObjectForm(),
    section=ToolCallSection("[TOOL_CALLS]", is_list=True),
    history=HistoryForm(id_chars=9),
)
HARMONY = Dialect(
    name="harmony",
    signs=("<|channel|>", "<|message|>"),
    call=None,
    think=("<|channel|>analysis<|message|>", ChannelMarks.END),
    ends=(ChannelMarks.RETURN, ChannelMarks.CALL),
    others=ChannelMarks.ALL,
    history=HistoryForm(
        reasoning="thinking",
        one_tool_call_a_message=True,
        efforts=(("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")),
    ),
)
QWEN_XML = Dialect(
    name="qwen-xml",
    signs=("<tool_call>", "<function="),
    call=ParameterForm(
        begin="<tool_call>",
        before_name="<function=",
        after_name=">",
        before_key="<parameter=",
        after_key=(">",),
        after_value="</parameter>",
        end=("</function>", "</tool_call>"),
        layout=True,
    ),
)
GLM = Dialect(
    name="glm",
    signs=("<tool_call>", "<arg_key>"),
    call=ParameterForm(
        begin="<tool_call>",
        before_name="",
        after_name="",
        before_key="<arg_key>",
        after_key=("</arg_key>", "<arg_value>"),
        after_value="</arg_value>",
        end=("</tool_call>",),
    ),
    ends=("<|user|>", "<|observation|>"),
)
MINIMAX = Dialect(
    name="minimax",
    signs=("<minimax:tool_call>",),
    call=ParameterForm(
        begin='<invoke name="',
        before_name="",
        after_name='">',
        before_key='<parameter name="',
        after_key=('">',),
        after_value="</parameter>",
        end=("</invoke>",),
    ),
    section=ToolCallSection("<minimax:tool_call>", "</minimax:tool_call>"),
)
GEMMA = Dialect(
    name="gemma",
    signs=("<|tool_call>", "<|channel>"),
    call=BracedForm("<|tool_call>", before_name="call:", quote='<|"|>', end="<tool_call|>"),
    think=("<|channel>thought", "<channel|>"),
    thinks_anywhere=True,
    ends=("<turn|>", "<|tool_response>"),
    others=("<|channel>",),
    history=HistoryForm(results_in_tool_call=True),
)
_DEEPSEEK = ToolCallSection("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = Dialect(
    name="deepseek",
    signs=("<｜tool▁calls▁begin｜>",),
    call=NamedForm("<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
    section=_DEEPSEEK,
)
DEEPSEEK_R1 = Dialect(
    name="deepseek-r1",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    call=NamedForm(
        "<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        after_name="\n```json",
        fence="```",
        end="<｜tool▁call▁end｜>",
    ),
    section=_DEEPSEEK,
    others=("<｜tool▁sep｜>",),
)
KIMI = Dialect(
    name="kimi",
    signs=("<|tool_calls_section_begin|>",),
    call=NamedForm(
        "<|tool_call_begin|>",
        after_name="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        names_are_ids=True,
    ),
    section=ToolCallSection("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)

# The first that fits counts.
DIALECTS = (
    HARMONY,
    GEMMA,
    MINIMAX,
    KIMI,
    DEEPSEEK_R1,
    DEEPSEEK,
    GLM,
    QWEN_XML,
    HUNYUAN,
    MISTRAL,
    ERNIE,
    HERMES,
    GRANITE,
)
TAIL = 64  # characters at a prompt's end that show whether it has opened reasoning


def dialect_of(template: str, tokens: Container[str], response: Json | None = None) -> Dialect:
    """Returns the dialect of a chat template, else of a response template, else of added tokens, else PLAIN."""
    known: tuple[Container[str], ...] = (template, msgspec.json.encode(response).decode().replace("\\", ""), tokens)
    spoken = (
        dialect
        for place in known
        for dialect in DIALECTS
        if any(signs and all(sign in place for sign in signs) for signs in (dialect.signs, dialect.other_signs))
    )
    dialect = next(spoken, PLAIN)
    return dialect_from(response, dialect) if response is not None and dialect in (HERMES, PLAIN) else dialect


def can_reason(dialect: Dialect, template: str, tokens: Container[str] = ()) -> bool:
    """Returns whether a model may reason: its chat template, or its `tokens`, have a mark of it."""
    begin, end = (mark.rstrip() for mark in dialect.think)
    return dialect.call is None or begin in template or end in template or begin in tokens


def begun_by(prompt: str, dialect: Dialect, template: str, continued: bool, tokens: Container[str] = ()) -> OutputStart:
    """Returns the part of an output that the end of `prompt`, made by a chat template, has begun.

    With `continued` the prompt ends within a message.
    """
    begin, end = (mark.rstrip() for mark in dialect.think)
    if dialect.call is None:
        last = prompt[prompt.rfind(ChannelMarks.START) :]
        if ChannelMarks.MESSAGE not in last or ChannelMarks.END in last:
            return "open"
        return "reasoning" if begin in last else "text"
    tail = prompt[-TAIL:].rstrip()
    may_reason = can_reason(dialect, template, tokens)
    if may_reason and tail.endswith(begin):
        return "reasoning"
    if continued:
        return "text"
    return "answer" if not may_reason or tail.endswith(end) else "open"


MAX_MARK = 64  # characters
WHOLE = "{content}"
PART = re.compile(r"\{content\.(\w{1,64})\}")


class ResponseField(msgspec.Struct, frozen=True):
    """A field of a response template. Fields without a reader here are left out."""

    open: Any = None
    close: Any = None
    content: Any = "text"
    transform: Any = None


class ResponseTemplate(msgspec.Struct, frozen=True):
    """The fields of an answer."""

    fields: dict[str, ResponseField] = {}


def dialect_from(template: Json, otherwise: Dialect) -> Dialect:
    """Returns the dialect of a response template, with the marks of `otherwise` where it has none that can be read."""
    try:
        fields = msgspec.convert(template, ResponseTemplate).fields
    except msgspec.ValidationError:
        return otherwise
    think = _marks(fields.get("reasoning_content") or fields.get("thinking")) or otherwise.think
    called = fields.get("tool_calls")
    call = _call(called) if called is not None else None
    takes_tool_calls = call is not None or otherwise.takes_tool_calls
    return Dialect(
        "response-template", signs=(), call=call or otherwise.call, think=think, takes_tool_calls=takes_tool_calls
    )


def _marks(field: ResponseField | None) -> tuple[str, str] | None:
    texts = (field.open, field.close) if field is not None else ()
    if not texts or not all(isinstance(one, str) and 0 < len(one) <= MAX_MARK for one in texts):
        return None
    return str(texts[0]), str(texts[1])


def _call(field: ResponseField) -> ObjectForm | None:
    marks = _marks(field)
    if marks is None or field.content != "json":
        return None
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if function == WHOLE:
        return ObjectForm(*marks)
    if not isinstance(function, dict):
        return None
    keys = [PART.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
    if keys[0] is None or keys[1] is None:
        return None
    return ObjectForm(*marks, name=keys[0][1], arguments=(keys[1][1],))
