"""Answers LM Studio's requests that generate nothing: its lists of models, and refusals."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.api.endpoints.lm_studio import LmStudioModel
from edgemoe.api.http import responding as http
from edgemoe.api.ollama_queries import parameter_size
from edgemoe.api.queries import model_cards
from edgemoe.api.resources import Api, ListedModel
from edgemoe.api.schema import read
from edgemoe.errors import InvalidRequest, ModelNotFound
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import asked_names, commonest_first, plain_name
from edgemoe.types.request import Principal

_FETCHES = "download is not supported: `edgemoe pull` fetches models"
_EMBEDS = "embeddings is not supported: the model served here has no embeddings"
REFUSALS: tuple[tuple[str, tuple[str, ...], str], ...] = (  # path, methods, why
    ("/api/v1/models/download", ("POST",), _FETCHES),
    ("/api/v1/models/download/status/{job}", ("GET",), _FETCHES),
    ("/api/v0/embeddings", ("POST",), _EMBEDS),
)
_WHY = {path: why for path, _, why in REFUSALS}


async def list_models(request: Request) -> Response:
    """Answers GET /api/v1/models as LM Studio does, and in `data` as OpenAI's servers with that base path do."""
    api: Api = request.app.state.api
    listed = await api.listed()
    return JSONResponse({"models": [_model(model) for model in listed], **model_cards(listed, api.settings.aliases)})


async def unload(request: Request) -> Response:
    """Answers POST /api/v1/models/unload, and llama.cpp's /models/unload.

    Raises InvalidRequest for a model that stays loaded, ModelNotFound.
    """
    api: Api = request.app.state.api
    principal: Principal = request.state.principal
    with api.bodies.open(principal) as body:
        raw = await api.bodies.read(body, request)
        async with http.while_connected(request.receive):
            asked = await api.in_thread(principal, read, raw, LmStudioModel)
    name = asked.instance_id or asked.model
    if not name:
        raise InvalidRequest("instance_id is required", param="instance_id", code="missing_required_parameter")
    model = await api.find_listed(name)
    if api.models is None or model.is_pinned:
        if plain_name(model.name) not in asked_names(name):
            raise ModelNotFound(f"the model {name!r} is not served here", param="instance_id")
        raise InvalidRequest(f"{model.name} stays loaded: it is pinned, or the only model", param="instance_id")
    await api.models.release(name)
    return JSONResponse({"instance_id": model.name, "success": True})


async def refuse(request: Request) -> Response:
    """Raises InvalidRequest with the reason for the path."""
    raise InvalidRequest(_WHY[request.scope["route"].path], code="unsupported_endpoint")


def _model(model: ListedModel) -> Json:
    info, loaded = model.info, model.state == "ready"
    encodings = commonest_first(info.encodings) if info is not None else ()
    config = {"context_length": model.context_tokens, "num_experts": info.top_k if info is not None else 0}
    return {
        "type": "llm",
        "publisher": "edgemoe",
        "key": model.name,
        "display_name": model.name,
        "architecture": info.family if info is not None else None,
        "quantization": {
            "name": encodings[0] if encodings else (info.dtype if info is not None else None),
            "bits_per_weight": _bits(model),
        },
        "size_bytes": model.store.disk_bytes,
        "params_string": parameter_size(model.store.parameters) or None,
        "loaded_instances": [{"id": model.name, "config": config}] if loaded else [],
        "max_context_length": model.context_tokens,
        "format": None,
        "capabilities": {"vision": False, "trained_for_tool_use": "tools" in model.capabilities},
        "description": None,
        **({"boxes": list(model.boxes)} if model.boxes else {}),
    }


def _bits(model: ListedModel) -> float | None:
    """Returns the bits of a parameter, of all parameters together."""
    store = model.store
    return round(8 * store.disk_bytes / store.parameters, 2) if store.parameters else None
