"""Converts OpenAI's messages and tools to the form of a chat template, and renders it in jinja2's sandbox.

Renders as transformers does (transformers/utils/chat_template_utils.py). The template is chat_template.jinja, else
chat_template.json, else `chat_template` of tokenizer_config.json: one template, or named ones ("tool_use" with tools).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from edgemoe.api.dialects.dialect import HistoryForm
from edgemoe.api.schema import ChatMessage, ContentPart, PastToolCall, Tool, convert
from edgemoe.errors import CheckpointError, InvalidRequest
from edgemoe.types.json_object import Json

AS_OPENAI = HistoryForm()
REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # the system's words within a message of another role
TEXT_PARTS, THOUGHT_PARTS = ("text", "input_text", "output_text"), ("thinking", "reasoning")
MAX_KIND_CHARS = 40


def for_template(
    messages: Sequence[ChatMessage], history: HistoryForm = AS_OPENAI, template: str = "", *, one_system: bool = False
) -> list[Json]:
    """Returns the messages in the form that `template` wants. Raises InvalidRequest for content that is not text.

    With `one_system` only the first message is of the system's, for templates that have no place for others.
    """
    latest = max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
    converted = [_message(message, f"messages[{at}]", history, at == latest) for at, message in enumerate(messages)]
    _pair_results(converted)
    if one_system:
        converted = _one_system(converted)
    if history.id_chars:
        _shorten_ids(converted, history.id_chars)
    if history.result_role and history.result_role in template:
        converted = [one | {"role": history.result_role} if one["role"] == "tool" else one for one in converted]
    if history.tool_calls_in_text and "tool_calls" not in template:
        converted = [_with_tool_calls_in_text(one, history.tool_calls_in_text) for one in converted]
    if history.one_tool_call_a_message:
        converted = list(_one_tool_call_each(converted))
    return list(_with_results(converted)) if history.results_in_tool_call else converted


def tools_for_template(tools: Sequence[Tool]) -> list[Json]:
    """Returns the tools in the form of templates, which read a description and parameters of every function.

    Raises InvalidRequest for a tool that is not a function.
    """
    for at, tool in enumerate(tools):
        if tool.type not in (None, "function", "custom"):
            raise InvalidRequest(f"tools[{at}].type: only functions can be called", param=f"tools[{at}].type")
    converted = [dict(msgspec.to_builtins(tool)) for tool in tools]
    for one in converted:
        one["type"] = "function"
        one["function"].setdefault("description", "")
        one["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return converted


ROLES = {"developer": "system", "function": "tool"}


def _message(message: ChatMessage, where: str, history: HistoryForm, is_latest: bool) -> Json:
    role = ROLES.get(message.role, message.role)
    content: str | None = _text(message, where, is_latest)
    value: Json = {"role": role, "content": content}
    if (reasoning := message.reasoning_content or message.reasoning or _thoughts(message)) is not None:
        value[history.reasoning] = reasoning
    for field in ("name", "tool_call_id"):
        if (given := getattr(message, field)) is not None:
            value[field] = given
    calls = message.tool_calls or ()
    if message.function_call is not None and not calls:
        calls = [PastToolCall(function=message.function_call)]
    if calls:
        value["content"] = content or None
        value["tool_calls"] = [_call(call) for call in calls]
    return value


def _text(message: ChatMessage, where: str, is_latest: bool) -> str:
    """Returns the text of a message. Raises InvalidRequest for the user's last one with parts that are not text.

    Elsewhere a note replaces such a part, so that a conversation with a picture goes on.
    """
    content = message.content
    if isinstance(content, dict):
        if message.is_result:
            return _tojson(content)  # the result as an object
        content = [convert(content, ContentPart)] if isinstance(content.get("type"), str) else [_tojson(content)]
    if not isinstance(content, str | list):
        return "" if content is None else _tojson(content)
    if isinstance(content, str):
        return content
    if not all(isinstance(one, str | ContentPart) for one in content):
        return _tojson(content)  # the result as a list
    return "".join(_text_of(part, f"{where}.content", at, is_latest) for at, part in enumerate(content))


def _text_of(part: ContentPart | str, where: str, at: int, is_latest: bool) -> str:
    if isinstance(part, str):
        return part
    kind = part.type or "text"
    if kind in THOUGHT_PARTS:
        return ""
    if kind in TEXT_PARTS or kind == "refusal":
        return (part.text if kind in TEXT_PARTS else part.refusal) or ""
    if is_latest:
        raise InvalidRequest(f"{where}[{at}]: this model reads text only, not {kind!r}", param=where)
    return f"[{kind[:MAX_KIND_CHARS]} left out: this model reads text only]"


def _thoughts(message: ChatMessage) -> str | None:
    """Returns the reasoning among a message's parts; None where there is none."""
    if not isinstance(message.content, list) or message.role != "assistant":
        return None
    found = ""
    for part in message.content:
        if isinstance(part, ContentPart) and part.type in THOUGHT_PARTS:
            given = part.thinking if part.thinking is not None else part.text
            texts = [given] if isinstance(given, str) else [one.get("text") for one in given or ()]
            found += "".join(text for text in texts if isinstance(text, str))
    return found or None


