"""POST /v1/responses: converts bodies to a Chat of one turn, and writes answers as items, streamed as typed events.

Nothing is stored between calls (`store` is always false), so fields that refer to an earlier response are refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.api import schema
from edgemoe.api.dialects.output_parser import item_id
from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.endpoints.custom_input import CustomInput, custom_input
from edgemoe.api.endpoints.openai_format import logprob_body
from edgemoe.api.endpoints.response_input import ItemReader, seal
from edgemoe.api.endpoints.response_tools import ClientTool, ToolOffer
from edgemoe.api.field_names import FieldNames
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.event_text import error_body, event
from edgemoe.api.schema import Chat, convert, read
from edgemoe.api.text.tokenizer import Vocabulary
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

NEEDS_STORE = ("previous_response_id", "conversation", "prompt")
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None


class TextFormat(schema.ResponseFormat, frozen=True, kw_only=True):
    """A format whose schema stands beside its name; the form of chat completions is read, too."""

    type: str | None = "text"  # type: ignore[assignment]
    name: str | None = None


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None


class ResponsesBody(schema.RequestBody, frozen=True, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: schema.Limit | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | str | bool | None = None  # an effort or a switch, as other servers have it
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    logprobs: bool | None = None  # a chat's name of the member of `include`
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @property
    def shows_logprobs(self) -> bool:
        """Returns whether the text comes with log probabilities: `top_logprobs` alone asks for them, too."""
        return LOGPROBS in (self.include or ()) or bool(self.logprobs or self.top_logprobs)


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /v1/responses and prepares its generation. Raises InvalidRequest."""
    body = read(raw, ResponsesBody)
    chat, fields, offer = as_chat(body)
    with fields.renamed():
        generation = chat_generation(chat, context, "resp")
    return PreparedAnswer(
        generation, ResponsesFormat(generation, body, offer, context.text.vocabulary), bool(body.stream), fields
    )


