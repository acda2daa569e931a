"""Answers requests that generate nothing: models, tokens, health, metrics, and requests of the socket's owner.

Clients that send `anthropic-version` get the lists of models of Anthropic's API.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgemoe
from edgemoe.api.endpoints import anthropic, responses
from edgemoe.api.endpoints.chat_completions import offered_tools, render, tokenize_prompt
from edgemoe.api.generate.generation import ANY_MODEL, RequestContext
from edgemoe.api.generate.request_limits import check_ids, encode_counted
from edgemoe.api.http import responding as http
from edgemoe.api.http.distant_answer import collected, forwarded_body
from edgemoe.api.metrics import CONTENT_TYPE
from edgemoe.api.model_wish import NO_WISH, read_wish
from edgemoe.api.resources import Api, ListedModel
from edgemoe.api.schema import Chat, Detokenize, Tokenize, read
from edgemoe.errors import InvalidRequest, ModelNotFound
from edgemoe.types.json_object import Json
from edgemoe.types.request import Principal

R = TypeVar("R", Tokenize, Detokenize, Chat, anthropic.MessagesBody, responses.ResponsesBody)

# names of the context's length, as vLLM, OpenRouter, LM Studio, Groq, Mistral and Together have them
CONTEXT_FIELDS = (
    "max_model_len",
    "context_length",
    "context_window",
    "max_context_length",
    "loaded_context_length",
    "max_input_tokens",
    "max_output_tokens",
)
MODALITIES = {"input_modalities": ["text"], "output_modalities": ["text"], "modality": "text->text"}
PARAMETERS = {  # that OpenRouter lists, by the capability that they need
    "": ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "response_format"),
    "tools": ("tools", "tool_choice"),
    "thinking": ("reasoning", "include_reasoning"),
}
STATES = {"unloaded": "not-loaded", "loading": "loading", "failed": "failed"}  # as LM Studio has the first
LLAMA_STATES = ("unloaded", "loading", "failed")  # of its router's models, that are not "loaded"
_STARTED = int(time.time())


async def list_models(request: Request) -> Response:
    """Answers GET /v1/models with the served models and the first one's aliases."""
    api = _api(request)
    cards = model_cards(await api.listed(), api.settings.aliases)
    if http.is_anthropic(request.scope):
        return JSONResponse(models_page(cards["data"], request.query_params))
    return JSONResponse(cards)


def model_cards(listed: Sequence[ListedModel], aliases: Sequence[str]) -> Json:
    """Returns OpenAI's list of models; `aliases` are other names of the first one."""
    first, *others = [_model_card(model) for model in listed]
    others_of_first = [name for name in aliases if name not in (ANY_MODEL, first["id"])]
    named = [first | {"id": name, "root": first["id"]} for name in others_of_first]
    cards = [first, *named, *others]
    return {"object": "list", "data": cards, **_only_page([card["id"] for card in cards])}


def _only_page(ids: Sequence[str]) -> Json:
    """Returns the fields by which Anthropic's clients know that a list is whole."""
    return {"first_id": ids[0], "last_id": ids[-1], "has_more": False}


async def describe_model(request: Request) -> Response:
    """Answers GET /v1/models/NAME. Raises ModelNotFound."""
    api, name = _api(request), request.path_params["name"]
    if api.models is None:
        (await api.context(request.state.principal)).check_model(name)
    card = _model_card(await api.find_listed(name))
    return JSONResponse(model_info(card) if http.is_anthropic(request.scope) else card)