def _call(call: PastToolCall) -> Json:
    given = call.called.arguments
    text = given if isinstance(given, str) else _tojson(given or {})  # PHP writes no arguments as an empty list
    return {"id": call.id, "type": "function", "function": {"name": call.called.name, "arguments": text or "{}"}}


def _decoded(text: str) -> Any:
    """Returns the JSON value in `text`, {} where it is empty, and `text` itself where it is no JSON."""
    try:
        return msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        return text


def _one_system(messages: list[Json]) -> list[Json]:
    """Joins the system messages at the start, and moves the text of later ones into other messages.

    It goes into the user's or tool's message before, so that roles alternate and the prompt before it stays. After an
    answer it goes into the user's next message.
    """
    kept: list[Json] = []
    waits = False  # whether the last message is the system's words alone, to be joined to the user's next
    for message in messages:
        system, last = message["role"] == "system", kept[-1] if kept else None
        text = message["content"] or ""
        if system and last is not None and not text:
            continue
        if last is None or not (system or (waits and message["role"] == "user")):
            kept.append(message)
        elif system and last["role"] == "assistant":
            kept.append({"role": "user", "content": REMINDER.format(text)})
        else:
            added = REMINDER.format(text) if system and last["role"] != "system" else text
            whole = f"{last['content']}\n\n{added}" if last["content"] else added
            kept[-1] = (last if system else message) | {"content": whole}
        waits = system and last is not None and (waits or last["role"] == "assistant")
    return kept


