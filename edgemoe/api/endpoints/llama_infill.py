"""POST /infill and /completion: text between two others, or after one, with llama.cpp's fields and answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs

from edgemoe.api.endpoints.completions import completion_generation, is_one_prompt, marks_of, with_stops
from edgemoe.api.endpoints.openai_format import logprob_of
from edgemoe.api.generate.generation import ChoiceDelta, Generation, PreparedAnswer, RequestContext
from edgemoe.api.http.event_text import error_body, event
from edgemoe.api.llama_bodies import Infill, LlamaCompletion
from edgemoe.api.schema import read_named
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest, RequestError
from edgemoe.types.json_object import Json
from edgemoe.types.request import Emission

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
        extra = [(one.filename or "tmp", one.text) for one in body.input_extra or ()]
        files = marks.files(extra, text.vocabulary.added)
        prompt = files + marks.prompt(body.input_prefix or "", body.input_suffix or "") + (body.prompt or "")
        completion = _with_tokens(
            body, prompt=prompt, max_tokens=context.limits.context_tokens if wanted is None else wanted
        )
        generation = completion_generation(with_stops(completion, marks, text), context)
    return PreparedAnswer(generation, InfillFormat(generation, body, text), bool(body.stream), fields)


def prepare_completion(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /completion and prepares its generation. Raises InvalidRequest."""
    body, fields = read_named(raw, LlamaCompletion)
    with fields.renamed():
        if isinstance(body.prompt, list) and len(body.prompt) > 1 and not is_one_prompt(body.prompt):
            raise InvalidRequest("prompt: one at a time, a text or a list of token ids and texts", param="prompt")
        if (body.n or 1) > 1:
            raise InvalidRequest("n: one answer at a time", param="n")
        wanted = context.limits.context_tokens if body.max_tokens is None else body.max_tokens
        generation = completion_generation(_with_tokens(body, max_tokens=wanted), context)
    return PreparedAnswer(generation, InfillFormat(generation, body, context.text), bool(body.stream), fields)


def _with_tokens(body: LlamaCompletion, **fields: Any) -> LlamaCompletion:
    """Returns a body with these fields, and with log probabilities if its answer shows tokens: these come with them."""
    if body.return_tokens and body.logprobs is None:
        fields["logprobs"] = 0
    return structs.replace(body, **fields)


def late_error(error: RequestError) -> bytes:
    """Returns the last event of a stream that failed, whether or not its answer had begun."""
    return event(error_body(error))


class InfillFormat:
    """Writes deltas as llama.cpp's completions; the last one has counts and times."""

    def __init__(self, generation: Generation, body: LlamaCompletion, text: TextModel) -> None:
        self._generation, self._vocabulary = generation, text.vocabulary
        self._shows_tokens, self._shows_likely = bool(body.return_tokens), body.logprobs is not None

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
        if self._shows_tokens:
            answer["tokens"] = [one.token for one in delta.logprobs if one.token is not None]
        if self._shows_likely:
            answer["completion_probabilities"] = [self._likely(one) for one in delta.logprobs]
        if delta.finish:
            word = generation.choices[0].stop_string
            answer |= {
                "stop_type": "word" if word else STOP_TYPES.get(delta.finish, "none"),
                "stopping_word": word,
                "truncated": False,
                "tokens_predicted": sum(choice.tokens for choice in generation.choices),
                "tokens_evaluated": generation.prompt_tokens,
                "tokens_cached": generation.cached_tokens(),
                "timings": generation.timings(),
            }
        return answer

    def _likely(self, emission: Emission) -> Json:
        """Returns the log probability of a token, and of the most probable ones at its place."""
        one, *most = (
            {"id": id, **logprob_of(id, logprob, self._vocabulary)}
            for id, logprob in ((emission.token or 0, emission.logprob or 0.0), *emission.top)
        )
        return {**one, "top_logprobs": most}
