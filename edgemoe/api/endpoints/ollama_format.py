"""Writes deltas as Ollama does: one JSON object a line, the last one with counts and times in nanoseconds.

A tool call is written whole, because its arguments are an object. A malformed one is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from edgemoe.api.dialects.tool_calls import OutputPiece, OutputPieces, completed_object
from edgemoe.api.endpoints.openai_format import chat_logprobs
from edgemoe.api.generate.generation import ChoiceDelta, Generation
from edgemoe.api.http.event_text import json_line, ollama_error
from edgemoe.api.text.tokenizer import Vocabulary
from edgemoe.errors import RequestError
from edgemoe.types.json_object import Json

NS_PER_MS = 1_000_000


class OllamaFormat:
    """Writes the lines of one answer. Subclasses name its parts."""

    def __init__(self, model: str, generation: Generation | None = None, vocabulary: Vocabulary | None = None) -> None:
        """Takes `model`, the name that the client asked by; without a generation there are no answers but `empty`."""
        self._model, self._generation, self._vocabulary = model, generation, vocabulary
        self._open = OutputPieces()  # the call that is being written

    def parts(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        """Returns the part of an answer as the endpoint has it."""
        raise NotImplementedError

    def empty(self, reason: str) -> Json:
        """Returns a whole answer that has no text."""
        return self._line("", "", [], done=True) | {"done_reason": reason}

    def waiting(self) -> Json:
        """Returns a line that says nothing, for while there is no token: clients read every line as JSON."""
        return self._line("", "", [])

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            text, calls = "", []
            for piece in delta.pieces:
                if piece.kind == "text":
                    text += piece.text
                elif piece.kind == "call":
                    self._open.add(piece)
                    if piece.ended:
                        ended, self._open = self._open, OutputPieces()
                        ended.drop_broken_tool_calls()
                        text += ended.text()
                        calls += [_call(one) for one in ended.of("call")]
            logprobs = self._logprobs(delta)
            if text or delta.reasoning or calls or logprobs:
                yield json_line(self._line(text, delta.reasoning, calls) | logprobs)

    def closing_events(self) -> Iterable[bytes]:
        self._open.drop_broken_tool_calls()
        yield json_line(self._line(self._open.text(), "", [], done=True) | self._end())

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield json_line(ollama_error(error))

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        (delta,) = choices
        calls = [_call(piece) for piece in delta.pieces.of("call")]
        line = self._line(delta.text, delta.reasoning, calls, done=True)
        return line | self._logprobs(delta) | self._end()

    def _line(self, text: str, reasoning: str, calls: list[Json], done: bool = False) -> Json:
        head = {"model": self._model, "created_at": rfc3339(datetime.now(UTC))}
        return head | self.parts(text, reasoning, calls) | {"done": done}

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        found = chat_logprobs(delta, self._vocabulary) if self._vocabulary is not None else None
        return {"logprobs": found["content"]} if found else {}

    def _end(self) -> Json:
        """Returns why the answer ended, counts, and times: the prompt's include waiting, the model is loaded before."""
        generation = self._generation
        assert generation is not None, "only a generation has deltas"
        (choice,) = generation.choices
        timings = generation.timings()
        prompt_ns, answer_ns = (int(timings.get(f"{part}_ms", 0) * NS_PER_MS) for part in ("prompt", "predicted"))
        return {
            "done_reason": "length" if choice.finish == "length" else "stop",
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": choice.tokens,
            "eval_duration": answer_ns,
        }


class ChatLines(OllamaFormat):
    """Writes the answers of POST /api/chat."""

    def parts(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class TextLines(OllamaFormat):
    """Writes the answers of POST /api/generate."""

    def parts(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        return {"response": text} | ({"thinking": reasoning} if reasoning else {})


def rfc3339(at: datetime) -> str:
    """Returns a time of UTC as Ollama writes it."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _call(piece: OutputPiece) -> Json:
    assert piece.call is not None
    written = completed_object(piece.text).replace("\n", " ").replace("\r", " ")  # line ends stand between values
    arguments = msgspec.Raw(written.encode())  # numbers as the model wrote them
    function = {"index": piece.call.index, "name": piece.call.name, "arguments": arguments}
    return {"id": piece.call.id, "function": function}
