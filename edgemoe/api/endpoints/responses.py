"""POST /v1/responses: converts bodies to a Chat of one turn, and writes answers as items, streamed as typed events.

Nothing is stored between calls (`store` is always false), so fields that refer to an earlier response are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgemoe.api import schema
from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.responding import error_body, event
from edgemoe.api.schema import Chat, FieldNames, convert, read
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.arrays import Json

NEEDS_STORE = ("previous_response_id", "conversation", "prompt")
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    regex: str | None = None


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
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /v1/responses and prepares its generation. Raises InvalidRequest."""
    body = read(raw, ResponsesBody)
    chat, fields = as_chat(body)
    with fields.renamed():
        generation = chat_generation(chat, context, "resp")
    return PreparedAnswer(generation, ResponsesFormat(generation, body), bool(body.stream), fields)


def as_chat(body: ResponsesBody) -> tuple[Chat, FieldNames]:
    """Returns the equivalent chat request, and the client's names of its fields. Raises InvalidRequest."""
    for field in NEEDS_STORE:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field}: nothing is stored here; send the whole input", param=field)
    if body.background:
        raise InvalidRequest("background: nothing is stored here; ask for a stream", param="background")
    fields = FieldNames(FIELDS)
    messages = _messages(body.input, fields)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        fields.messages.insert(0, "instructions")
    common = {field: getattr(body, field) for field in schema.RequestBody.__struct_fields__}
    chat = {
        **common,
        "n": 1,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool, at) for at, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    with fields.renamed():
        return convert(chat, Chat), fields


def _messages(given: str | list[dict[str, Any]], fields: FieldNames) -> list[Json]:
    if isinstance(given, str):
        fields.messages.append("input")
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    reasoning = ""  # of the assistant's message that follows
    for at, item in enumerate(given):
        fields.messages += [f"input[{at - 1}]"] * (len(messages) - len(fields.messages))
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
                reasoning = _with_reasoning(messages[-1], reasoning)
            case "function_call":
                call = {"id": item.get("call_id"), "function": {k: item.get(k) for k in ("name", "arguments")}}
                if reasoning or not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None})
                    reasoning = _with_reasoning(messages[-1], reasoning)
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                reasoning += _reasoning(item)
            case other:
                raise InvalidRequest(f"input[{at}]: a {other!r} item cannot be read here", param=f"input[{at}].type")
    fields.messages += [f"input[{len(given) - 1}]"] * (len(messages) - len(fields.messages))
    return messages


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content")
    texts = (part.get("text") for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()
    return "".join(text for text in texts if isinstance(text, str))


def _with_reasoning(message: Json, reasoning: str) -> str:
    """Adds the reasoning to a message of the assistant's. Returns "", the reasoning left for the next one."""
    if reasoning and message["role"] == "assistant":
        message["reasoning_content"] = reasoning
    return ""


def _tool(tool: dict[str, Any], at: int) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools[{at}]: only tools of type function can be called", param=f"tools[{at}].type")
    return {"function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice: only functions can be chosen", param="tool_choice")
    return {"function": {"name": choice.get("name")}}


def _response_format(form: TextFormat | None) -> Json | None:
    if form is None:
        return None
    wrapped = {"name": form.name, "schema": form.schema, "strict": form.strict}
    return {"type": form.type, "json_schema": wrapped, "regex": form.regex}


def new_id(kind: str) -> str:
    """Returns a new random id in OpenAI's form."""
    return f"{kind}_{secrets.token_hex(12)}"


class ResponseItem:
    """Collects an open output item: the text of a message or of reasoning, or the arguments of a call."""

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind  # "message" | "reasoning" | "function_call"
        self.index = index
        self.text = ""
        self.id = new_id({"message": "msg", "reasoning": "rs"}.get(kind, "fc"))
        self._call = call

    @property
    def part_type(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self) -> Json:
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self.part_type, "text": self.text, **extra}

    def body(self, status: str) -> Json:
        if self._call is not None:
            about = {"call_id": self._call.id, "name": self._call.name, "arguments": self.text, "status": status}
            return {"id": self.id, "type": "function_call", **about}
        parts = [self.part()] if status == "completed" or self.text else []
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": parts, "status": status}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": parts}


class ResponsesFormat:
    """Writes deltas as response events, or joined as one response object."""

    def __init__(self, generation: Generation, body: ResponsesBody) -> None:
        self._generation = generation
        self._body = body
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
        body = error_body(error)["error"]
        failed = {"code": body["code"] or body["type"], "message": body["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": failed})

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        for _ in self._delta(choices[0]):
            pass
        for _ in self._close():
            pass
        return self._response("incomplete" if self._finish == "length" else "completed")

    def _delta(self, delta: ChoiceDelta) -> Iterator[bytes]:
        for piece in delta.pieces:
            if piece.call is not None:
                yield from self._call(piece, piece.call)
            else:
                yield from self._grow("message" if piece.kind == "text" else "reasoning", piece.text)
        self._finish = self._finish or delta.finish

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item.kind != kind:
            yield from self._close()
            self._item = ResponseItem(kind, len(self._output))
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
            yield self._inside("response.content_part.added", self._item, part=self._item.part())
        self._item.text += text
        extra: Json = {"logprobs": []} if kind == "message" else {}
        yield self._inside(f"response.{self._item.part_type}.delta", self._item, delta=text, **extra)

    def _close(self) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        extra: Json = {"logprobs": []} if item.kind == "message" else {}
        yield self._inside(f"response.{item.part_type}.done", item, text=item.text, **extra)
        yield self._inside("response.content_part.done", item, part=item.part())
        yield from self._done(item.body("completed"))
        self._item = None

    def _call(self, piece: OutputPiece, call: ToolCall) -> Iterator[bytes]:
        if piece.begins:
            yield from self._close()
            self._item = ResponseItem("function_call", len(self._output), call)
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
        assert self._item is not None
        self._item.text += piece.text
        about = {"item_id": self._item.id, "output_index": self._item.index}
        if piece.text:
            yield self._event("response.function_call_arguments.delta", **about, delta=piece.text)
        if piece.ended == "complete":
            done = {**about, "arguments": self._item.text, "name": call.name}
            yield self._event("response.function_call_arguments.done", **done)
        if piece.ended:
            yield from self._done(self._item.body("completed" if piece.ended == "complete" else "incomplete"))
            self._item = None

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
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": generation.requests[0].sampling.temperature,
            "text": {"format": {"type": body.text.format.type if body.text and body.text.format else "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": generation.requests[0].sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> Json:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
