"""Decodes the bodies that apps send. A refusal names the field at fault, as the client wrote it.

Unknown fields are ignored. A known but unsupported field is refused if its value would change the answer (REFUSED).
The rest of OpenAI's fields (`metadata`, `store`, `service_tier`, ...) have no effect.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, structs

from edgemoe.api.body_bounds import check_parts, check_values
from edgemoe.api.field_names import FieldNames
from edgemoe.api.peer_fields import MAX_BIASES, MAX_TEXT_BIASES, read_peer_fields, unwrap_extra_body
from edgemoe.api.schema_forms import object_schema
from edgemoe.api.spellings import FALSE, TRUE, bare_scalar
from edgemoe.errors import InvalidRequest
from edgemoe.types.bounds import MAX_MODELS, Repetition

MAX_MESSAGES, MAX_CONTENT_PARTS, MAX_TOOLS, MAX_TOOL_CALLS = 4096, 4096, 1024, 256
MAX_CHOICES = 10_000  # texts to choose from
NEUTRAL_BYTES = 64  # of an unsupported field's value that may be without effect

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31)]
Limit = Annotated[int, Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=1 << 31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasText = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
MAX_ANSWERS = 128  # to one prompt
ChoiceCount = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
StopText = Annotated[str, Meta(max_length=1024)]
Label = Annotated[str, Meta(max_length=512)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
SchemaOrText = dict[str, Any] | bool | str  # a JSON Schema, or JSON text of one
Truth = bool | float | str  # once read a bool

# field -> values without effect; any other is refused. OpenAI's fields first, then other servers' fields.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),  # and the number of choices
    "modalities": (["text"],),
    "suffix": ("",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": ("",),
    "custom_logit_processor": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "prompt_logprobs": (0,),
    "skip_special_tokens": (True,),
    "stop_regex": ("", []),
    "structural_tag": (),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "custom_token_bans": ("",),
    "dynamic_temperature": (False,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "mirostat_mode": (0,),
    "negative_prompt": ("",),
    "penalty_alpha": (0,),
    "smoothing_factor": (0,),
    "xtc_probability": (0,),
    "echo": (False,),
    "image_data": ([],),
    "logprob_token_ids": ([],),
    "post_sampling_probs": (False,),
    "prompt_embeds": ([],),
    "reasoning_format": ("auto", "deepseek", "hidden", "parsed"),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
}


class WithTruths(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a body whose true and false may be numbers or texts."""

    truths: ClassVar[tuple[str, ...]] = ()  # its fields that are a Truth

    def __post_init__(self) -> None:
        for name in self.truths:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                if (word := str(value).lower()) not in (*TRUE, *FALSE):
                    raise ValueError(f"{name}: Expected `bool | null`, got `{type(value).__name__}`")
                structs.force_setattr(self, name, word in TRUE)


class JsonSchema(WithTruths, frozen=True, kw_only=True):
    truths = ("strict",)
    name: str | None = None
    schema: SchemaOrText | None = None
    schema_definition: SchemaOrText | None = None  # Mistral's name of `schema`
    strict: Truth | None = None

    @property
    def own_schema(self) -> dict[str, Any] | bool | str | None:
        """Returns the schema by either name."""
        return self.schema_definition if self.schema is None else self.schema


class ResponseFormat(WithTruths, frozen=True, kw_only=True):
    """A format to constrain the answer to. `type` says which of the other fields counts."""

    truths = ("strict",)
    type: str
    json_schema: JsonSchema | None = None
    schema: SchemaOrText | None = None  # of json_object and json_schema, as Together and llama.cpp have it
    strict: Truth | None = None
    regex: str | None = None
    pattern: str | None = None  # another name of regex
    grammar: str | None = None  # GBNF or Lark
    choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    value: Any = None  # the schema or regex, as TGI has it


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every generating endpoint reads. null means absent throughout."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    text_bias: Annotated[dict[BiasText, Bias], Meta(max_length=MAX_TEXT_BIASES)] | None = None  # of its texts
    max_tokens: Limit | None = None
    min_tokens: Tokens | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    user: Label | None = None
    safety_identifier: Label | None = None  # OpenAI's later name of `user`
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # as vLLM's
    n: ChoiceCount | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    models: Annotated[list[Label], Meta(max_length=MAX_MODELS)] | None = None  # others, as OpenRouter has them


