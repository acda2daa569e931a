"""Ollama's POST /api/chat and /api/generate: converts bodies to a Chat or a Completion (ollama/ollama, api/types.go).

docs/ollama.md lists the fields. A request without messages or a prompt, which loads a model, is answered at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import JSONResponse, Response

from edgemoe.api import schema
from edgemoe.api.body_bounds import MAX_PARTS
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.endpoints.completions import completion_generation
from edgemoe.api.endpoints.ollama_format import ChatLines, OllamaFormat, TextLines
from edgemoe.api.field_names import FieldNames
from edgemoe.api.generate.generation import Generation, PreparedAnswer, RequestContext
from edgemoe.api.llama_bodies import LlamaCompletion, LooseChat
from edgemoe.api.peer_fields import thinking_of
from edgemoe.api.schema import read
from edgemoe.api.text.infill import infill_marks
from edgemoe.errors import InvalidRequest, ModelNotFound
from edgemoe.types.json_object import Json

OPTIONS = (  # that are fields of a Chat, by this server's or another's names; others have no effect
    "num_predict",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
)
FIELDS = {name: f"options.{name}" for name in OPTIONS} | {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
}
LATEST = ":latest"
EFFORTS = ("", "minimal", "low", "medium", "high", "xhigh", "max")  # "": none is asked for
NO_TIME = re.compile(r"0+(ns|us|ms|s|m|h)?")
MAX_IMAGES = 1024
ALL_TOKENS = -1  # of num_predict: as many as the context has room for


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] | list[Any] | str | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: schema.Label | None = None
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Any = None  # text, or a chat's parts; of a result any JSON
    thinking: str | None = None
    images: Annotated[list[Any], Meta(max_length=MAX_IMAGES)] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=schema.MAX_TOOL_CALLS)] | None = None
    tool_name: schema.Label | None = None
    name: schema.Label | None = None  # an earlier name of tool_name
    tool_call_id: schema.Label | None = None


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints read. null means absent throughout."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | float | str | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class OllamaChat(OllamaBody, frozen=True, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=schema.MAX_MESSAGES)] | None = None
    tools: Annotated[list[Any], Meta(max_length=schema.MAX_TOOLS)] | None = None  # as a Chat's


class OllamaPrompt(OllamaBody, frozen=True, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[schema.TokenId], Meta(max_length=MAX_PARTS)] | None = None
    raw: bool | None = None
    images: Annotated[list[Any], Meta(max_length=MAX_IMAGES)] | None = None


def prepare_chat(context: RequestContext, raw: bytes) -> PreparedAnswer | Response:
    """Decodes a body of POST /api/chat and prepares its generation. Raises InvalidRequest."""
    body = read(raw, OllamaChat)
    name = served_name(body.model, context)
    if not body.messages:
        return _loaded(body, ChatLines(name))
    if body.tools and not context.text.can_call_tools:
        raise InvalidRequest(f'"{name}" does not support tools', param="tools")
    generation = _chat(body, _messages(body.messages), body.tools, context)
    return _prepared(body, generation, ChatLines(name, generation, context.text.vocabulary))


def prepare_text(context: RequestContext, raw: bytes) -> PreparedAnswer | Response:
    """Decodes a body of POST /api/generate and prepares its generation. Raises InvalidRequest."""
    body = read(raw, OllamaPrompt)
    name = served_name(body.model, context)
    if not body.prompt and not body.suffix:
        return _loaded(body, TextLines(name))
    _refuse_unsupported(body)
    if body.suffix:
        generation = _infill(body, context)
    elif body.raw:
        generation = _completion(body, body.prompt or "", context)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        generation = _chat(body, [*system, {"role": "user", "content": body.prompt}], None, context)
    return _prepared(body, generation, TextLines(name, generation, context.text.vocabulary))


def served_name(asked: str | None, context: RequestContext) -> str:
    """Returns the name that a client asks by. Raises InvalidRequest without one, ModelNotFound for other models' names.

    As with Ollama, case does not count, and a name without a tag has the tag "latest".
    """
    if not asked:
        raise InvalidRequest("model is required", param="model", code="missing_required_parameter")
    if not context.serves(asked):
        raise ModelNotFound(f"model '{asked}' not found", param="model")
    return asked


def tagged_name(name: str) -> str:
    """Returns a model's name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _refuse_unsupported(body: OllamaPrompt) -> None:
    if body.raw and (body.template or body.system or body.context):
        raise InvalidRequest("raw mode does not support template, system, or context", param="raw")
    if body.template:
        why = "the model's own template is used; with raw: true the prompt is taken as it is"
        raise _unsupported("template", why)
    if body.context:
        raise _unsupported("context", "answers have none; send the conversation as messages to /api/chat")
    if body.images:
        raise _no_images("images")


def _unsupported(field: str, instead: str) -> InvalidRequest:
    message = f"{field} is not supported by this server: {instead}"
    return InvalidRequest(message, param=field, code="unsupported_parameter")


