"""Anthropic's POST /v1/messages and /v1/messages/count_tokens: converts bodies to a Chat, and writes content blocks.

An assistant's last message is continued by the answer. Without `thinking` the model is asked not to reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from edgemoe.api import schema
from edgemoe.api.dialects.tool_calls import OutputPiece, completed_object
from edgemoe.api.endpoints.chat_completions import chat_generation
from edgemoe.api.endpoints.content_parts import text_of_part, text_of_parts, text_of_result
from edgemoe.api.field_names import FieldNames
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.event_text import anthropic_error, event
from edgemoe.api.peer_fields import TOOL_CHOICES
from edgemoe.api.schema import Chat, convert, read
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

BILLING = "x-anthropic-billing-header:"  # begins a system block of Claude Code's, which may change with each request
FIELDS = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format", "stop": "stop_sequences"}


Blocks = Annotated[list[dict[str, Any]], Meta(max_length=schema.MAX_CONTENT_PARTS)]


class MessageTurn(msgspec.Struct, frozen=True, kw_only=True):
    role: str  # once read one of TURNS; "system" is for the app's own words between the turns
    content: str | Annotated[list[Any], Meta(max_length=schema.MAX_CONTENT_PARTS)] | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (role := TURNS.get(self.role.lower())) is None:
            raise ValueError(f"role: Invalid enum value {self.role[:64]!r}")
        structs.force_setattr(self, "role", role)
        if not isinstance(self.content, str):
            given = self.content or []
            blocks = [_block(block, at) for at, block in enumerate([given] if isinstance(given, dict) else given)]
            structs.force_setattr(self, "content", blocks)


TURNS = {name: role for name, role in schema.ROLES.items() if role in ("user", "assistant", "system")} | {
    "developer": "system"
}


def _block(block: Any, at: int) -> Json:
    """Returns a block of a turn, which may be a text. Raises ValueError."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, dict):
        raise ValueError(f"content[{at}]: Expected `str | object`, got `{type(block).__name__}`")
    return block


class OfferedTool(schema.WithTruths, frozen=True, kw_only=True):
    """A tool of any kind. Tools of type "custom", or without a type, are the client's own functions."""

    truths = ("strict",)
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Any = None
    parameters: Any = None  # OpenAI's name of input_schema
    strict: schema.Truth | None = None
    function: schema.Function | None = None  # of a tool in the form of chat completions

    @property
    def is_clients(self) -> bool:
        """Returns whether the tool is a function of the client's own."""
        return self.type in (None, "custom", "function")


class ToolChoice(schema.WithTruths, frozen=True, kw_only=True):
    truths = ("disable_parallel_tool_use",)
    type: Literal["auto", "any", "required", "tool", "function", "none"]
    name: str | None = None
    function: schema.NamedFunction | None = None  # in the form of chat completions
    disable_parallel_tool_use: schema.Truth | None = None


OFF = ("disabled", "between_tools")  # types of `thinking` that turn it off


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    display: schema.Label | None = None

    @property
    def is_hidden(self) -> bool:
        """Returns whether the blocks of reasoning come without its text."""
        return self.display == "omitted"


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    user_id: schema.Label | int | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: OutputFormat | None = None
    effort: schema.Label | None = None


class MessagesBody(schema.RequestBody, frozen=True, kw_only=True):
    """The body of both endpoints; count_tokens needs no `max_tokens`."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=schema.MAX_MESSAGES)]
    max_tokens: schema.Tokens | None = None  # 0 computes the prompt alone, for later requests
    system: str | Blocks | None = None
    stop_sequences: schema.StopText | Annotated[list[schema.StopText], Meta(max_length=16)] | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=schema.MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | schema.Label | None = None
    thinking: ThinkingOptions | bool | float | str | None = None  # a switch or an effort, as other servers have it
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an earlier name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /v1/messages and prepares its generation. Raises InvalidRequest."""
    body = read(raw, MessagesBody)
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens: is missing", param="max_tokens", code="missing_required_parameter")
    chat, fields = as_chat(body)
    with fields.renamed():
        generation = chat_generation(chat, context, "msg", prompt_only=not body.max_tokens)
    hides_thinking = isinstance(body.thinking, ThinkingOptions) and body.thinking.is_hidden
    return PreparedAnswer(generation, MessageFormat(generation, hides_thinking), bool(body.stream), fields)


