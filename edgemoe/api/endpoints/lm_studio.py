"""LM Studio's POST /api/v1/chat and /api/v1/models/load: converts a body to a Chat, and writes its events.

Source: lmstudio-ai/docs, 1_developer/2_rest. docs/api.md lists the fields. Nothing is stored; no MCP server is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import JSONResponse, Response

from edgemoe.api import schema
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.field_names import FieldNames
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.event_text import error_body, event
from edgemoe.api.schema import Chat, read
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "repetition_penalty": "repeat_penalty",
    "chat_template_kwargs": "reasoning",
    "reasoning_effort": "reasoning",
}
THINKS: dict[str, bool | str] = {"off": False, "on": True}  # other words are efforts
TEXT_ITEMS = ("message", "text")
KINDS = {"text": "message", "reasoning": "reasoning"}  # of an output's items, by the pieces of an answer


class LmStudioChat(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /api/v1/chat. null means absent throughout."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    system_prompt: str | None = None
    integrations: list[Any] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    max_output_tokens: int | None = None
    reasoning: Literal["off", "low", "medium", "high", "on"] | None = None
    previous_response_id: str | None = None
    thread_id: str | None = None


class LmStudioModel(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /api/v1/models/load and unload."""

    model: str | None = None
    instance_id: str | None = None


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /api/v1/chat and prepares its generation. Raises InvalidRequest."""
    body = read(raw, LmStudioChat)
    for field in ("previous_response_id", "thread_id"):
        if getattr(body, field):
            instead = "nothing is stored here; send the whole conversation to /v1/chat/completions"
            raise InvalidRequest(f"{field}: {instead}", param=field, code="unsupported_parameter")
    if body.integrations:
        why = "integrations: no plugin and no MCP server is called here; /v1/chat/completions takes `tools`"
        raise InvalidRequest(why, param="integrations", code="unsupported_parameter")
    if body.reasoning not in (None, "off") and not context.text.can_think:
        raise InvalidRequest(f"reasoning: {context.model} does not reason", param="reasoning")
    chat = {
        "model": body.model,
        "messages": list(_messages(body)),
        "max_completion_tokens": body.max_output_tokens,
        "think": None if body.reasoning is None else THINKS.get(body.reasoning, body.reasoning),
        **{name: value for name in SAMPLING if (value := getattr(body, name)) is not None},
    }
    fields = FieldNames(FIELDS)
    with fields.renamed():
        generation = chat_generation(read(msgspec.json.encode(chat), Chat), context, "resp")
    return PreparedAnswer(generation, LmStudioFormat(generation), bool(body.stream), fields)


def _messages(body: LmStudioChat) -> Iterator[Json]:
    if body.system_prompt:
        yield {"role": "system", "content": body.system_prompt}
    items = [{"type": "message", "content": body.input}] if isinstance(body.input, str) else body.input
    for at, item in enumerate(items):
        if item.get("type") not in TEXT_ITEMS or not isinstance(item.get("content"), str):
            raise InvalidRequest(f"input[{at}]: this model reads items of type `message` only", param=f"input[{at}]")
        yield {"role": "user", "content": item["content"]}


def prepare_load(context: RequestContext, raw: bytes) -> Response:
    """Answers POST /api/v1/models/load, and llama.cpp's /models/load, once it is loaded. Raises InvalidRequest."""
    body = read(raw, LmStudioModel)
    context.check_model(body.model)
    loaded: Json = {"type": "llm", "instance_id": context.model, "model_instance_id": context.model}
    config = {"context_length": context.limits.context_tokens}
    return JSONResponse(loaded | {"success": True, "status": "loaded", "load_config": config, "config": config})


def late_error(error: RequestError) -> bytes:
    """Returns the only event of a stream that failed before its answer began."""
    return event({"type": "error", **error_body(error)}, "error")


class LmStudioFormat:
    """Writes deltas as named events: each item begins, grows and ends; the last event has the whole answer."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._output: list[Json] = []
        self._is_begun = self._is_open = False

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        if not self._is_begun:
            self._is_begun = True
            yield _event("chat.start", model_instance_id=self._generation.model)
            yield _event("prompt_processing.start")
            yield _event("prompt_processing.end")
        for delta in deltas:
            yield from self._delta(delta)

    def closing_events(self) -> Iterable[bytes]:
        yield from self._close()
        yield _event("chat.end", result=self._answer())

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield from self._close()
        yield late_error(error)
        yield _event("chat.end", result=self._answer())

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        for _ in self._delta(choices[0]):
            pass
        return self._answer()

    def _delta(self, delta: ChoiceDelta) -> Iterator[bytes]:
        for piece in delta.pieces:
            kind = KINDS.get(piece.kind, "message")
            if not self._is_open or self._output[-1]["type"] != kind:
                yield from self._close()
                self._output.append({"type": kind, "content": ""})
                self._is_open = True
                yield _event(f"{kind}.start")
            self._output[-1]["content"] += piece.text
            yield _event(f"{kind}.delta", content=piece.text)

    def _close(self) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield _event(f"{self._output[-1]['type']}.end")

    def _answer(self) -> Json:
        generation, timings = self._generation, self._generation.timings()
        stats: Json = {
            "input_tokens": generation.prompt_tokens,
            "total_output_tokens": sum(choice.tokens for choice in generation.choices),
            "reasoning_output_tokens": sum(choice.reasoning_tokens for choice in generation.choices),
            "tokens_per_second": timings.get("predicted_per_second", 0.0),
            "time_to_first_token_seconds": timings.get("prompt_ms", 0.0) / 1000,
        }
        return {"model_instance_id": generation.model, "output": self._output, "stats": stats}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
