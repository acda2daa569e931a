"""Answers what is not generation: models, tokens, health, metrics, and what the owner of the socket may ask."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.api.backend import Backend
from edgemoe.api.endpoints.chat import prompt_of
from edgemoe.api.generate.generation import check_ids, encode_counted
from edgemoe.api.schema import Chat, Detokenize, Tokenize
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.arrays import Json
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import RequestLimits

_STARTED = int(time.time())


def model_card(info: ModelInfo, context_tokens: int) -> Json:
    """Returns OpenAI's model object, with context length, family, digest and dtype added."""
    return {
        "id": info.id,
        "object": "model",
        "created": _STARTED,
        "owned_by": "edgemoe",
        "max_model_len": context_tokens,
        "family": info.family,
        "digest": info.digest,
        "dtype": info.dtype,
    }


def tokenize(body: Tokenize, text: TextModel, limits: RequestLimits) -> Json:
    """Returns the token ids of a text, or of messages rendered by the chat template. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is None:
        ids = encode_counted(text, body.prompt or "", body.add_special_tokens, limits, "prompt")
    else:
        own = {name: getattr(body, name) for name in Tokenize.__struct_fields__ if name in Chat.__struct_fields__}
        ids = prompt_of(Chat(**own), text, limits)
    return {"count": len(ids), "max_model_len": limits.context_tokens, "tokens": ids}


def detokenize(body: Detokenize, text: TextModel, limits: RequestLimits) -> Json:
    """Returns the text of token ids, special tokens included. Raises InvalidRequest."""
    if len(body.tokens) > limits.context_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.context_tokens} tokens, and there are {len(body.tokens)}",
            param="tokens",
        )
    check_ids(body.tokens, limits.vocab, "tokens")
    return {"prompt": text.vocabulary.text(body.tokens)}


async def reload(request: Request) -> Response:
    """Loads again what can be changed while serving, and says what is in use now."""
    return JSONResponse({"message": await _backend(request).reload()})


async def reach(request: Request) -> Response:
    """Tells how this box and the others reach each other."""
    return JSONResponse({"boxes": await _backend(request).reach()})


def _backend(request: Request) -> Backend:
    if getattr(request.state, "peer_uid", None) is None:
        raise HTTPException(404, "this is for clients of the Unix socket")
    backend: Backend = request.app.state.api.backend
    return backend
