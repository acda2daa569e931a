"""Answers Ollama's requests that generate nothing: the served model, its capabilities, and refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import edgemoe
from edgemoe.api.endpoints.ollama import served_name, tagged_name
from edgemoe.api.endpoints.ollama_format import rfc3339
from edgemoe.api.generate.generation import ANY_MODEL
from edgemoe.api.http import responding as http
from edgemoe.api.http.distant_answer import collected, forwarded_body
from edgemoe.api.http.event_text import json_line
from edgemoe.api.model_wish import ModelWish
from edgemoe.api.resources import Api, ListedModel
from edgemoe.api.schema import read
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest, ModelNotFound
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import commonest_first
from edgemoe.types.request import Principal

VERSION = "0.24.0"  # of Ollama, whose API this is: clients ask for the features of a release
NEVER = "9999-12-31T23:59:59Z"  # a model is not unloaded
FORMAT = "edgemoe"  # of the store
LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
SCALES = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))  # as Ollama rounds numbers of parameters
SUFFIX_NOTE = "{#- .Suffix: /api/generate takes a `suffix` -#}"  # for clients that look for it in the template

_KEEPS = "this daemon serves the model that it was started with, and keeps no others"
REFUSALS: tuple[tuple[str, tuple[str, ...], str], ...] = (  # path, methods, why
    ("/api/create", ("POST",), f"create is not supported: {_KEEPS}; `edgemoe pack` makes a store of a checkpoint"),
    ("/api/copy", ("POST",), f"copy is not supported: {_KEEPS}; api.aliases gives the model further names"),
    ("/api/push", ("POST",), f"push is not supported: {_KEEPS}"),
    ("/api/delete", ("DELETE",), f"delete is not supported: {_KEEPS}; `edgemoe models remove` deletes a store"),
    ("/api/blobs/{digest}", ("POST", "HEAD"), f"blobs are not supported: {_KEEPS}"),
    ("/api/embed", ("POST",), "embed is not supported: the model served here has no embeddings"),
    ("/api/embeddings", ("POST",), "embeddings is not supported: the model served here has no embeddings"),
)


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /api/show and /api/pull."""

    model: str | None = None
    name: str | None = None  # the earlier name of `model`
    stream: bool | None = None


async def greet(request: Request) -> Response:
    """Answers GET / of Ollama's port, which clients try to see whether there is an Ollama."""
    return PlainTextResponse("Ollama is running")


async def version(request: Request) -> Response:
    """Answers GET /api/version."""
    return JSONResponse({"version": VERSION, "edgemoe": edgemoe.__version__})


async def list_models(request: Request) -> Response:
    """Answers GET /api/tags with the served models and the first one's aliases."""
    api = _api(request)
    first, *others = await api.listed()
    names = dict.fromkeys(tagged_name(name) for name in (first.name, *api.settings.aliases) if name != ANY_MODEL)
    named = [*((name, first) for name in names), *((tagged_name(model.name), model) for model in others)]
    return JSONResponse({"models": [_entry(name, model) | {"modified_at": _modified(model)} for name, model in named]})


async def list_loaded(request: Request) -> Response:
    """Answers GET /api/ps with the loaded models."""
    api = _api(request)
    if api.models is None and api.backend.state != "ready":
        return JSONResponse({"models": []})
    loaded = [model for model in await api.listed() if model.state == "ready"]
    return JSONResponse({"models": [_entry(tagged_name(model.name), model) | _held(model) for model in loaded]})


async def show(request: Request) -> Response:
    """Answers POST /api/show, also for a model that is not loaded. Raises InvalidRequest, ModelNotFound."""
    body, api = await _read(request), _api(request)
    name = body.model or body.name
    if (boxes := api.elsewhere(ModelWish(name), request)) is not None:
        return await collected(boxes(forwarded_body(request, msgspec.json.encode({"model": name}))))
    if api.models is None or not name:
        served_name(name, await api.context(request.state.principal))
    model = await api.find_listed(name)
    text = api.text if api.models is None else (await api.models.text_of(name)).text
    can, template = text.capabilities, text.template.source if text.template is not None else ""
    parameters = "\n".join(_parameters(text, model.context_tokens))
    return JSONResponse(
        {
            "modelfile": f"# Served by edgemoe {edgemoe.__version__}\nFROM {name}\n",
            "parameters": parameters,
            "template": template + (SUFFIX_NOTE if "insert" in can else ""),
            "details": _details(model),
            "model_info": _model_info(model),
            "capabilities": can,
            "modified_at": _modified(model),
        }
    )


