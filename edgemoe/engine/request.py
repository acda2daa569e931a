"""What the engine demands of a request. The front has looked at it too; here it is what keeps the step loop alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.errors import InvalidRequest
from edgemoe.types import Request, Sampling


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may span and name."""

    context_tokens: int  # prompt and output; no more than the KV blocks hold
    vocab: int
    grammars: bool = True  # whether there is a tokenizer to follow grammars with


def check_request(request: Request, emitted: Sequence[int], bounds: Bounds) -> None:
    """Raises InvalidRequest naming the field at fault."""
    tokens = len(request.prompt) + len(emitted)
    if not request.prompt:
        raise _invalid("prompt", "is empty; it needs at least one token")
    if len(request.prompt) >= bounds.context_tokens or tokens > bounds.context_tokens:
        raise InvalidRequest(
            f"the prompt has {len(request.prompt)} tokens and the context is {bounds.context_tokens}, "
            "with room needed for the answer; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    _check_tokens("prompt", request.prompt, bounds.vocab)
    _check_tokens("emitted", emitted, bounds.vocab)
    _check_tokens("logit_bias", list(request.sampling.logit_bias), bounds.vocab)
    _check_tokens("stop_token_ids", request.sampling.stop_token_ids, bounds.vocab)
    _check_sampling(request.sampling)
    if request.sampling.grammar is not None and not bounds.grammars:
        raise _invalid("response_format", "cannot be followed: the model's tokenizer does not say what its tokens are")


def _check_tokens(param: str, tokens: Sequence[int], vocab: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        raise _invalid(param, f"has token {worst}, and the model's tokens are 0 to {vocab - 1}")


def _check_sampling(sampling: Sampling) -> None:
    limits = {
        "temperature": (sampling.temperature, 0.0, math.inf),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, math.inf),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "presence_penalty": (sampling.presence_penalty, -math.inf, math.inf),
        "frequency_penalty": (sampling.frequency_penalty, -math.inf, math.inf),
        "logprobs": (sampling.logprobs or 0, 0, math.inf),
        "prompt_logprobs": (sampling.prompt_logprobs or 0, 0, math.inf),
        "max_tokens": (sampling.max_tokens, 0, math.inf),
    }
    for param, (value, low, high) in limits.items():
        if not (low <= value <= high and math.isfinite(value)):
            raise _invalid(param, f"is {value}, and must be a number from {low:g} to {high:g}")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise _invalid("logit_bias", "has a value that is not a finite number")


def _invalid(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {why}", param=param, code="invalid_request")
