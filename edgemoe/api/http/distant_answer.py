"""Passes on the answers of other boxes to requests that this one forwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from edgemoe.api.generate.held_answer import ASKS_FRAMES, HELD_BYTES
from edgemoe.api.http.responding import WHOLE, ClientAnswer
from edgemoe.errors import EngineUnavailable, RequestError
from edgemoe.types.bounds import TEXT_CHARS
from edgemoe.types.request import Principal


@dataclass(frozen=True, slots=True)
class ForwardedBody:
    """A client's POST request, as another box of the cluster may answer it."""

    path: str
    principal: Principal
    body: bytes
    headers: Mapping[str, str]  # that an endpoint reads, by lower-case name


DistantAnswer = Callable[[ForwardedBody], AsyncGenerator[Message, None]]  # messages of ASGI; raises EngineUnavailable


READ_HEADERS = (ASKS_FRAMES, HELD_BYTES, "x-request-id")


def forwarded_body(request: Request, body: bytes) -> ForwardedBody:
    """Returns a request as another box may answer it, with the headers that endpoints read."""
    headers = {name: request.headers[name][:TEXT_CHARS] for name in READ_HEADERS if name in request.headers}
    return ForwardedBody(request.url.path, request.state.principal, body, headers)


async def pass_on(
    messages: AsyncGenerator[Message, None], send: Send, late_error: Callable[[RequestError], bytes] | None
) -> None:
    """Sends another box's answer as it comes. One that breaks off ends by `late_error`, or without an end.

    Raises EngineUnavailable before it has begun.
    """
    answer = ClientAnswer(send, WHOLE)
    try:
        async with aclosing(messages):
            async for message in messages:
                await answer.send(message)
    except RequestError as error:
        if not answer.is_begun:
            raise
        if late_error is not None:
            await answer.part(late_error(error), more=False)


async def collected(messages: AsyncGenerator[Message, None]) -> Response:
    """Returns another box's answer as a whole. Raises EngineUnavailable where it breaks off."""
    status, headers, body, is_whole = 200, dict[str, str](), bytearray(), False
    async with aclosing(messages):
        async for message in messages:
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                body += message["body"]
                is_whole = not message["more_body"]
    if not is_whole:
        raise EngineUnavailable("another box broke off its answer; try again")
    return Response(bytes(body), status, headers | {"content-length": str(len(body))})
