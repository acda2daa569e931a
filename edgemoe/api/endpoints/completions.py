"""POST /v1/completions: prepares generations, and writes their answers as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from edgemoe.api.endpoints.openai_format import LogprobEntry, OpenAIFormat, text_logprobs
from edgemoe.api.generate.answer_grammar import response_grammar
from edgemoe.api.generate.generation import (
    ChoiceDelta,
    CompletionChoice,
    Generation,
    PreparedAnswer,
    RequestContext,
    TokenizedPrompt,
)
from edgemoe.api.generate.request_limits import check_ids, output_tokens, sampling
from edgemoe.api.schema import Completion, read_named, stop_strings
from edgemoe.api.text.infill import InfillMarks, infill_marks
from edgemoe.api.text.tokenizer import Detokenizer, StopMatcher, TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.json_object import Json
from edgemoe.types.request import RequestLimits

DEFAULT_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 1024
MAX_CHOICES = 4096  # of all prompts together: far more than can wait, few enough to make before they are refused


def prepare(context: RequestContext, raw: bytes) -> PreparedAnswer:
    """Decodes a body of POST /v1/completions and prepares its generation. Raises InvalidRequest."""
    body, fields = read_named(raw, Completion)
    with fields.renamed():
        if body.max_tokens == 0 and not body.echo:
            why = "max_tokens: 0 is for echo, which shows the prompt"
            raise InvalidRequest(why, param="max_tokens", code="invalid_value")
        generation = completion_generation(body, context)
    return PreparedAnswer(generation, CompletionFormat(generation, body, context.text), bool(body.stream), fields)


def completion_generation(body: Completion, context: RequestContext) -> Generation:
    """Returns the generation that a completion asks for; its choice p * n + c is choice c of prompt p.

    Raises InvalidRequest.
    """
    context.check_model(body.model, *(body.models or ()))
    text, limits = context.text, context.limits
    body = _infilled(body, text) if body.suffix else body
    tokens, n = prompts(body.prompt, text, limits, body.add_special_tokens is not False), body.n or 1
    if len(tokens) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(tokens)} prompts with n = {n} are more than {MAX_CHOICES} choices", param="n")
    grammar = response_grammar(body.response_format)
    wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    ready = [
        TokenizedPrompt(
            tuple(prompt),
            sampling(
                body,
                text,
                max_tokens=output_tokens(prompt, limits, "prompt", max(1, wanted)),
                vocab=limits.vocab,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            ),
        )
        for prompt in tokens
    ]
    stops, min_tokens = stop_strings(body.stop), body.min_tokens or 0
    return Generation(
        prefix="cmpl",
        model=context.model,
        requests=context.engine_requests(body, ready),
        choices=[
            CompletionChoice(at, text.vocabulary, StopMatcher(stops, min_tokens), prompt_only=not wanted)
            for at in range(n * len(tokens))
        ],
        prompt_tokens=sum(map(len, tokens)),
        grammar=grammar,
    )


def _infilled(body: Completion, text: TextModel) -> Completion:
    """Returns a completion of the text between `prompt` and `suffix`. Raises InvalidRequest."""
    marks = marks_of(text, "suffix")
    if not isinstance(body.prompt, str):
        raise InvalidRequest("suffix: the prompt before it is one text", param="suffix")
    return with_stops(
        structs.replace(body, prompt=marks.prompt(body.prompt, body.suffix or ""), suffix=None), marks, text
    )


def marks_of(text: TextModel, param: str) -> InfillMarks:
    """Returns the tokenizer's marks for filling in. Raises InvalidRequest, naming the parameter, if it has none."""
    marks = infill_marks(text.vocabulary.added)
    if marks is None:
        message = f"{param}: this model's tokenizer has no marks for filling in"
        raise InvalidRequest(message, param=param, code="unsupported_parameter")
    return marks


def with_stops(body: Completion, marks: InfillMarks, text: TextModel) -> Completion:
    """Returns a completion that ends at any of the marks."""
    ends = [id for name in marks.stops if (id := text.vocabulary.id_of(name)) is not None]
    return structs.replace(body, stop_token_ids=[*(body.stop_token_ids or ()), *ends])


