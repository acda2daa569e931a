"""Writes answers of /v1/messages: content blocks (thinking, text, tool_use), streamed as typed events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from edgemoe.api.dialects.tool_calls import OutputPiece
from edgemoe.api.generate.generation import Delta, Generation
from edgemoe.api.http.refusals import anthropic_error
from edgemoe.api.http.sse import event
from edgemoe.errors import RequestError
from edgemoe.types.arrays import Json

BLOCKS = {"text": "text", "reasoning": "thinking"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormat:
    """Writes deltas as message events, or joined as one message."""

    def __init__(self, job: Generation) -> None:
        self._job = job
        self._open = ""  # kind of the open block; "": none is open
        self._blocks = 0
        self._begun = False

    def events(self, deltas: list[Delta]) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            yield self._event("message_start", message=self._message([]))
        for delta in deltas:
            for piece in delta.pieces:
                yield from self._call(piece) if piece.call else self._grow(BLOCKS[piece.kind], piece.text)

    def end(self) -> Iterable[bytes]:
        yield from self.events([])  # message_start, where there was no delta
        yield from self._close()
        yield self._event("message_delta", delta=self._stop(), usage=self._usage())
        yield self._event("message_stop")

    def error(self, error: RequestError) -> Iterable[bytes]:
        yield event(anthropic_error(error), "error")

    def whole(self, choices: list[Delta]) -> Json:
        (delta,) = choices
        return self._message([_block(piece) for piece in delta.pieces]) | self._stop()

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield self._event("content_block_start", index=self._blocks, content_block=empty)
        yield self._event("content_block_delta", index=self._blocks, delta={"type": f"{kind}_delta", kind: text})

    def _call(self, piece: OutputPiece) -> Iterator[bytes]:
        if piece.begins:
            yield from self._close()
            self._open = "tool_use"
            yield self._event("content_block_start", index=self._blocks, content_block=_tool_use(piece, {}))
        if piece.text:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
            yield self._event("content_block_delta", index=self._blocks, delta=delta)
        if piece.ended:
            yield from self._close()

    def _close(self) -> Iterator[bytes]:
        if self._open:
            yield self._event("content_block_stop", index=self._blocks)
            self._open = ""
            self._blocks += 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._job.id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> Json:
        choice = self._job.choices[0]
        if choice.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
        return {"stop_reason": REASONS.get(choice.finish, choice.finish), "stop_sequence": None}

    def _usage(self) -> Json:
        job = self._job
        cached = min(job.cached_tokens(), job.prompt_tokens)
        return {
            "input_tokens": job.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": job.choices[0].tokens,
        }


def _block(piece: OutputPiece) -> Json:
    """Returns a whole block."""
    match piece.kind:
        case "call":
            return _tool_use(piece, msgspec.Raw(piece.text.encode()))  # any number and escape that the model wrote
        case "reasoning":
            return {"type": "thinking", "thinking": piece.text, "signature": ""}
        case _:
            return {"type": "text", "text": piece.text}


def _tool_use(piece: OutputPiece, given: Json | msgspec.Raw) -> Json:
    assert piece.call is not None
    id, ours = piece.call.id, "call_"
    id = f"toolu_{id.removeprefix(ours)}" if id.startswith(ours) else id  # a dialect's own may tell the model something
    return {"type": "tool_use", "id": id, "name": piece.call.name, "input": given}
