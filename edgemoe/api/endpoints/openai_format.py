"""What OpenAI's two older endpoints have in common: one head for every object, and how streams end."""

from __future__ import annotations

from collections.abc import Iterable

from edgemoe.api.generate.generation import Generation
from edgemoe.api.http.refusals import error_body
from edgemoe.api.http.sse import DONE, FINGERPRINT, event
from edgemoe.api.schema import Chat, Completion
from edgemoe.errors import RequestError
from edgemoe.types.arrays import Json


class OpenAIFormat:
    """Writes the chunks of a stream, its last ones included. `chunk_object` is what a chunk calls itself."""

    chunk_object: str

    def __init__(self, job: Generation, body: Chat | Completion) -> None:
        self._job = job
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    def end(self) -> Iterable[bytes]:
        if self._usage:
            yield self._chunk([], self._job.usage(), last=True)
        yield DONE

    def error(self, error: RequestError) -> Iterable[bytes]:
        yield event(error_body(error))
        yield DONE

    def _head(self, kind: str) -> Json:
        job = self._job
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": job.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choices: list[Json], usage: Json | None = None, last: bool = False) -> bytes:
        head = self._head(self.chunk_object) | {"choices": choices}
        head |= {"timings": self._job.timings()} if last else {}
        return event(head | {"usage": usage} if self._usage else head)