def late_error(error: RequestError) -> bytes:
    """Returns the last event of a stream that failed before its answer began."""
    return event(anthropic_error(error), "error")


def as_chat(body: MessagesBody) -> tuple[Chat, FieldNames]:
    """Returns the equivalent chat request, and the client's names of its fields. Raises InvalidRequest."""
    fields = FieldNames(FIELDS)
    messages = _messages(body, fields)
    if (body.n or 1) > 1:
        raise InvalidRequest("n: one answer at a time", param="n")
    choice = body.tool_choice
    if isinstance(choice, str):
        kind: Any = choice or "auto"
        choice = ToolChoice(type=kind) if kind in TOOL_CHOICES else ToolChoice(type="function", name=choice)
    thinking = isinstance(body.thinking, ThinkingOptions) and body.thinking.type not in (None, *OFF)
    common = {field: getattr(body, field) for field in schema.RequestBody.__struct_fields__}
    chat = {
        **common,
        "n": 1,
        "max_tokens": body.max_tokens or 1,
        "user": _user(body.metadata) or body.user,
        "stop": body.stop_sequences or body.stop,
        "messages": messages,
        "tools": _offered(body.tools or (), fields) or None,
        "tool_choice": _tool_choice(choice, body.tools or ()),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(body) or body.response_format,
        "reasoning_effort": body.output_config.effort if body.output_config else None,
        "chat_template_kwargs": {"enable_thinking": thinking, **(body.chat_template_kwargs or {})},
    }
    if messages[-1]["role"] == "assistant" and messages[-1]["content"] and "tool_calls" not in messages[-1]:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    with fields.renamed():
        return convert(chat, Chat), fields


def _user(metadata: Metadata | None) -> str | None:
    return None if metadata is None or metadata.user_id is None else str(metadata.user_id)


def _messages(body: MessagesBody, fields: FieldNames) -> list[Json]:
    messages: list[Json] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
        fields.messages.append("system")
    latest = max((at for at, turn in enumerate(body.messages) if turn.role == "user"), default=-1)
    for at, turn in enumerate(body.messages):
        where = f"messages[{at}]"
        for message in _turn(turn, where, at == latest):
            messages.append(message)
            fields.messages.append(where)
    return messages


def _system(system: str | list[Json] | None) -> str:
    """Returns the system prompt without the block by which Claude Code is billed."""
    if not isinstance(system, list):
        return system or ""
    blocks = [block for block in system if not str(block.get("text", "")).startswith(BILLING)]
    return text_of_parts(blocks, "system")


def _turn(turn: MessageTurn, where: str, latest: bool) -> list[Json]:
    """Returns one turn as messages; each tool result is a message of its own, before the user's text.

    Blocks that the model cannot read are refused in the `latest` turn of the user, and noted elsewhere.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Json] = []
    own: Json = {"role": turn.role, "content": ""}
    for at, block in enumerate(turn.content or ()):
        match block.get("type"):
            case "thinking":
                own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking") or "")
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                own.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
            case "tool_result":
                text = text_of_result(block.get("content"))
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case _:
                own["content"] += text_of_part(block, f"{where}.content[{at}]" if latest else "")
    return results + ([own] if len(own) > 2 or own["content"] or not results else [])


def _offered(tools: Sequence[OfferedTool], fields: FieldNames) -> list[Json]:
    """Returns the client's own functions. Tools that Anthropic runs, or gives to its models untold, are left out."""
    offered = []
    for at, tool in enumerate(tools):
        if tool.function is not None:
            offered.append({"function": msgspec.to_builtins(tool.function)})
        elif tool.is_clients:
            takes = tool.parameters if tool.input_schema is None else tool.input_schema
            named = {"name": tool.name, "description": tool.description}
            offered.append({"function": {**named, "parameters": takes, "strict": tool.strict}})
        else:
            continue
        fields.tools.append(f"tools[{at}]")
    return offered


