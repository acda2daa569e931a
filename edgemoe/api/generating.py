"""The way of a generating request from its body to its answer, for every endpoint that generates."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.api.endpoints.ollama_format import OllamaFormat
from edgemoe.api.generate.generation import (
    PreparedAnswer,
    RequestContext,
    run_generation,
)
from edgemoe.api.generate.held_answer import ASKS_FRAMES, FrameHead, HeldAnswer, end_of, read_held
from edgemoe.api.http import responding as http
from edgemoe.api.http.distant_answer import forwarded_body, pass_on
from edgemoe.api.http.event_text import json_line, ollama_error
from edgemoe.api.http.responding import SERVER_SENT_EVENTS, WHOLE, ClientAnswer, StreamForm
from edgemoe.api.model_wish import ModelWish, read_ollama_wish, read_wish
from edgemoe.api.resources import Api
from edgemoe.api.schema import read
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.request import Principal

SMALL_BYTES = 1 << 16  # bodies in which the event loop itself looks for the model's name

Prepare = Callable[
    [RequestContext, bytes], PreparedAnswer | Response
]  # decodes a body; prepares its generation, if any


class Generating:
    """An endpoint that prepares the body in a thread, tries its grammar, runs it and sends the answer."""

    def __init__(self, prepare: Prepare, body: type[msgspec.Struct], late_error: Callable[[RequestError], bytes]):
        """Takes the type of the body, and the last words of a stream that fails before its answer has begun."""
        self._prepare, self._body, self._late_error = prepare, body, late_error

    def wish(self, raw: bytes) -> ModelWish:
        """Returns the model that a body asks for. Raises InvalidRequest."""
        return read_wish(raw)

    def form(self, wish: ModelWish) -> StreamForm:
        """Returns the form of a stream."""
        return SERVER_SENT_EVENTS

    def unloaded(self, name: str | None) -> Response | None:
        """Returns the answer to a request that only unloads a model; None where there are none."""
        return None

    async def run(self, request: Request) -> ASGIApp:
        """Returns the application that answers the request."""
        shared: Api = request.app.state.api
        principal: Principal = request.state.principal

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with contextlib.AsyncExitStack() as held:
                with shared.bodies.open(principal) as body:
                    whole = await shared.bodies.read(body, request)
                    part, raw = read_held(request.headers, whole)
                    small = len(raw) <= SMALL_BYTES
                    wish = self.wish(raw) if small else await shared.in_thread(principal, self.wish, raw)
                    in_frames = wish.is_stream and ASKS_FRAMES in request.headers
                    if (boxes := shared.elsewhere(wish, request)) is not None:
                        async with http.while_connected(receive):
                            late_error = self._late_error if wish.is_stream and not in_frames else None
                            await pass_on(boxes(forwarded_body(request, whole)), send, late_error)
                        return
                    kept = await held.enter_async_context(self._kept(shared, wish, scope, send, in_frames))
                    async with http.while_connected(receive):
                        if wish.unloads and (unloaded := await self._unload(shared, wish)) is not None:
                            await unloaded(scope, receive, kept.send)
                            return
                        if shared.loading(wish):  # faults of the body alone are told before that
                            await shared.in_thread(principal, read, raw, self._body)
                        api = await held.enter_async_context(shared.chosen(wish))
                        api.backend.check_room(principal, wish.choices)
                        async with shared.large(raw, principal):
                            context = await api.context(principal)
                            prepared = await api.in_thread(principal, self._prepare, context, raw)
                            if isinstance(prepared, PreparedAnswer):
                                generation = prepared.generation
                                if part is not None:
                                    await api.in_thread(principal, _skip_held, prepared, part, context.limits.vocab)
                                with prepared.fields.renamed():
                                    generation.constrain(await api.grammars.first(generation.grammar, principal))
                    del raw, whole
                if isinstance(prepared, Response):
                    await prepared(scope, receive, kept.send)
                    return
                async with http.while_connected(receive):
                    deltas = run_generation(generation, api.backend, api.metrics, api.settings.request_timeout_s)
                    await http.reply(kept, prepared, deltas)

        return answer

    @contextlib.asynccontextmanager
    async def _kept(
        self, shared: Api, wish: ModelWish, scope: Scope, send: Send, in_frames: bool
    ) -> AsyncIterator[ClientAnswer]:
        """Yields the answer, whose client hears of it while it has to wait. Tells errors once it has begun.

        Without a stream the connection ends after an error: nothing else shows that the answer, begun with 200, failed.
        """
        form = self.form(wish) if wish.is_stream else WHOLE
        kept = ClientAnswer(send, form, lambda: shared.loading(wish), in_frames=in_frames)
        try:
            async with kept.kept():
                yield kept
        except RequestError as error:
            if not kept.is_begun:
                raise
            whole = msgspec.json.encode(http.error_object(error, scope))
            words = self._late_error(error) if wish.is_stream else whole
            await kept.part(words, more=not wish.is_stream, head=FrameHead(end=end_of(error)))

    async def _unload(self, shared: Api, wish: ModelWish) -> Response | None:
        if shared.models is None or (answer := self.unloaded(wish.name)) is None:
            return None
        await shared.models.release(wish.name)
        return answer


def _skip_held(prepared: PreparedAnswer, held: HeldAnswer, vocab: int) -> None:
    """Writes the events that the client holds, to nobody: the next ones follow them. Raises InvalidRequest."""
    if not prepared.is_stream:
        raise InvalidRequest("held: only streams go on behind a part", code="invalid_held")
    prepared.generation.resume(held, vocab)
    for deltas in prepared.generation.replay():
        for _ in prepared.answer_format.events(deltas):
            pass


class OllamaGenerating(Generating):
    """An endpoint of Ollama's API: streams of JSON lines, which are the default."""

    def __init__(self, prepare: Prepare, body: type[msgspec.Struct], lines: Callable[[str], OllamaFormat]) -> None:
        super().__init__(prepare, body, lambda error: json_line(ollama_error(error)))
        self._lines = lines

    def wish(self, raw: bytes) -> ModelWish:
        return read_ollama_wish(raw)

    def form(self, wish: ModelWish) -> StreamForm:
        line: Any = self._lines(wish.name or "")
        return StreamForm(b"application/x-ndjson", lambda _: json_line(line.waiting()))

    def unloaded(self, name: str | None) -> Response:
        return JSONResponse(self._lines(name or "").empty("unload"))
