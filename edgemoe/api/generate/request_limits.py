"""Checks the numbers of a body by the model's limits: sampling, lengths of prompt and answer, token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgemoe.api.schema import RequestBody
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.errors import InvalidRequest
from edgemoe.types.request import RequestLimits, Sampling

MOST_CONTEXTS = 8  # a text of more tokens than this many contexts is refused uncounted


def sampling(
    body: RequestBody,
    text: TextModel,
    *,
    max_tokens: int,
    vocab: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Sampling:
    """Returns the Sampling of `body`, with the model's defaults for absent fields. Raises InvalidRequest."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} is more than the {max_tokens} allowed", param="min_tokens")
    check_ids(body.logit_bias or {}, vocab, "logit_bias")
    biases = {
        id: bias
        for words, bias in (body.text_bias or {}).items()
        for id in text.encode(words, add_special_tokens=False)
    }
    check_ids(body.stop_token_ids or (), vocab, "stop_token_ids")
    defaults = text.defaults
    eos = () if body.ignore_eos else (token for token in text.eos if token < vocab)
    return Sampling(
        temperature=float(_or(body.temperature, defaults.get("temperature", 1.0))),
        top_p=float(_or(body.top_p, defaults.get("top_p", 1.0))),
        top_k=max(0, int(_or(body.top_k, defaults.get("top_k", 0)))),
        min_p=float(_or(body.min_p, defaults.get("min_p", 0.0))),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(_or(body.repetition_penalty, defaults.get("repetition_penalty", 1.0))),
        logit_bias=biases | (body.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys([*eos, *(body.stop_token_ids or ())])),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
    )


def encode_counted(
    text: TextModel, given: str, add_special_tokens: bool, limits: RequestLimits, param: str
) -> list[int]:
    """Returns the token ids of `given`, which may have `MOST_CONTEXTS` contexts. Raises InvalidRequest."""
    most_tokens = MOST_CONTEXTS * limits.context_tokens
    ids = text.encode(given, add_special_tokens, most_tokens)
    if len(ids) > most_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.context_tokens} tokens, and the prompt is too long: more "
            f"than {most_tokens} tokens > {limits.context_tokens}; give it in parts",
            param=param,
            code="context_length_exceeded",
        )
    return ids


def output_tokens(prompt: Sequence[int], limits: RequestLimits, param: str, wanted_tokens: int | None) -> int:
    """Returns how many tokens may follow `prompt`: `wanted_tokens`, or fewer where the context ends before.

    Without `wanted_tokens` they are all that the context has room for. Raises InvalidRequest where the prompt is empty
    or fills the context. Agents compact a conversation when they read "prompt is too long: N tokens > M", or the code.
    """
    if not prompt:
        raise InvalidRequest(f"{param}: the prompt is empty", param=param)
    if len(prompt) >= limits.context_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.context_tokens} tokens, prompt and answer together, "
            f"and the prompt is too long: at least {len(prompt)} tokens > {limits.context_tokens}; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    room_tokens = limits.context_tokens - len(prompt)
    return room_tokens if wanted_tokens is None else min(wanted_tokens, room_tokens)


def check_ids(ids: Sequence[int] | Mapping[int, float], vocab: int, param: str) -> None:
    """Raises InvalidRequest where a token id is not in the model's vocabulary."""
    if ids and max(ids) >= vocab:
        raise InvalidRequest(f"{param}: token {max(ids)} is not one of the model's {vocab}", param=param)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