class StreamOptions(WithTruths, frozen=True, kw_only=True):
    truths = ("include_usage",)
    include_usage: Truth | None = None


class Function(WithTruths, frozen=True, kw_only=True, omit_defaults=True):
    truths = ("strict",)
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Any = None  # a schema of an object, or JSON text of one; once read a dict, or None
    strict: Truth | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            structs.force_setattr(self, "parameters", object_schema(self.parameters))
        except ValueError as error:
            raise ValueError(f"parameters: {error}") from None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = "function"
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = "function"
    function: NamedFunction


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | list[Any] | None = None


class CustomCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    input: str | None = None


class PastToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: str | None = "function"
    function: CalledFunction | None = None
    custom: CustomCall | None = None  # of a tool that takes text

    def __post_init__(self) -> None:
        if self.function is None and self.custom is None:
            raise ValueError("Object missing required field `function`")

    @property
    def called(self) -> CalledFunction:
        """Returns the call as one of a function; a custom tool takes its text as `input`."""
        if self.function is not None:
            return self.function
        assert self.custom is not None
        return CalledFunction(name=self.custom.name, arguments={"input": self.custom.input or ""})


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[dict[str, Any]] | None = None  # Mistral's reasoning: text, or parts of text


ROLES: dict[str, Role] = {  # by other servers' names
    **{name: name for name in get_args(Role)},
    "human": "user",
    **dict.fromkeys(("model", "ai", "bot"), "assistant"),
}


