"""Renders chat templates in jinja2's sandbox, as transformers does (transformers/utils/chat_template_utils.py).

The template is in `chat_template.jinja`, else in `chat_template.json`, else in `chat_template` of
tokenizer_config.json, which is one template or a list of named ones ("tool_use" is used when there are tools).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.types.arrays import Json


class ChatTemplate:
    """Renders the chat templates of one model."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Takes `sources` by name, "default" among them; `tokens` are bos_token, eos_token and others."""
        self._sources, self._tokens = dict(sources), dict(tokens)
        self.text = "".join(sources.values())
        self.source = sources["default"]
        self.takes_tools = "tools" in self.text

    @classmethod
    def load(cls, directory: Path, tokenizer_config: Json) -> ChatTemplate | None:
        """Returns the template of a model directory; None where there is none. Raises CheckpointError."""
        sources = _sources(directory, tokenizer_config)
        return cls(sources, special_tokens(tokenizer_config)) if sources else None

    @cached_property
    def compiled(self) -> dict[str, jinja2.Template]:
        """Compiles the templates when they are first used. Raises CheckpointError where one is not valid."""
        environment = _environment()
        try:
            return {name: environment.from_string(text) for name, text in self._sources.items()}
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None = None,
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt. Raises InvalidRequest with the template's message where it refuses the messages."""
        template = (tools and self.compiled.get("tool_use")) or self.compiled["default"]
        variables = {**self._tokens, **(extra or {}), "messages": messages, "tools": tools or None}
        try:
            return template.render({**variables, "add_generation_prompt": add_generation_prompt})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequest("the model's chat template cannot cope with these messages") from error


def special_tokens(tokenizer_config: Json) -> dict[str, str]:
    """Returns bos_token, eos_token and others by name, from either form that configurations use."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = tokenizer_config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _sources(directory: Path, tokenizer_config: Json) -> dict[str, str]:
    if (file := directory / "chat_template.jinja").is_file():
        return {"default": file.read_text(encoding="utf-8")}
    if (file := directory / "chat_template.json").is_file():
        template: Any = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    else:
        template = tokenizer_config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    named = {one["name"]: one["template"] for one in template or ()}
    return named if "default" in named else {}


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    for unused in ("lipsum", "cycler"):  # jinja2's own, which no model's template has a use for
        del environment.globals[unused]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """Renders {% generation %} ... {% endgeneration %}, which marks training targets, as its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