def _pair_results(messages: list[Json]) -> None:
    """Gives each result of a tool its function's name, and the id of the first open call where it has none."""
    open_tool_calls: dict[str | None, str] = {}
    for message in messages:
        if message.get("tool_calls"):
            open_tool_calls = {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        elif message["role"] == "tool":
            given = message.get("tool_call_id", next(iter(open_tool_calls), None))
            if name := open_tool_calls.pop(given, ""):
                message.setdefault("name", name)
            if given is not None:
                message["tool_call_id"] = given


def _shorten_ids(messages: list[Json], chars: int) -> None:
    """Replaces ids of calls that do not have `chars` letters and digits by digests that do."""

    def short(id: str | None) -> str:
        fits = id is not None and len(id) == chars and id.isalnum() and id.isascii()
        return str(id) if fits else hashlib.sha256(str(id).encode()).hexdigest()[:chars]

    for message in messages:
        if message["role"] == "tool":
            message["tool_call_id"] = short(message.get("tool_call_id"))
        for call in message.get("tool_calls", ()):
            call["id"] = short(call["id"])


def _with_tool_calls_in_text(message: Json, mark: str) -> Json:
    """Returns the message with its calls in its text: `mark` and a JSON list, as the model writes them."""
    if "tool_calls" not in message:
        return message
    functions = (call["function"] for call in message["tool_calls"])
    calls = [{"name": one["name"], "arguments": _decoded(one["arguments"])} for one in functions]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return said | {"content": f"{message['content'] or ''}{mark}{_tojson(calls)}"}


def _one_tool_call_each(messages: list[Json]) -> Iterator[Json]:
    """Yields the messages, with a message of its own for each call, which its result follows.

    Such templates have one place for text before a call: the answer's text goes there, after the reasoning.
    """
    moved: set[int] = set()
    for number, message in enumerate(messages, start=1):
        calls = message.get("tool_calls", ())
        following = takewhile(lambda one: one["role"] == "tool", messages[number:] if calls else ())
        results = {one.get("tool_call_id"): one for one in following}  # ids may repeat in each turn
        if calls and message["content"] and message.get("thinking"):
            message |= {"thinking": f"{message['thinking']}\n\n{message['content']}", "content": None}
        for at, call in enumerate(calls):
            yield {**(message if at == 0 else {"role": "assistant", "content": None}), "tool_calls": [call]}
            if len(calls) > 1 and (result := results.get(call["id"])) is not None and id(result) not in moved:
                moved.add(id(result))
                yield result
        if not calls and id(message) not in moved:
            yield message


def _with_results(messages: list[Json]) -> Iterator[Json]:
    """Yields the messages, the results of tools within the message that called them."""
    caller: Json | None = None
    for message in messages:
        if message["role"] != "tool" or caller is None:
            caller = {**message} if message.get("tool_calls") else None
            yield caller or message
            continue
        response = _decoded(message["content"]) if message["content"].strip() else ""
        given = response if isinstance(response, dict) else message["content"]
        caller.setdefault("tool_responses", []).append({"name": message.get("name", "unknown"), "response": given})


class ToolCallArguments(dict[str, Any]):
    """Arguments of a past call, right for every template: an object to `tojson` and `items`, else their text."""

    def __init__(self, value: Json, text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _with_arguments(message: Json) -> Json:
    """Returns a message in which arguments of calls that are JSON objects are ToolCallArguments."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        text = call["function"]["arguments"]
        value = _decoded(text)
        arguments = ToolCallArguments(value, text) if isinstance(value, dict) else text
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


TOOL_CALLS_WITHOUT_TEXT = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none", re.IGNORECASE)
FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


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

    def check(self) -> None:
        """Raises CheckpointError where a template is not valid, without computing anything of it."""
        try:
            for text in self._sources.values():
                _environment().parse(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the model's chat template cannot be read: {error}") from error

    @cached_property
    def compiled(self) -> dict[str, jinja2.Template]:
        """Compiles the templates when they are first used. Raises CheckpointError where one is not valid."""
        environment = _environment()
        try:
            return {name: environment.from_string(text) for name, text in self._sources.items()}
        except (*FAULTS, RecursionError, MemoryError) as error:  # constants are worked out, too
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
        variables = {**(extra or {}), "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._rendered([_with_arguments(message) for message in messages], variables)
        except FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequest("the model's chat template cannot cope with these messages") from error

    def _rendered(self, messages: Sequence[Json], variables: Json) -> str:
        """Renders messages, in which calls may have no text (None). Raises FAULTS.

        Such a text is None only for a template that asks for None. Some of these then fail on it, and get "".
        """
        template = (variables["tools"] and self.compiled.get("tool_use")) or self.compiled["default"]
        variables = {**self._tokens, **variables}
        if any(one.get("content", "") is None for one in messages):
            if TOOL_CALLS_WITHOUT_TEXT.search(self.text):
                with contextlib.suppress(TypeError, jinja2.UndefinedError):
                    return template.render({**variables, "messages": messages})
            messages = [dict(one) | {"content": one.get("content") or ""} for one in messages]
        return template.render({**variables, "messages": messages})


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
    """Returns the templates by name. Raises CheckpointError where a file cannot be read as one."""
    file, template = directory / "tokenizer_config.json", tokenizer_config.get("chat_template")
    try:
        if (directory / "chat_template.jinja").is_file():
            file = directory / "chat_template.jinja"
            template = file.read_text(encoding="utf-8")
        elif (directory / "chat_template.json").is_file():
            file = directory / "chat_template.json"
            template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        named = {str(one["name"]): str(one["template"]) for one in template or ()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{file}: its chat template cannot be read: {error}") from error
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