class ChatMessage(WithTruths, frozen=True, kw_only=True):
    truths = ("prefix", "partial")
    role: str  # once read a Role
    content: (
        str | Annotated[list[Any], Meta(max_length=MAX_CONTENT_PARTS)] | dict[str, Any] | int | float | bool | None
    ) = None  # a list has texts and ContentParts; a tool's result may be any JSON
    name: Label | None = None
    prefix: Truth | None = None  # the answer goes on with this message, as DeepSeek and Mistral have it
    partial: Truth | None = None  # likewise, as Qwen and Kimi have it
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    tool_calls: Annotated[list[PastToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    function_call: CalledFunction | None = None  # the one call of OpenAI's first form
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.role not in ROLES or ROLES[self.role] != self.role:
            if (role := ROLES.get(self.role.lower())) is None:
                raise ValueError(f"role: Invalid enum value {self.role[:64]!r}")
            structs.force_setattr(self, "role", role)
        if isinstance(self.content, list):
            structs.force_setattr(self, "content", self._parts(self.content))
        elif isinstance(self.content, int | float) and not self.is_result:
            kind = type(self.content).__name__
            raise ValueError(f"content: Expected `str | object | array | null`, got `{kind}`")

    @property
    def is_result(self) -> bool:
        """Returns whether the message has the result of a call."""
        return self.role in ("tool", "function")

    def _parts(self, parts: list[Any]) -> list[Any]:
        """Returns the parts of the content; a result that is any other list as it is."""
        if self.is_result and not all(isinstance(one, str) or _is_part(one) for one in parts):
            return parts
        found = []
        for at, part in enumerate(parts):
            if not isinstance(part, str | dict | ContentPart):
                kind = "null" if part is None else type(part).__name__
                raise ValueError(f"content[{at}]: Expected `str | object`, got `{kind}`")
            try:
                found.append(msgspec.convert(part, ContentPart) if isinstance(part, dict) else part)
            except msgspec.ValidationError as error:
                reason, _, path = str(error).partition(" - at ")
                raise ValueError(f"content[{at}]{path.strip('`').removeprefix('$')}: {reason}") from None
        return found


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type", "text" if "text" in value else None), str)


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the answer is expected to repeat in part."""

    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_CONTENT_PARTS)]
    type: Literal["content"] | None = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class Chat(RequestBody, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Label | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None  # in the answer
    stream_options: StreamOptions | None = None

    @property
    def continues_last(self) -> bool:
        """Returns whether the answer continues the last message; each server has its own field for this."""
        last = self.messages[-1]
        return bool(self.continue_final_message or (last.role == "assistant" and (last.prefix or last.partial)))


class Completion(RequestBody, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[str | TokenId]], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a text, or a chat's messages, to render by the chat template as a chat would be."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's `prompt`, without special tokens unless it asks for them
    messages: Messages | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None  # llama.cpp's: whether special tokens in the text are tokens
    with_pieces: bool | None = None
    return_token_strs: bool | None = None  # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Label | None = None


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


T = TypeVar("T")
_one_at_a_time = threading.Lock()  # msgspec crashes where two threads are the first to convert to a type


def read(body: bytes, kind: type[T]) -> T:
    """Returns the JSON object in `body` as a `kind`; fields that it does not have are ignored.

    Raises InvalidRequest with the path of the first invalid field.
    """
    return read_named(body, kind)[0]


def read_named(body: bytes, kind: type[T]) -> tuple[T, FieldNames]:
    """Returns the JSON object in `body` as a `kind`, and the client's names of its fields. Raises InvalidRequest."""
    check_parts(body)
    if body.lstrip()[:1] not in (b"{", b""):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    fields, clients = _read(lambda: _own_fields(body, kind))
    names = FieldNames(clients, flat_tools="tools" in clients)
    whole = msgspec.json.encode({name: msgspec.Raw(value) for name, value in fields.items()})
    with names.renamed():
        return _read(lambda: msgspec.json.decode(whole, type=kind)), names


def _own_fields(body: bytes, kind: type[T]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the body's fields by this server's names, and the client's names of renamed fields.

    Raises InvalidRequest, and for a part that cannot be read the errors that `_read` expects.
    """
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields = {name: bytes(value) for name, value in raw.items()}
    if issubclass(kind, RequestBody):
        unwrap_extra_body(fields)
        check_values(fields)
        refuse_unsupported(fields, kind)
    return fields, read_peer_fields(fields, kind) if issubclass(kind, msgspec.Struct) else {}


def convert(value: dict[str, Any], kind: type[T]) -> T:
    """Returns `value` as a `kind`. Raises InvalidRequest with the path of the first invalid field."""
    return _read(lambda: msgspec.convert(value, kind, str_keys=True))


def refuse_unsupported(fields: Mapping[str, bytes], kind: type[msgspec.Struct]) -> None:
    """Raises InvalidRequest for the first unsupported field of a body whose value would change the answer."""
    for name, neutral in REFUSED.items():
        raw = fields.get(name, b"null")
        if name in kind.__struct_fields__ or raw == b"null":
            continue
        if name == "best_of" and raw == fields.get("n"):
            continue
        if len(raw) > NEUTRAL_BYTES or msgspec.json.decode(bare_scalar(raw)) not in neutral:
            message = f"{name} is not supported by this server; leave it out"
            raise InvalidRequest(message, param=name, code="unsupported_parameter")


def _read(make: Callable[[], T]) -> T:
    try:
        with _one_at_a_time:
            return make()
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        path = path.removeprefix("`key` in ").strip("`").removeprefix("$").lstrip(".") or _missing(reason)
        if inner := _INNER.match(reason):
            path, reason = f"{path}.{inner[1]}", reason[inner.end() :]
        where = f"{path}: " if path else ""
        raise InvalidRequest(f"{where}{reason}", param=path or None, code=_code(reason)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


_INNER = re.compile(
    r"((?:content|parameters|role|[a-z_]+(?=: Expected `bool))[\w.\[\]]*): "
)  # the path of a fault that a struct itself found


def _code(reason: str) -> str:
    """Returns the stable error code for msgspec's message."""
    if "missing required field" in reason:
        return "missing_required_parameter"
    return "invalid_type" if ", got `" in reason else "invalid_value"


def _missing(reason: str) -> str:
    head, _, tail = reason.partition("missing required field ")
    return tail.strip("`") if not head.strip("Object ") else ""


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Returns the stop strings without empty ones."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)
