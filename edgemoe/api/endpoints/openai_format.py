"""Writes the objects that OpenAI's chat and completions share: heads, stream ends, tool calls, logprobs."""

from __future__ import annotations

from collections.abc import Iterable

import edgemoe
from edgemoe.api.dialects.tool_calls import OutputPiece
from edgemoe.api.generate.generation import ChoiceDelta, Generation
from edgemoe.api.http.event_text import DONE, error_body, event
from edgemoe.api.schema import StreamOptions
from edgemoe.api.text.tokenizer import Detokenizer, Vocabulary
from edgemoe.errors import RequestError
from edgemoe.types.json_object import Json
from edgemoe.types.request import Emission

LEAST = -9999.0  # stands for minus infinity, which JSON cannot express
FINGERPRINT = f"edgemoe-{edgemoe.__version__}"
LogprobEntry = tuple[int, float | None, tuple[tuple[int, float], ...]]  # a token, its logprob, the most probable tokens


def late_error(error: RequestError) -> bytes:
    """Returns the last events of a stream that failed, whether or not its answer had begun."""
    return event(error_body(error)) + DONE


class OpenAIFormat:
    """Writes the chunks of a stream, its last ones included. `chunk_object` is the chunks' `object` field."""

    chunk_object: str

    def __init__(self, generation: Generation, options: StreamOptions | None) -> None:
        self._generation = generation
        self._usage = bool(options and options.include_usage)

    def closing_events(self) -> Iterable[bytes]:
        if self._usage:
            yield self._chunk([], self._generation.usage(), last=True)
        yield DONE

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield late_error(error)

    def _head(self, kind: str) -> Json:
        generation = self._generation
        return {
            "id": generation.id,
            "object": kind,
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choices: list[Json], usage: Json | None = None, last: bool = False) -> bytes:
        head = self._head(self.chunk_object) | {"choices": choices}
        head |= {"timings": self._generation.timings()} if last else {}
        return event(head | {"usage": usage} if self._usage else head)


def tool_call_body(piece: OutputPiece) -> Json:
    """Returns OpenAI's tool call object, or the next arguments of one that has begun."""
    if piece.call is None or not piece.begins:
        return {"function": {"arguments": piece.text}}
    return {"id": piece.call.id, "type": "function", "function": {"name": piece.call.name, "arguments": piece.text}}


def chat_logprobs(delta: ChoiceDelta, vocabulary: Vocabulary) -> Json | None:
    """Returns the `logprobs` of a chat choice; None where there are none."""
    if not delta.logprobs:
        return None
    return {"content": [logprob_body(emission, vocabulary) for emission in delta.logprobs], "refusal": None}


def logprob_body(emission: Emission, vocabulary: Vocabulary) -> Json:
    """Returns OpenAI's object of a token's log probability, and of the most probable ones at its place."""
    top = [logprob_of(token, logprob, vocabulary) for token, logprob in emission.top]
    return {**logprob_of(emission.token or 0, emission.logprob or 0.0, vocabulary), "top_logprobs": top}


def logprob_of(token: int, logprob: float, vocabulary: Vocabulary) -> Json:
    """Returns OpenAI's object of a token and its log probability."""
    return {
        "token": vocabulary.name(token),
        "logprob": max(logprob, LEAST),
        "bytes": list(vocabulary.bytes_of(token)),
    }


def text_logprobs(
    tokens: Iterable[LogprobEntry], vocabulary: Vocabulary, text: Detokenizer, offset: int
) -> tuple[Json, int]:
    """Returns the `logprobs` of a completion's tokens, and the text offset after them.

    `text` has been fed the tokens before. `offset` is the text offset of the first token, in whole characters.
    """
    offsets, scored = [], list(tokens)
    for token, _, _ in scored:
        offsets.append(offset)
        offset += len(text.feed(token))
    body = {
        "tokens": [vocabulary.name(token) for token, _, _ in scored],
        "token_logprobs": [None if logprob is None else max(logprob, LEAST) for _, logprob, _ in scored],
        "top_logprobs": [None if logprob is None else _top(top, vocabulary) for _, logprob, top in scored],
        "text_offset": offsets,
    }
    return body, offset


def _top(top: Iterable[tuple[int, float]], vocabulary: Vocabulary) -> dict[str, float]:
    """Returns the most probable tokens by name; the more probable one counts where names are equal."""
    return {vocabulary.name(token): max(logprob, LEAST) for token, logprob in reversed(tuple(top))}
