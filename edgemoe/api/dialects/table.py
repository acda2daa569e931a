"""The table of dialects, and how a model's own is chosen from its chat template and its tokens.

Sources: [Hermes], [Harmony], [Qwen-XML], [GLM-4], [MiniMax-M2], [Gemma-4], [DeepSeek], [Kimi-K2].
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from edgemoe.api.dialects import channels
from edgemoe.api.dialects.call_forms import BracedCall, NamedCall, ObjectCall, ParameterCall
from edgemoe.api.dialects.dialect import Begun, CallSection, Dialect, HistoryForm
from edgemoe.api.dialects.response_template import dialect_from
from edgemoe.types.arrays import Json

HERMES = Dialect(
    name="hermes",
    signs=("<tool_call>",),
    call=ObjectCall("<tool_call>", "</tool_call>"),
)
HARMONY = Dialect(
    name="harmony",
    signs=("<|channel|>", "<|message|>"),
    call=None,
    think=("<|channel|>analysis<|message|>", channels.END),
    ends=(channels.RETURN, channels.CALL),
    others=channels.MARKS,
    history=HistoryForm(
        describes_tools=True,
        reasoning="thinking",
        one_call_a_message=True,
        efforts=(("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")),
    ),
)
QWEN_XML = Dialect(
    name="qwen-xml",
    signs=("<tool_call>", "<function="),
    call=ParameterCall(
        begin="<tool_call>",
        before_name="<function=",
        after_name=">",
        before_key="<parameter=",
        after_key=(">",),
        after_value="</parameter>",
        end=("</function>", "</tool_call>"),
        layout=True,
    ),
    lone_begin="<function=",
)
GLM = Dialect(
    name="glm",
    signs=("<tool_call>", "<arg_key>"),
    call=ParameterCall(
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
    call=ParameterCall(
        begin='<invoke name="',
        before_name="",
        after_name='">',
        before_key='<parameter name="',
        after_key=('">',),
        after_value="</parameter>",
        end=("</invoke>",),
        layout=True,
    ),
    section=CallSection("<minimax:tool_call>", "</minimax:tool_call>"),
)
GEMMA = Dialect(
    name="gemma",
    signs=("<|tool_call>", "<|channel>"),
    call=BracedCall("<|tool_call>", before_name="call:", quote='<|"|>', end="<tool_call|>"),
    think=("<|channel>thought\n", "<channel|>"),
    thinks_anywhere=True,
    ends=("<turn|>", "<|tool_response>"),
    others=("<|channel>",),
    history=HistoryForm(results_in_call=True),
)
_DEEPSEEK = CallSection("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = Dialect(
    name="deepseek",
    signs=("<｜tool▁calls▁begin｜>",),
    call=NamedCall("<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
    section=_DEEPSEEK,
    calls_while_thinking=True,
    history=HistoryForm(arguments_as_text=True),
)
DEEPSEEK_R1 = Dialect(
    name="deepseek-r1",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    call=NamedCall(
        "<｜tool▁call▁begin｜>",
        before_name="function<｜tool▁sep｜>",
        after_name="\n```json",
        fence="```",
        end="<｜tool▁call▁end｜>",
    ),
    section=_DEEPSEEK,
    others=("<｜tool▁sep｜>",),
    calls_while_thinking=True,
    history=HistoryForm(arguments_as_text=True),
)
KIMI = Dialect(
    name="kimi",
    signs=("<|tool_calls_section_begin|>",),
    call=NamedCall(
        "<|tool_call_begin|>",
        after_name="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        names_are_ids=True,
    ),
    section=CallSection("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    calls_while_thinking=True,
)

DIALECTS = (HARMONY, GEMMA, MINIMAX, KIMI, DEEPSEEK_R1, DEEPSEEK, GLM, QWEN_XML, HERMES)  # the first that fits counts
TAIL = 64  # characters at a prompt's end that show whether it has opened reasoning


def dialect_of(template: str, tokens: Container[str], response: Json | None = None) -> Dialect:
    """Returns the dialect of a chat template, else of a response template, else of added tokens, else Hermes."""
    known: tuple[Container[str], ...] = (template, msgspec.json.encode(response).decode().replace("\\", ""), tokens)
    spoken = (dialect for place in known for dialect in DIALECTS if all(sign in place for sign in dialect.signs))
    dialect = next(spoken, HERMES)
    return dialect_from(response, HERMES) if response is not None and dialect is HERMES else dialect


def begun_by(prompt: str, dialect: Dialect, template: str, continued: bool) -> Begun:
    """Returns what the end of `prompt`, which a chat template has made, has begun and the output goes on with.

    With `continued` the prompt ends within a message.
    """
    begin, end = (mark.rstrip() for mark in dialect.think)
    if dialect.call is None:
        last = prompt[prompt.rfind(channels.START) :]
        if channels.MESSAGE not in last or channels.END in last:
            return "open"
        return "reasoning" if begin in last else "text"
    tail = prompt[-TAIL:].rstrip()
    if begin in template and tail.endswith(begin):
        return "reasoning"
    if continued:
        return "text"
    return "answer" if begin not in template or tail.endswith(end) else "open"
