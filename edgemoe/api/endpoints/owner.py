"""Answers POST /reload and GET /reach, which are for clients of the Unix socket."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.api.backend import Backend


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