def late_error(error: RequestError) -> bytes:
    """Returns the only event of a stream that failed before its answer began."""
    response = {"id": f"resp-{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time())}
    response |= {"status": "failed", "output": [], **_failure(error)}
    return event({"type": "response.failed", "response": response, "sequence_number": 0}, "response.failed")


def _failure(error: RequestError) -> Json:
    body = error_body(error)["error"]
    return {"error": {"code": body["code"] or body["type"], "message": body["message"]}}


def as_chat(body: ResponsesBody) -> tuple[Chat, FieldNames, ToolOffer]:
    """Returns the equivalent chat request, the client's names of its fields, and its tools. Raises InvalidRequest."""
    for field in NEEDS_STORE:
        if getattr(body, field):
            raise InvalidRequest(f"{field}: nothing is stored here; send the whole input", param=field)
    if body.background:
        raise InvalidRequest("background: nothing is stored here; ask for a stream", param="background")
    if (body.n or 1) > 1:
        raise InvalidRequest("n: one answer at a time", param="n")
    fields = FieldNames(FIELDS)
    offer = ToolOffer()
    offer.add(body.tools or (), "tools")
    messages = _messages(body, offer, fields)
    choice = offer.choose(body.tool_choice)
    fields.tools = offer.places
    common = {field: getattr(body, field) for field in schema.RequestBody.__struct_fields__}
    chat = {
        **common,
        "n": 1,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": offer.functions or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None) or body.response_format,
        "reasoning_effort": _effort(body),
        "chat_template_kwargs": body.chat_template_kwargs,
        "logprobs": body.shows_logprobs,
        "top_logprobs": body.top_logprobs,
    }
    with fields.renamed():
        return convert(chat, Chat), fields, offer


def _messages(body: ResponsesBody, offer: ToolOffer, fields: FieldNames) -> list[Json]:
    reader = ItemReader(offer, fields)
    if body.instructions:
        reader.messages.append({"role": "system", "content": body.instructions})
        fields.messages.append("instructions")
    if isinstance(body.input, str):
        reader.messages.append({"role": "user", "content": body.input})
        fields.messages.append("input")
    else:
        reader.read(body.input)
    return reader.messages


def _response_format(form: TextFormat | None) -> Json | None:
    if form is None:
        return None
    return dict(msgspec.to_builtins(form)) | {"type": form.type or "text"}


def _effort(body: ResponsesBody) -> str | None:
    return body.reasoning.effort if isinstance(body.reasoning, Reasoning) else None


ID_PREFIXES = {"message": "msg", "reasoning": "rs", "custom_tool_call": "ctc", "tool_search_call": "tsc"}
SEALED_REASONING = "reasoning.encrypted_content"  # in `include`: the client sends reasoning back in this form
LOGPROBS = "message.output_text.logprobs"  # in `include`: the text has the log probabilities of its tokens


class ResponseItem:
    """Collects an open output item: the text of a message or of reasoning, or the arguments of a call."""

    def __init__(
        self,
        answer: str,
        kind: str,
        index: int,
        call: ToolCall | None = None,
        tool: ClientTool | None = None,
        seals: bool = False,
    ) -> None:
        """Opens an item of the answer of that id.

        `tool` is the client's tool that `call` is for; `seals` adds a sealed copy of reasoning.
        """
        self.kind = tool.item if tool else kind
        self.index = index
        self.text = ""
        self.logprobs: list[Json] = []
        self.id = item_id(ID_PREFIXES.get(self.kind, "fc"), answer, index)
        self.custom = CustomInput() if self.kind == "custom_tool_call" else None
        self._call, self._tool, self._seals = call, tool, seals

    @property
    def part_type(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self) -> Json:
        extra: Json = {"annotations": [], "logprobs": list(self.logprobs)} if self.kind == "message" else {}
        return {"type": self.part_type, "text": self.text, **extra}

    def body(self, status: str) -> Json:
        if self._call is not None and self._tool is not None:
            return {"id": self.id, "type": self.kind, "call_id": self._call.id, "status": status} | self._called(status)
        parts = [self.part()] if status == "completed" or self.text else []
        if self.kind == "reasoning":
            sealed = {"encrypted_content": seal(self.text)} if self._seals and self.text else {}
            return {"id": self.id, "type": "reasoning", "summary": [], "content": parts, "status": status, **sealed}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": parts}

    def _called(self, status: str) -> Json:
        assert self._tool is not None
        if self.kind == "tool_search_call":
            given = msgspec.Raw(self.text.encode()) if status == "completed" else {}
            return {"execution": "client", "arguments": given}
        name = {"name": self._tool.name} | ({"namespace": self._tool.namespace} if self._tool.namespace else {})
        if self.custom is not None:
            return name | {"input": custom_input(self.text) if status == "completed" else self.custom.text}
        return name | {"arguments": self.text}


class ResponsesFormat:
    """Writes deltas as response events, or joined as one response object."""

    def __init__(self, generation: Generation, body: ResponsesBody, offer: ToolOffer, vocabulary: Vocabulary) -> None:
        self._generation = generation
        self._vocabulary = vocabulary
        self._body = body
        self._offer = offer
        self._seals = SEALED_REASONING in (body.include or ())
        self._output: list[Json] = []
        self._item: ResponseItem | None = None
        self._sequence = 0
        self._begun = False
        self._finish = ""

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for delta in deltas:
            yield from self._delta(delta)

    def closing_events(self) -> Iterable[bytes]:
        yield from self._close()
        status = "incomplete" if self._finish == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status))

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield self._event("response.failed", response=self._response("failed") | _failure(error))

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        for _ in self._delta(choices[0]):
            pass
        for _ in self._close():
            pass
        return self._response("incomplete" if self._finish == "length" else "completed")

    def _delta(self, delta: ChoiceDelta) -> Iterator[bytes]:
        logprobs = [logprob_body(one, self._vocabulary) for one in delta.text_logprobs]
        for piece in delta.pieces:
            if piece.call is not None:
                yield from self._call(piece, piece.call)
            else:
                kind = "message" if piece.kind == "text" else "reasoning"
                yield from self._grow(kind, piece.text, logprobs if kind == "message" else [])
                logprobs = [] if kind == "message" else logprobs
        self._finish = self._finish or delta.finish

    def _grow(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[bytes]:
        if self._item is None or self._item.kind != kind:
            yield from self._close()
            self._item = ResponseItem(self._generation.id, kind, len(self._output), seals=self._seals)
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
            yield self._inside("response.content_part.added", self._item, part=self._item.part())
        self._item.text += text
        self._item.logprobs += logprobs
        extra: Json = {"logprobs": logprobs} if kind == "message" else {}
        yield self._inside(f"response.{self._item.part_type}.delta", self._item, delta=text, **extra)

    def _close(self) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        extra: Json = {"logprobs": item.logprobs} if item.kind == "message" else {}
        yield self._inside(f"response.{item.part_type}.done", item, text=item.text, **extra)
        yield self._inside("response.content_part.done", item, part=item.part())
        yield from self._done(item.body("completed"))
        self._item = None

    def _call(self, piece: OutputPiece, call: ToolCall) -> Iterator[bytes]:
        if piece.begins:
            yield from self._close()
            tool = self._offer.tool(call.name)
            self._item = ResponseItem(self._generation.id, "function_call", len(self._output), call, tool)
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
        item = self._item
        assert item is not None
        item.text += piece.text
        if item.kind != "tool_search_call":
            yield from self._arguments(item, piece)
        if piece.ended:
            yield from self._done(item.body("completed" if piece.ended == "complete" else "incomplete"))
            self._item = None

    def _arguments(self, item: ResponseItem, piece: OutputPiece) -> Iterator[bytes]:
        """Yields the events of a call's new arguments, or of a custom tool's new input."""
        about: Json = {"item_id": item.id, "output_index": item.index}
        if item.custom is None:
            kind, field, delta = "function_call_arguments", "arguments", piece.text
        else:
            kind, field, delta = "custom_tool_call_input", "input", item.custom.feed(piece.text)
        if delta:
            yield self._event(f"response.{kind}.delta", **about, delta=delta)
        if piece.ended == "complete":
            done = item.body("completed")
            yield self._event(f"response.{kind}.done", **about, name=done["name"], **{field: done[field]})

    def _done(self, item: Json) -> Iterator[bytes]:
        self._output.append(item)
        yield self._about("response.output_item.done", len(self._output) - 1, item=item)

    def _inside(self, kind: str, item: ResponseItem, **fields: Any) -> bytes:
        return self._about(kind, item.index, item_id=item.id, content_index=0, **fields)

    def _about(self, kind: str, index: int, **fields: Any) -> bytes:
        return self._event(kind, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(self, status: str) -> Json:
        generation, body = self._generation, self._body
        return {
            "id": generation.id.replace("-", "_"),
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "model": generation.model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": _effort(body), "summary": None},
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "frequency_penalty": generation.requests[0].sampling.frequency_penalty,
            "max_tool_calls": None,
            "presence_penalty": generation.requests[0].sampling.presence_penalty,
            "prompt_cache_key": None,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": generation.requests[0].sampling.temperature,
            "text": _told_text(body.text),
            "tool_choice": body.tool_choice or "auto",
            "tools": [_told_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": generation.requests[0].sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> Json:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }


def _told_text(asked: TextSettings | None) -> Json:
    """Returns the settings of the text, as an answer repeats them."""
    form = _response_format(asked.format if asked else None) or {"type": "text"}
    if form["type"] != "json_schema":
        return {"format": {"type": form["type"]}}
    given = form.get("json_schema") or {}  # in the form of chat completions
    told = {key: form.get(key) or given.get(key) for key in ("name", "schema", "strict")}
    return {"format": {"type": "json_schema", **told, "name": told["name"] or "answer", "schema": told["schema"] or {}}}


def _told_tool(tool: Json) -> Json:
    """Returns a tool as an answer repeats it: a function has all of its fields."""
    if tool.get("type") != "function":
        return tool
    flat = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return {"type": "function"} | {"name": "", "description": None, "parameters": None, "strict": None} | flat
