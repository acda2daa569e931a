"""POST /infill and /completion: text between two others, or after one, with llama.cpp's fields and answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from edgemoe.api.endpoints.completions import completion_generation, marks_of, with_stops
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.event_text import error_body, event
from edgemoe.api.schema import Completion, Infill, read_named
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json

STOP_TYPES = {"stop": "eos", "length": "limit"}


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /infill and prepares its generation. Raises InvalidRequest."""
    body, fields = read_named(raw, Infill)
    with fields.renamed():
        if body.suffix:
            raise InvalidRequest("suffix: the text behind is input_suffix here", param="suffix")
        if (body.n or 1) > 1:
            raise InvalidRequest("n: one answer at a time", param="n")
        text, wanted = context.text, body.max_tokens
        marks = marks_of(text, "input_suffix")
        files = marks.files([(one.filename, one.text) for one in body.input_extra], text.vocabulary.added)
        prompt = files + marks.prompt(body.input_prefix, body.input_suffix) + body.prompt
        completion = structs.replace(
            body, prompt=prompt, max_tokens=context.limits.context_tokens if wanted is None else wanted
        )
        generation = completion_generation(with_stops(completion, marks, text), context)
    return PreparedAnswer(generation, InfillFormat(generation), bool(body.stream), fields)


def prepare_completion(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /completion and prepares its generation. Raises InvalidRequest."""
    body, fields = read_named(raw, Completion)
    with fields.renamed():
        prompt: str | Sequence[str | int | list[int]] = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # a list of prompts, of which there is one
        if not isinstance(prompt, str) and not (prompt and all(type(one) is int for one in prompt)):
            raise InvalidRequest("prompt: give one text, or one list of token ids", param="prompt")
        if (body.n or 1) > 1:
            raise InvalidRequest("n: one answer at a time", param="n")
        wanted = context.limits.context_tokens if body.max_tokens is None else body.max_tokens
        generation = completion_generation(structs.replace(body, prompt=prompt, max_tokens=wanted), context)
    return PreparedAnswer(generation, InfillFormat(generation), bool(body.stream), fields)


def late_error(error: RequestError) -> bytes:
    """Returns the last event of a stream that failed, whether or not its answer had begun."""
    return event(error_body(error))


class InfillFormat:
    """Writes deltas as llama.cpp's completions; the last one has counts and times."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            yield event(self._answer(delta))

    def closing_events(self) -> Iterable[bytes]:
        return ()

    def error_events(self, error: RequestError) -> Iterable[bytes]:
        yield late_error(error)

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        return self._answer(choices[0])

    def _answer(self, delta: ChoiceDelta) -> Json:
        generation = self._generation
        answer: Json = {"index": 0, "content": delta.text, "stop": bool(delta.finish), "model": generation.model}
        if delta.finish:
            answer |= {
                "stop_type": STOP_TYPES.get(delta.finish, "none"),
                "truncated": False,
                "tokens_predicted": sum(choice.tokens for choice in generation.choices),
                "tokens_evaluated": generation.prompt_tokens,
                "tokens_cached": generation.cached_tokens(),
                "timings": generation.timings(),
            }
        return answer
