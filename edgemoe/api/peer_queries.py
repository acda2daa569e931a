"""Answers the GETs of llama.cpp's server, vLLM, SGLang and TGI that monitors and pages look at a server by.

Sources: the references of these servers. docs/api.md has the table.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgemoe
from edgemoe.api.resources import Api, ListedModel
from edgemoe.errors import EngineUnavailable, InvalidRequest
from edgemoe.types.json_object import Json
from edgemoe.types.snapshot import RequestProgress

REFUSALS: tuple[tuple[str, str], ...] = (  # paths of llama.cpp's POSTs, and why
    ("/props", "props cannot be changed: they are settings of the daemon"),
    ("/slots/{slot}", "slots are not saved, restored or erased: prompts are cached by themselves"),
    ("/lora-adapters", "lora-adapters cannot be changed: there are none"),
)
_WHY = dict(REFUSALS)


async def refuse(request: Request) -> Response:
    """Raises InvalidRequest with the reason for the path."""
    raise InvalidRequest(_WHY[request.scope["route"].path], code="unsupported_endpoint")


async def props(request: Request) -> Response:
    """Answers llama.cpp's GET /props."""
    api = _api(request)
    info, limits = await api.backend.model()
    template, can = api.text.template, api.text.capabilities
    names = api.text.special_names
    return JSONResponse(
        {
            "default_generation_settings": {
                **_slot(0, limits.context_tokens, None),
                "params": {"n_predict": -1, "stream": True, **api.text.defaults},
            },
            "total_slots": _total_slots(api),
            "model_path": info.id,
            "model_alias": info.id,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template.source if template is not None else "",
            "chat_template_caps": {"supports_tools": "tools" in can, "supports_tool_calls": "tools" in can},
            "bos_token": names.get("bos_token", ""),
            "eos_token": names.get("eos_token", ""),
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "webui": True,
            "is_sleeping": False,
            "build_info": f"edgemoe-{edgemoe.__version__}",
        }
    )


async def slots(request: Request) -> Response:
    """Answers llama.cpp's GET /slots: places for sequences, without their texts.

    Raises EngineUnavailable where all are taken and the client asks for that by `fail_on_no_slot`.
    """
    api = _api(request)
    _, limits = await api.backend.model()
    total, live = _total_slots(api), int(api.describe()["requests"]["live"])
    if live >= total and request.query_params.get("fail_on_no_slot"):
        raise EngineUnavailable("no slot is free")
    first = next(iter(api.snapshots()), None)
    shown = first.snapshot.requests if first is not None and first.snapshot is not None else ()
    running = [one for one in shown if one.phase != "waiting"][: min(total, live)]
    places = [*running, *[None] * (total - len(running))]
    return JSONResponse([_slot(at, limits.context_tokens, one) for at, one in enumerate(places)])


def _total_slots(api: Api) -> int:
    return int(api.describe()["requests"]["slots"])


def _slot(id: int, context_tokens: int, progress: RequestProgress | None) -> Json:
    """Returns a slot; `progress` is that of its request, None of an idle one."""
    slot: Json = {"id": id, "n_ctx": context_tokens, "speculative": False, "is_processing": progress is not None}
    if progress is None:
        return slot
    computed = min(progress.computed, progress.prompt_tokens)
    return slot | {
        "n_prompt_tokens": progress.prompt_tokens,
        "n_prompt_tokens_processed": computed,
        "next_token": {"has_next_token": True, "n_decoded": progress.emitted},
    }


async def ping(request: Request) -> Response:
    """Answers vLLM's GET and POST /ping: 200 if the daemon is ready, else 503, without a body."""
    return Response(status_code=200 if _api(request).state == "ready" else 503)


async def load(request: Request) -> Response:
    """Answers vLLM's GET /load with the number of requests that wait or run."""
    return JSONResponse({"server_load": _api(request).describe()["requests"]["live"]})


async def is_sleeping(request: Request) -> Response:
    """Answers vLLM's GET /is_sleeping."""
    return JSONResponse({"is_sleeping": False})


async def adapters(request: Request) -> Response:
    """Answers llama.cpp's GET /lora-adapters: there are none."""
    return JSONResponse([])


async def model_info(request: Request) -> Response:
    """Answers SGLang's GET /get_model_info and TGI's GET /info about the first model."""
    model = (await _api(request).listed())[0]
    return JSONResponse(_facts(model))


def _facts(model: ListedModel) -> Json:
    family = model.info.family if model.info is not None else ""
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "is_generation": True,
        "model_type": family,
        "model_id": model.name,
        "model_dtype": model.info.dtype if model.info is not None else "",
        "max_total_tokens": model.context_tokens,
        "max_input_tokens": model.context_tokens - 1,
        "context_length": model.context_tokens,
        "version": edgemoe.__version__,
    }


async def greet(request: Request) -> Response:
    """Answers GET /lmstudio-greeting, by which LM Studio's library finds a server."""
    return JSONResponse({"lmstudio": True})


def _api(request: Request) -> Api:
    api: Api = request.app.state.api
    return api