def _no_images(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: this model reads text only, no images", param=where)


def _loaded(body: OllamaBody, lines: OllamaFormat) -> Response:
    """Returns the answer to a request that only loads the model, which is loaded, or unloads it, which it never is."""
    keep = body.keep_alive
    unloads = keep == 0 if isinstance(keep, float | int) else bool(keep and NO_TIME.fullmatch(keep))
    return JSONResponse(lines.empty("unload" if unloads else "load"))


def _prepared(body: OllamaBody, generation: Generation, lines: OllamaFormat) -> PreparedAnswer:
    return PreparedAnswer(generation, lines, body.stream is not False, _names())


def _names() -> FieldNames:
    return FieldNames(FIELDS, flat_tools=False)


def _chat(
    body: OllamaBody, messages: Sequence[Json], tools: Sequence[Any] | None, context: RequestContext
) -> Generation:
    """Returns the generation of a chat. Raises InvalidRequest."""
    thinks, effort = (None, "") if body.think is None else thinking_of("think", body.think)
    if effort not in EFFORTS:
        words = f'invalid think value: {effort!r} (must be "high", "medium", "low", "max", true, or false)'
        raise InvalidRequest(words, param="think", code="invalid_value")
    if thinks and not context.text.can_think:
        raise InvalidRequest(f'"{body.model}" does not support thinking', param="think")
    chat: Json = {
        "model": context.model,
        "messages": messages,
        "tools": tools,
        "format": body.format,
        "think": body.think,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        **_sampling(body.options or {}),
    }
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    with _names().renamed():
        return chat_generation(read(msgspec.json.encode(chat), LooseChat), context, "ollama")


def _completion(body: OllamaBody, prompt: str, context: RequestContext, stops: Sequence[int] = ()) -> Generation:
    """Returns the generation that goes on with `prompt` as it is. Raises InvalidRequest."""
    fields: Json = {
        "model": context.model,
        "prompt": prompt,
        "format": body.format,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "stop_token_ids": stops,
        "num_predict": ALL_TOKENS,
        **_sampling(body.options or {}),
    }
    with _names().renamed():
        return completion_generation(read(msgspec.json.encode(fields), LlamaCompletion), context)


def _infill(body: OllamaPrompt, context: RequestContext) -> Generation:
    """Returns the generation of the text between `prompt` and `suffix`. Raises InvalidRequest."""
    vocabulary = context.text.vocabulary
    marks = infill_marks(vocabulary.added)
    if marks is None:
        raise InvalidRequest(
            f'"{body.model}" does not support insert: its tokenizer has no marks for it', param="suffix"
        )
    stops = [id for name in marks.stops if (id := vocabulary.id_of(name)) is not None]
    return _completion(body, marks.prompt(body.prompt or "", body.suffix or ""), context, stops)


def _sampling(options: Mapping[str, Any]) -> Json:
    """Returns the fields that `options` set."""
    found = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    if isinstance(most := found.get("num_predict"), int | float) and most <= 0:
        found["num_predict"] = ALL_TOKENS
    if options.get("repeat_last_n") == 0:
        found |= {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return found


def _messages(given: Sequence[OllamaMessage]) -> list[Json]:
    """Returns the messages of a Chat. Raises InvalidRequest for images.

    Many clients send no ids of calls. Each call gets one. A result gets the id of the first call without a
    result, of the tool that it names.
    """
    messages: list[Json] = []
    waiting: list[tuple[str, str]] = []  # id and function of calls without a result
    calls = 0
    latest = max((at for at, message in enumerate(given) if message.role.lower() == "user"), default=-1)
    for at, message in enumerate(given):
        if message.images and at == latest:
            raise _no_images(f"messages[{at}].images")
        one: Json = {"role": message.role.lower(), "content": _content(message, at)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = []
            for call in message.tool_calls:
                id = call.id or f"functions.{call.function.name}:{calls}"
                function = {"name": call.function.name, "arguments": call.function.arguments or {}}
                one["tool_calls"].append({"id": id, "function": function})
                waiting.append((id, call.function.name))
                calls += 1
        if one["role"] == "tool":
            one |= _result(message, waiting)
        messages.append(one)
    return messages


def _content(message: OllamaMessage, at: int) -> Any:
    """Returns a message's content, with a note for images that the model cannot see. Raises InvalidRequest."""
    if message.role.lower() != "tool" and not isinstance(message.content, str | list | dict | None):
        where = f"messages[{at}].content"
        kind = type(message.content).__name__
        raise InvalidRequest(
            f"{where}: Expected `str | object | array | null`, got `{kind}`", param=where, code="invalid_type"
        )
    if not message.images:
        return "" if message.content is None else message.content
    note = "[image left out: this model reads text only]"
    if isinstance(message.content, list | dict):
        return [*(message.content if isinstance(message.content, list) else [message.content]), note]
    return f"{message.content or ''}\n{note}".lstrip()


def _result(message: OllamaMessage, waiting: list[tuple[str, str]]) -> Json:
    """Returns the call's id and the tool's name of a result, and takes the call from the waiting ones."""
    asked, name = message.tool_call_id, message.tool_name or message.name
    answered = (call for call in waiting if call[0] == asked or (not asked and name in (None, call[1])))
    call = next(answered, None)
    if call is None:
        return {"tool_call_id": asked, "name": name}
    waiting.remove(call)
    return {"tool_call_id": call[0], "name": call[1]}