def _tool_choice(choice: ToolChoice | None, tools: Sequence[OfferedTool]) -> Any:
    if choice is None:
        return None
    if choice.type in ("tool", "function"):
        name = choice.function.name if choice.function is not None else choice.name
        for tool in tools:
            if tool.name == name and not tool.is_clients:
                message = f"tool_choice: tools of type {tool.type!r} are not run here; only the client's can be called"
                raise InvalidRequest(message, param="tool_choice")
        return {"function": {"name": name}}
    return TOOL_CHOICES[choice.type]


def _response_format(body: MessagesBody) -> Json | None:
    asked = (body.output_config and body.output_config.format) or body.output_format
    return {"type": asked.type, "json_schema": {"schema": asked.schema}} if asked else None


BLOCKS = {"text": "text", "reasoning": "thinking"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat:
    """Writes deltas as message events, or joined as one message."""

    def __init__(self, generation: Generation, hides_thinking: bool = False) -> None:
        self._generation, self._hides_thinking = generation, hides_thinking
        self._open = ""  # kind of the open block; "": none is open
        self._blocks = 0
        self._begun = False

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            yield self._event("message_start", message=self._message([]))
        for delta in deltas:
            for piece in delta.pieces:
                yield from self._call(piece) if piece.call else self._grow(BLOCKS[piece.kind], piece.text)

    def closing_events(self) -> Iterable[bytes]:
        yield from self.events([])  # message_start, where there was no delta
        yield from self._close()
        yield self._event("message_delta", delta=self._stop(), usage=self._usage())
        yield self._event("message_stop")

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield late_error(error)

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        (delta,) = choices
        return self._message([self._block(piece) for piece in delta.pieces]) | self._stop()

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield self._event("content_block_start", index=self._blocks, content_block=empty)
        if kind != "thinking" or not self._hides_thinking:
            yield self._event("content_block_delta", index=self._blocks, delta={"type": f"{kind}_delta", kind: text})

    def _call(self, piece: OutputPiece) -> Iterator[bytes]:
        if piece.begins:
            yield from self._close()
            self._open = "tool_use"
            yield self._event("content_block_start", index=self._blocks, content_block=_tool_use(piece, {}))
        if piece.text:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
            yield self._event("content_block_delta", index=self._blocks, delta=delta)
        if piece.ended:
            yield from self._close()

    def _close(self) -> Iterator[bytes]:
        if self._open:
            yield self._event("content_block_stop", index=self._blocks)
            self._open = ""
            self._blocks += 1

    def _block(self, piece: OutputPiece) -> Json:
        """Returns a whole block."""
        match piece.kind:
            case "call":
                arguments = completed_object(piece.text) if piece.ended == "cut" else piece.text  # as the model wrote
                return _tool_use(piece, msgspec.Raw(arguments.encode()))
            case "reasoning":
                return {"type": "thinking", "thinking": "" if self._hides_thinking else piece.text, "signature": ""}
            case _:
                return {"type": "text", "text": piece.text}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._generation.id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> Json:
        choice = self._generation.choices[0]
        if choice.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
        return {"stop_reason": REASONS.get(choice.finish, choice.finish), "stop_sequence": None}

    def _usage(self) -> Json:
        generation = self._generation
        cached = min(generation.cached_tokens(), generation.prompt_tokens)
        return {
            "input_tokens": generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.choices[0].tokens,
        }


def _tool_use(piece: OutputPiece, given: Json | msgspec.Raw) -> Json:
    assert piece.call is not None
    id, ours = piece.call.id, "call_"
    id = f"toolu_{id.removeprefix(ours)}" if id.startswith(ours) else id  # a dialect's own may tell the model something
    return {"type": "tool_use", "id": id, "name": piece.call.name, "input": given}