def _model_card(model: ListedModel) -> Json:
    """Returns OpenAI's model object, with the fields by which clients of other servers know a model."""
    can, info = list(model.capabilities), model.info
    return {
        "id": model.name,
        "object": "model",
        "display_name": model.name,
        "created": _STARTED,
        "created_at": datetime.fromtimestamp(_STARTED, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "edgemoe",
        **dict.fromkeys(CONTEXT_FIELDS, model.context_tokens),
        "meta": {"n_ctx": model.context_tokens, "n_ctx_train": model.context_tokens},  # llama.cpp's
        "type": "llm",
        "state": STATES.get(model.state, "loaded"),
        "status": {"value": model.state if model.state in LLAMA_STATES else "loaded"},
        "capabilities": can + ["tool_use"] * ("tools" in can),
        "supported_parameters": [
            name for need, names in PARAMETERS.items() if not need or need in can for name in names
        ],
        "architecture": MODALITIES,
        **MODALITIES,
        "publisher": "edgemoe",
        "arch": info.family if info is not None else "",
        "quantization": (info.encodings or (info.dtype,))[0] if info is not None else "",
        "compatibility_type": "edgemoe",
        "family": info.family if info is not None else "",
        "digest": info.digest if info is not None else "",
        "dtype": info.dtype if info is not None else "",
        "pinned": model.is_pinned,
        "idle_s": model.idle_s,
        "memory_bytes": model.ram_bytes + model.vram_bytes,
        **({"boxes": list(model.boxes)} if model.boxes else {}),
    }


EMBEDDINGS = (  # paths of OpenAI, llama.cpp and vLLM, for models of other kinds
    *("/v1/embeddings", "/embedding", "/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
    *("/v1/score", "/score", "/pooling", "/classify"),
)


async def refuse_embeddings(request: Request) -> Response:
    """Raises ModelNotFound: a generating model has no embeddings and no scores of documents."""
    raise ModelNotFound("the model served here has no embeddings, and ranks no documents", code="no_embeddings")


# --- tokens ------------------------------------------------------------------------------------------------------


async def tokenize(request: Request) -> Response:
    """Answers POST /tokenize with the token ids of a text, or of messages rendered by the chat template."""
    return await _answer_in_thread(request, Tokenize, _tokenized)


async def detokenize(request: Request) -> Response:
    """Answers POST /detokenize with the text of token ids, special tokens included."""
    return await _answer_in_thread(request, Detokenize, _detokenized)


async def count_tokens(request: Request) -> Response:
    """Answers POST /v1/messages/count_tokens with the length of a prompt."""
    return await _answer_in_thread(request, anthropic.MessagesBody, _counted)


async def count_input_tokens(request: Request) -> Response:
    """Answers POST /v1/responses/input_tokens with the length of a prompt."""
    return await _answer_in_thread(request, responses.ResponsesBody, _input_tokens)


async def count_chat_tokens(request: Request) -> Response:
    """Answers llama.cpp's POST /v1/chat/completions/input_tokens with the length of a chat's prompt."""
    return await _answer_in_thread(request, Chat, _chat_tokens)


async def apply_template(request: Request) -> Response:
    """Answers llama.cpp's POST /apply-template with the prompt of a chat as text."""
    return await _answer_in_thread(request, Chat, _rendered)


async def _answer_in_thread(request: Request, kind: type[R], work: Callable[[R, RequestContext], Json]) -> Response:
    """Decodes the body as a `kind` and answers with `work(body, context)`, both in a thread."""
    api = _api(request)
    principal: Principal = request.state.principal

    def decode_and_work(context: RequestContext, raw: bytes) -> Response:
        body = read(raw, kind)
        context.check_model(body.model)
        return JSONResponse(work(body, context))

    with api.bodies.open(principal) as body:
        raw = await api.bodies.read(body, request)
        async with http.while_connected(request.receive):
            asked = NO_WISH if api.models is None else await api.in_thread(principal, read_wish, raw)
            if (boxes := api.elsewhere(asked, request)) is not None:
                return await collected(boxes(forwarded_body(request, raw)))
            async with api.chosen(asked) as chosen, api.large(raw, principal):
                return await chosen.in_thread(principal, decode_and_work, await chosen.context(principal), raw)


def _tokenized(body: Tokenize, context: RequestContext) -> Json:
    text, limits = context.text, context.limits
    if [body.prompt, body.content, body.messages].count(None) != 2:
        raise InvalidRequest("give one of prompt, content and messages", param="prompt")
    if body.messages is None:
        special = body.content is None if body.add_special_tokens is None else body.add_special_tokens
        words = body.prompt or body.content or ""
        if body.parse_special is False and (mark := next((one for one in text.vocabulary.special if one in words), "")):
            why = f"parse_special: {mark!r} in a text is always the special token here"
            raise InvalidRequest(why, param="parse_special", code="unsupported_parameter")
        ids = encode_counted(text, words, special, limits, "prompt")
    else:
        own = {name: getattr(body, name) for name in Tokenize.__struct_fields__ if name in Chat.__struct_fields__}
        ids = tokenize_prompt(Chat(**own), text, limits)
    tokens: list[Any] = ids
    if body.with_pieces:
        tokens = [{"id": id, "piece": _piece(text.vocabulary.bytes_of(id))} for id in ids]
    texts = {"token_strs": [text.vocabulary.name(id) for id in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": limits.context_tokens, "tokens": tokens, **texts}


def _piece(raw: bytes) -> str | list[int]:
    """Returns a token as llama.cpp does: its text, or its bytes where these are not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _detokenized(body: Detokenize, context: RequestContext) -> Json:
    limits = context.limits
    if len(body.tokens) > limits.context_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.context_tokens} tokens, and there are {len(body.tokens)}",
            param="tokens",
        )
    check_ids(body.tokens, limits.vocab, "tokens")
    text = context.text.vocabulary.text(body.tokens)
    return {"prompt": text, "content": text}


def _counted(body: anthropic.MessagesBody, context: RequestContext) -> Json:
    plain, fields = anthropic.as_chat(body)
    with fields.renamed():
        return {"input_tokens": len(tokenize_prompt(plain, context.text, context.limits))}


def _input_tokens(body: responses.ResponsesBody, context: RequestContext) -> Json:
    plain, fields, _ = responses.as_chat(body)
    with fields.renamed():
        count = len(tokenize_prompt(plain, context.text, context.limits))
    return {"object": "response.input_tokens", "input_tokens": count}


def _chat_tokens(body: Chat, context: RequestContext) -> Json:
    return {"object": "response.input_tokens", "input_tokens": len(tokenize_prompt(body, context.text, context.limits))}


def _rendered(body: Chat, context: RequestContext) -> Json:
    return {"prompt": render(body, offered_tools(body)[0], context.text)}


# --- the daemon --------------------------------------------------------------------------------------------------


async def version(request: Request) -> Response:
    """Answers GET /version."""
    return JSONResponse({"version": edgemoe.__version__})


async def tokenizer_info(request: Request) -> Response:
    """Answers GET /tokenizer_info with the tokenizer's configuration, chat template and dialect."""
    return JSONResponse(_api(request).text.about())


async def health(request: Request) -> Response:
    """Answers GET /health: the state only, to a client without a key; status 503 unless the daemon is ready."""
    api = _api(request)
    about = api.describe() if request.state.known else {"status": api.state}
    return JSONResponse(about, 200 if api.state == "ready" else 503)


async def metrics(request: Request) -> Response:
    """Answers GET /metrics."""
    api = _api(request)
    figures = {api.metrics.model: api.backend.metrics()} if api.models is None else api.models.metrics()
    return Response(api.metrics.render(figures), media_type=CONTENT_TYPE)


async def reload(request: Request) -> Response:
    """Answers POST /reload, by the Unix socket only: reloads settings and exports that can change while serving."""
    api = _owner_api(request)
    return JSONResponse({"message": await (api.backend.reload() if api.choice is None else api.choice.reload())})


async def members(request: Request) -> Response:
    """Answers GET /cluster, by the Unix socket only: the boxes of the cluster."""
    return JSONResponse(await _owner_api(request).backend.list_members())


async def change_members(request: Request) -> Response:
    """Answers POST /cluster?verb=...&node=...: changes the members, for the daemon's own user and root only."""
    backend, asked = _owner_api(request).backend, request.query_params
    if request.state.peer_uid not in (0, os.geteuid()):
        raise HTTPException(403, "only the daemon's own user and root change the members of the cluster")
    try:
        hours = float(asked.get("hours", "24"))
    except ValueError as error:
        raise InvalidRequest(f"hours must be a number: {error}", param="hours") from error
    said = await backend.change_members(
        asked.get("verb", ""), asked.get("node", ""), dead=asked.get("dead") == "1", hours=hours
    )
    return JSONResponse({"message": said})


async def reach(request: Request) -> Response:
    """Answers GET /reach, by the Unix socket only: how this box and the others reach each other."""
    return JSONResponse({"boxes": await _owner_api(request).backend.reach()})


def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api


def _owner_api(request: Request) -> Api:
    """Returns the application's Api. Raises HTTPException (404) for a request that came by TCP."""
    if getattr(request.state, "peer_uid", None) is None:
        raise HTTPException(404, "this is for clients of the Unix socket")
    return _api(request)


EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = (("adaptive", True), ("enabled", True), ("disabled", False), ("between_tools", False))  # types of requests
MOST_LISTED = 1000  # of one page, as there


def models_page(cards: Sequence[Json], asked: Mapping[str, str]) -> Json:
    """Returns a page of the models by `limit`, `after_id` and `before_id`. Raises InvalidRequest."""
    ids = [str(card["id"]) for card in cards]
    limit = asked.get("limit", str(MOST_LISTED))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST_LISTED):
        raise InvalidRequest(f"limit: give 1 to {MOST_LISTED}", param="limit", code="invalid_value")
    first, end, many = 0, len(ids), int(limit)
    if (name := asked.get("after_id")) is not None:
        first = _place(ids, name, "after_id") + 1
    if (name := asked.get("before_id")) is not None:
        end = _place(ids, name, "before_id")
        first = max(first, end - many)
    shown = [model_info(card) for card in cards[first:end][:many]]
    has_more = first > 0 if "before_id" in asked else first + many < end
    edges = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"data": shown, "has_more": has_more, **edges}


def model_info(card: Json) -> Json:
    """Returns Anthropic's object of the model that has OpenAI's object `card`."""
    thinks, plain = "thinking" in card["capabilities"], _supported(False)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["display_name"],
        "created_at": card["created_at"],
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": card["max_input_tokens"],
        "max_tokens": card["max_output_tokens"],
        "capabilities": {
            "batch": plain,
            "citations": plain,
            "code_execution": plain,
            "context_management": plain,
            "effort": _supported(thinks) | dict.fromkeys(EFFORTS, _supported(thinks)),
            "image_input": plain,
            "pdf_input": plain,
            "server_tools": plain | {"code_execution": plain, "web_search": plain},
            "structured_outputs": _supported(True),
            "thinking": _supported(thinks) | {"types": {kind: _supported(thinks or not on) for kind, on in THINKING}},
        },
    }


def _supported(is_so: bool) -> dict[str, Any]:
    return {"supported": is_so}


def _place(ids: Sequence[str], name: str, field: str) -> int:
    if name not in ids:
        raise InvalidRequest(f"{field}: no model has this id", param=field, code="invalid_value")
    return ids.index(name)
