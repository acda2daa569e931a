"""One output in each dialect, as its models write it, and the tools that it calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from edgemoe.api.dialects import dialect as table
from edgemoe.api.dialects.dialect import Dialect, OutputStart
from support.front_kit import byte_level_tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"type": "boolean"},
        "units": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "now": None}
CITY = 'Köln "Süd" \\ <b>\n🦊'
ARGUMENTS: dict[str, Any] = {"city": CITY, "days": 3, "wind": True, "at": {"x": 1.5}, "note": None}
JSON = '{"city": "Köln \\"Süd\\" \\\\ <b>\\n🦊", "days": 3, "wind": true, "at": {"x": 1.5}, "note": null}'
THOUGHT, ANSWER = "First <this>, { then that.", "I look."


@dataclass(frozen=True)
class Sample:
    """A model's text with THOUGHT, ANSWER, and calls of `weather` with ARGUMENTS and of `now` without any."""

    dialect: Dialect
    thought: str
    calls: str
    prompt_end: str = ""  # of a prompt that leaves it to the model whether to reason
    answer: str = ANSWER
    begun: OutputStart = "open"
    one_call: bool = False  # an output ends with its first call

    @property
    def output(self) -> str:
        return self.thought + self.answer + self.calls

    @property
    def only_calls(self) -> str:
        """The calls as they begin an answer."""
        return self.calls.removeprefix("<|end|><|start|>assistant").lstrip()

    def written(self, name: str, keys: str) -> str:
        """Writes a call with a number for each letter of `keys`, in a dialect that writes arguments as text."""
        match self.dialect.name:
            case "qwen-xml":
                return _xml(name, *((key, "1") for key in keys))
            case "glm":
                return _glm(name, *((key, "1") for key in keys))
            case "minimax":
                call = _minimax(name, *((key, "1") for key in keys))
                return f"<minimax:tool_call>\n{call}</minimax:tool_call>"
            case _:
                return f"<|tool_call>call:{name}{{{','.join(f'{key}:1' for key in keys)}}}<tool_call|>"

    def said(self, text: str) -> str:
        """Writes an answer that is only `text`."""
        return f"<|channel|>final<|message|>{text}" if self.dialect.call is None else text

    @property
    def names(self) -> list[str]:
        return ["weather"] if self.one_call else ["weather", "now"]


def _xml(name: str, *values: tuple[str, str]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _glm(name: str, *values: tuple[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _minimax(name: str, *values: tuple[str, str]) -> str:
    parameters = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values)
    return f'<invoke name="{name}">\n{parameters}</invoke>\n'


def _deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _fenced(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _kimi(name: str, number: int, arguments: str) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{arguments}<|tool_call_end|>"


def marks_of(dialect: Dialect) -> set[str]:
    """Returns all marks that may be tokens of the dialect's models."""
    own = {*dialect.think, *(dialect.wrapper or ()), *dialect.tool_call_marks, *dialect.others, *dialect.ends}
    return own | set(dialect.signs)


@cache
def tokenizer(dialect: Dialect) -> Tokenizer:
    """Makes the byte-level tokenizer of the other tests, with the special tokens of the dialect's models."""
    made = byte_level_tokenizer(marks=())
    marks = marks_of(dialect)
    special = sorted(mark for mark in marks if TOKEN.fullmatch(mark) and not mark.startswith(WRITTEN))
    made.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    return made


TOKEN = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")
WRITTEN = ("<parameter", "</parameter", "<function", "</function", "</invoke")  # that are no tokens in any of them


_TEXTS = (("city", CITY), ("days", "3"), ("wind", "true"), ("at", '{"x": 1.5}'), ("note", "null"))
_THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
_LIST = f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
_HERMES = (
    f'\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_GEMMA = f'at:{{x:1.5}},city:<|"|>{CITY}<|"|>,days:3,note:null,wind:true'

SAMPLES = {
    sample.dialect.name: sample
    for sample in (
        Sample(
            table.HERMES,
            _THINK,
            _HERMES,
        ),
        Sample(table.ERNIE, f"{_THINK}<response>\n", f"\n</response>\n{_HERMES}"),
        Sample(table.HUNYUAN, f"{_THINK}<answer>\n", f"\n<tool_calls>{_LIST}</tool_calls>\n</answer>"),
        Sample(table.GRANITE, _THINK, f"<|tool_call|>{_LIST}"),
        Sample(table.MISTRAL, _THINK, f"[TOOL_CALLS] {_LIST}"),
        Sample(
            table.HARMONY,
            f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
            f"<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}",
            "<|start|>assistant",
            f"<|channel|>commentary<|message|>{ANSWER}",
            one_call=True,
        ),
        Sample(table.QWEN_XML, _THINK, f"\n\n{_xml('weather', *_TEXTS)}\n{_xml('now')}"),
        Sample(table.GLM, f"\n<think>{THOUGHT}</think>\n", f"\n{_glm('weather', *_TEXTS)}\n{_glm('now')}"),
        Sample(
            table.MINIMAX,
            f"{THOUGHT}\n</think>\n\n",
            f"\n<minimax:tool_call>\n{_minimax('weather', *_TEXTS)}{_minimax('now')}</minimax:tool_call>",
            "]~b]ai\n<think>\n",
            begun="reasoning",
        ),
        Sample(
            table.GEMMA,
            f"<|channel>thought\n{THOUGHT}<channel|>",
            f"<|tool_call>call:weather{{{_GEMMA}}}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
            "<|turn>model\n",
        ),
        Sample(
            table.DEEPSEEK,
            f"{THOUGHT}</think>",
            f"<｜tool▁calls▁begin｜>{_deepseek('weather', JSON)}{_deepseek('now', '{}')}<｜tool▁calls▁end｜>",
            "<｜Assistant｜><think>",
            begun="reasoning",
        ),
        Sample(
            table.DEEPSEEK_R1,
            _THINK,
            f"<｜tool▁calls▁begin｜>{_fenced('weather', JSON)}\n{_fenced('now', '{}')}<｜tool▁calls▁end｜>",
        ),
        Sample(
            table.KIMI,
            f"<think>{THOUGHT}</think>",
            f"<|tool_calls_section_begin|>{_kimi('weather', 0, JSON)}{_kimi('now', 1, '{}')}<|tool_calls_section_end|>",
        ),
    )
}
