"""Answers Ollama's requests that generate nothing: the served model, its capabilities, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import edgemoe
from edgemoe.api.endpoints.ollama import served_name, tagged_name
from edgemoe.api.endpoints.ollama_format import rfc3339
from edgemoe.api.generate.generation import ANY_MODEL, RequestContext
from edgemoe.api.http import responding as http
from edgemoe.api.http.event_text import json_line
from edgemoe.api.resources import Api
from edgemoe.api.schema import read
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest, ModelNotFound
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import ModelInfo, commonest_first
from edgemoe.types.principal import Principal

VERSION = "0.24.0"  # of Ollama, whose API this is: clients ask for the features of a release
NEVER = "9999-12-31T23:59:59Z"  # a model is not unloaded
FORMAT = "edgemoe"  # of the store
TIER_BYTES = 'edgemoe_tier_bytes{tier="%s"}'
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
    """Answers GET /api/tags with the served model and its aliases."""
    api = _api(request)
    info, _ = await api.backend.model()
    names = dict.fromkeys(tagged_name(name) for name in (info.id, *api.settings.aliases) if name != ANY_MODEL)
    return JSONResponse({"models": [_entry(name, info, api) | {"modified_at": _modified(api)} for name in names]})


async def list_loaded(request: Request) -> Response:
    """Answers GET /api/ps with the served model, unless it is still being loaded."""
    api = _api(request)
    if api.backend.state != "ready":
        return JSONResponse({"models": []})
    info, limits = await api.backend.model()
    ram_bytes, vram_bytes = (_tier_bytes(api.backend.metrics(), tier) for tier in ("ram", "vram"))
    held = {"size": ram_bytes + vram_bytes, "size_vram": vram_bytes}
    rest = {"expires_at": NEVER, "context_length": limits.context_tokens}
    return JSONResponse({"models": [_entry(tagged_name(info.id), info, api) | held | rest]})


async def show(request: Request) -> Response:
    """Answers POST /api/show. Raises InvalidRequest, ModelNotFound."""
    body, context = await _read(request)
    name = served_name(body.model or body.name, context)
    api = _api(request)
    info, limits = await api.backend.model()
    can, template = api.text.capabilities, api.text.template.source if api.text.template is not None else ""
    parameters = "\n".join(_parameters(api.text, limits.context_tokens))
    return JSONResponse(
        {
            "modelfile": f"# Served by edgemoe {edgemoe.__version__}\nFROM {name}\n",
            "parameters": parameters,
            "template": template + (SUFFIX_NOTE if "insert" in can else ""),
            "details": _details(info, api),
            "model_info": _model_info(info, limits.context_tokens, api),
            "capabilities": can,
            "modified_at": _modified(api),
        }
    )


async def pull(request: Request) -> Response:
    """Answers POST /api/pull: there is nothing to fetch for the served model. Raises InvalidRequest, ModelNotFound."""
    body, context = await _read(request)
    asked = body.model or body.name
    try:
        served_name(asked, context)
    except ModelNotFound as error:
        instead = f"{error}: {context.model!r} is served here; `edgemoe pull` fetches others"
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


async def _read(request: Request) -> tuple[ModelBody, RequestContext]:
    api = _api(request)
    principal: Principal = request.state.principal
    with api.bodies.open(principal) as body:
        raw = await api.bodies.read(body, request)
        async with http.while_connected(request.receive):
            asked = await api.in_thread(principal, read, raw, ModelBody)
            return asked, await api.context(principal)


def _entry(name: str, info: ModelInfo, api: Api) -> Json:
    return {
        "name": name,
        "model": name,
        "size": api.store.disk_bytes,
        "digest": info.digest,
        "details": _details(info, api),
    }


def _details(info: ModelInfo, api: Api) -> Json:
    experts = commonest_first(info.encodings)[0] if info.encodings else info.dtype
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": info.family,
        "families": [info.family],
        "parameter_size": parameter_size(api.store.parameters),
        "quantization_level": LEVELS.get(experts, experts.upper()),
    }


def _model_info(info: ModelInfo, context_tokens: int, api: Api) -> Json:
    """Returns facts by GGUF's names."""
    family = info.family
    return {
        "general.architecture": family,
        "general.basename": info.id,
        **({"general.parameter_count": api.store.parameters} if api.store.parameters else {}),
        f"{family}.context_length": context_tokens,
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


def _tier_bytes(metrics: Mapping[str, float], tier: str) -> int:
    return int(metrics.get(TIER_BYTES % tier, 0))


def _modified(api: Api) -> str:
    return rfc3339(datetime.fromtimestamp(api.store.modified_s, UTC))


def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api