async def pull(request: Request) -> Response:
    """Answers POST /api/pull: there is nothing to fetch for a served model. Raises InvalidRequest, ModelNotFound."""
    body, api = await _read(request), _api(request)
    asked = body.model or body.name
    try:
        if api.models is None or not asked:
            served_name(asked, await api.context(request.state.principal))
        else:
            await api.find_listed(asked)
    except ModelNotFound as error:
        there = ", ".join(repr(model.name) for model in await api.listed())
        instead = f"{error}: {there} {'are' if ',' in there else 'is'} served here; `edgemoe pull` fetches others"
        raise ModelNotFound(instead, param="model") from None
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = ({"status": f"{asked} is served here already"}, {"status": "success"})
    return Response(b"".join(map(json_line, lines)), media_type="application/x-ndjson")


async def refuse(request: Request) -> Response:
    """Raises InvalidRequest with the reason for the path."""
    raise InvalidRequest(_WHY[request.scope["route"].path], code="unsupported_endpoint")


_WHY = {path: why for path, _, why in REFUSALS}


def parameter_size(parameters: int) -> str:
    """Returns a number of parameters as Ollama writes it: "30.5B"; "" of 0."""
    for scale, letter, digits in SCALES:
        if parameters >= scale:
            number = parameters / scale
            return f"{number:.0f}{letter}" if number.is_integer() else f"{number:.{digits}f}{letter}"
    return str(parameters) if parameters else ""


async def _read(request: Request) -> ModelBody:
    api = _api(request)
    principal: Principal = request.state.principal
    with api.bodies.open(principal) as body:
        raw = await api.bodies.read(body, request)
        async with http.while_connected(request.receive):
            return await api.in_thread(principal, read, raw, ModelBody)


def _entry(name: str, model: ListedModel) -> Json:
    return {
        "name": name,
        "model": name,
        "size": model.store.disk_bytes,
        "digest": model.info.digest if model.info is not None else "",
        "details": _details(model),
        **({"boxes": list(model.boxes)} if model.boxes else {}),
    }


def _held(model: ListedModel) -> Json:
    """Returns the memory of a loaded model, and when it is unloaded."""
    until = NEVER
    if model.expires_s is not None:
        until = rfc3339(datetime.now(UTC) + timedelta(seconds=model.expires_s))
    size = {"size": model.ram_bytes + model.vram_bytes, "size_vram": model.vram_bytes}
    return size | {"expires_at": until, "context_length": model.context_tokens}


def _details(model: ListedModel) -> Json:
    family, experts = "", ""
    if (info := model.info) is not None:
        family, experts = info.family, commonest_first(info.encodings)[0] if info.encodings else info.dtype
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(model.store.parameters),
        "quantization_level": LEVELS.get(experts, experts.upper()),
    }


def _model_info(model: ListedModel) -> Json:
    """Returns facts by GGUF's names."""
    if (info := model.info) is None:
        return {}
    family = info.family
    return {
        "general.architecture": family,
        "general.basename": info.id,
        **({"general.parameter_count": model.store.parameters} if model.store.parameters else {}),
        f"{family}.context_length": model.context_tokens,
        f"{family}.block_count": info.layers,
        f"{family}.expert_count": info.experts,
        f"{family}.expert_used_count": info.top_k,
        f"{family}.vocab_size": info.vocab,
    }


def _parameters(text: TextModel, context_tokens: int) -> list[str]:
    """Returns lines of a Modelfile: the context's length, and the defaults of sampling."""
    names = {"repetition_penalty": "repeat_penalty"}
    return [
        f"num_ctx {context_tokens}",
        *(f"{names.get(name, name)} {value:g}" for name, value in text.defaults.items()),
    ]


def _modified(model: ListedModel) -> str:
    return rfc3339(datetime.fromtimestamp(model.store.modified_s, UTC))


def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api