Prompt = str | int | list[str | int]


def prompts(prompt: str | list[Prompt], text: TextModel, limits: RequestLimits, special: bool) -> list[list[int]]:
    """Returns token ids of each prompt, a text's with `special` tokens around it. Raises InvalidRequest.

    `prompt` is a text, a list of texts, a list of ids, or a list of lists of ids. A list of ids may have texts, too:
    special tokens are added around the first part only.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if any(isinstance(one, int) for one in prompt):
        prompt = [[one for one in prompt if isinstance(one, int | str)]] if is_one_prompt(prompt) else prompt
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} at a time", param="prompt")
    return [_one(one, at, text, limits, special) for at, one in enumerate(prompt)]


def is_one_prompt(prompt: list[Prompt]) -> bool:
    """Returns whether a list is one prompt of ids, and perhaps texts."""
    return all(isinstance(one, int | str) for one in prompt) and any(isinstance(one, int) for one in prompt)


def _one(prompt: Prompt, at: int, text: TextModel, limits: RequestLimits, special: bool) -> list[int]:
    if isinstance(prompt, str):
        return text.encode(prompt, add_special_tokens=special, most_tokens=limits.context_tokens)
    if isinstance(prompt, int):
        raise InvalidRequest(f"prompt[{at}]: a list of prompts holds texts or lists of token ids", param="prompt")
    check_ids([one for one in prompt if isinstance(one, int)], limits.vocab, f"prompt[{at}]")
    if sum(isinstance(one, str) for one in prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt[{at}]: at most {MAX_PROMPTS} texts among the ids", param="prompt")
    ids: list[int] = []
    for part, one in enumerate(prompt):
        if isinstance(one, int):
            ids.append(one)
        elif len(ids) <= limits.context_tokens:  # else it is refused as too long
            ids += text.encode(one, add_special_tokens=special and not part, most_tokens=limits.context_tokens)
    return ids


class CompletionFormat(OpenAIFormat):
    """Writes deltas as text_completion objects."""

    chunk_object = "text_completion"

    def __init__(self, generation: Generation, body: Completion, text: TextModel) -> None:
        super().__init__(generation, body.stream_options)
        self._vocabulary = text.vocabulary
        n = body.n or 1
        echoes = [
            text.vocabulary.text(one.prompt, skip_special=True) if body.echo else "" for one in generation.requests[::n]
        ]
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._texts = [Detokenizer(text.vocabulary) for _ in generation.choices]
        self._offsets = [0] * len(generation.choices)
        self._prompt_logprobs_due = [bool(body.echo) and body.logprobs is not None] * len(generation.choices)

    def events(self, deltas: list[ChoiceDelta]) -> Iterable[bytes]:
        for delta in deltas:
            echo, self._echoes[delta.choice] = self._echoes[delta.choice], ""
            yield self._chunk([self._choice(delta, echo)], last=self._generation.finished and delta is deltas[-1])

    def whole(self, choices: list[ChoiceDelta]) -> Json:
        done = [self._choice(delta, self._echoes[delta.choice]) for delta in choices]
        rest = {"choices": done, "usage": self._generation.usage(), "timings": self._generation.timings()}
        return self._head(self.chunk_object) | rest

    def _choice(self, delta: ChoiceDelta, echo: str) -> Json:
        logprobs, at = None, delta.choice
        tokens: list[LogprobEntry] = [(one.token or 0, one.logprob, one.top) for one in delta.logprobs]
        if self._prompt_logprobs_due[at]:
            self._prompt_logprobs_due[at] = False
            first, *rest = self._generation.requests[at].prompt
            of_rest = zip(rest, delta.prompt_logprobs, strict=True)
            tokens = [(first, None, ()), *((token, *likely) for token, likely in of_rest), *tokens]
        if tokens:
            logprobs, self._offsets[at] = text_logprobs(tokens, self._vocabulary, self._texts[at], self._offsets[at])
        return {
            "index": delta.choice,
            "text": echo + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish or None,
        }
