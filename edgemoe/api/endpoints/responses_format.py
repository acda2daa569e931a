"""Writes answers of /v1/responses: items (reasoning, message, function calls), streamed as typed events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from edgemoe.api.dialects.tool_calls import OutputPiece, ToolCall
from edgemoe.api.endpoints.responses import ResponsesBody, new_id
from edgemoe.api.generate.generation import Delta, Generation
from edgemoe.api.http.refusals import error_body
from edgemoe.api.http.sse import event
from edgemoe.errors import RequestError
from edgemoe.types.arrays import Json


class Item:
    """Collects an open output item: a message or reasoning, whose one part grows, or a call, whose arguments do."""

    def __init__(self, kind: str, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind  # "message" | "reasoning" | "function_call"
        self.index = index
        self.text = ""
        self.id = new_id({"message": "msg", "reasoning": "rs"}.get(kind, "fc"))
        self._call = call

    @property
    def part_type(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def part(self) -> Json:
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self.part_type, "text": self.text, **extra}

    def body(self, status: str) -> Json:
        if self._call is not None:
            about = {"call_id": self._call.id, "name": self._call.name, "arguments": self.text, "status": status}
            return {"id": self.id, "type": "function_call", **about}
        parts = [self.part()] if status == "completed" or self.text else []
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": parts, "status": status}
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": parts}


class ResponsesFormat:
    """Writes deltas as response events, or joined as one response object."""

    def __init__(self, job: Generation, body: ResponsesBody) -> None:
        self._job = job
        self._body = body
        self._output: list[Json] = []
        self._item: Item | None = None
        self._sequence = 0
        self._begun = False
        self._finish = ""

    def events(self, deltas: list[Delta]) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for delta in deltas:
            yield from self._delta(delta)

    def end(self) -> Iterable[bytes]:
        yield from self._close()
        status = "incomplete" if self._finish == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status))

    def error(self, error: RequestError) -> Iterable[bytes]:
        body = error_body(error)["error"]
        failed = {"code": body["code"] or body["type"], "message": body["message"]}
        yield self._event("response.failed", response=self._response("failed") | {"error": failed})

    def whole(self, choices: list[Delta]) -> Json:
        for _ in self._delta(choices[0]):
            pass
        for _ in self._close():
            pass
        return self._response("incomplete" if self._finish == "length" else "completed")

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        for piece in delta.pieces:
            if piece.call is not None:
                yield from self._call(piece, piece.call)
            else:
                yield from self._grow("message" if piece.kind == "text" else "reasoning", piece.text)
        self._finish = self._finish or delta.finish

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item.kind != kind:
            yield from self._close()
            self._item = Item(kind, len(self._output))
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
            yield self._inside("response.content_part.added", self._item, part=self._item.part())
        self._item.text += text
        extra: Json = {"logprobs": []} if kind == "message" else {}
        yield self._inside(f"response.{self._item.part_type}.delta", self._item, delta=text, **extra)

    def _close(self) -> Iterator[bytes]:
        if (item := self._item) is None:
            return
        extra: Json = {"logprobs": []} if item.kind == "message" else {}
        yield self._inside(f"response.{item.part_type}.done", item, text=item.text, **extra)
        yield self._inside("response.content_part.done", item, part=item.part())
        yield from self._done(item.body("completed"))
        self._item = None

    def _call(self, piece: OutputPiece, call: ToolCall) -> Iterator[bytes]:
        if piece.begins:
            yield from self._close()
            self._item = Item("function_call", len(self._output), call)
            yield self._about("response.output_item.added", self._item.index, item=self._item.body("in_progress"))
        assert self._item is not None
        self._item.text += piece.text
        about = {"item_id": self._item.id, "output_index": self._item.index}
        if piece.text:
            yield self._event("response.function_call_arguments.delta", **about, delta=piece.text)
        if piece.ended == "complete":
            done = {**about, "arguments": self._item.text, "name": call.name}
            yield self._event("response.function_call_arguments.done", **done)
        if piece.ended:
            yield from self._done(self._item.body("completed" if piece.ended == "complete" else "incomplete"))
            self._item = None

    def _done(self, item: Json) -> Iterator[bytes]:
        self._output.append(item)
        yield self._about("response.output_item.done", len(self._output) - 1, item=item)

    def _inside(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._about(kind, item.index, item_id=item.id, content_index=0, **fields)

    def _about(self, kind: str, index: int, **fields: Any) -> bytes:
        return self._event(kind, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(self, status: str) -> Json:
        job, body = self._job, self._body
        return {
            "id": job.id.replace("-", "_"),
            "object": "response",
            "created_at": job.created,
            "status": status,
            "model": job.model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": job.requests[0].sampling.temperature,
            "text": {"format": {"type": body.text.format.type if body.text and body.text.format else "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": job.requests[0].sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> Json:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
