"""Checks requests at the engine. The front has checked them too; these checks protect the step loop."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgemoe.errors import InvalidRequest
from edgemoe.types.bounds import MAX_LOGPROBS
from edgemoe.types.request import Request, RequestLimits

MAX_GRAMMAR_CHARS = 1 << 22  # serialised; that is a few times what a front makes of the longest one that it takes


def check_request(request: Request, emitted: Sequence[int], limits: RequestLimits, *, grammars: bool) -> None:
    """Checks the request and the tokens emitted so far. Raises InvalidRequest, which names the field at fault.

    `grammars` says whether the tokenizer can be used for grammars.
    """
    tokens = len(request.prompt) + len(emitted)
    if not request.prompt:
        raise _invalid("prompt", "is empty; it needs at least one token")
    if len(request.prompt) >= limits.context_tokens or tokens > limits.context_tokens:
        raise InvalidRequest(
            f"the prompt has {len(request.prompt)} tokens and the context is {limits.context_tokens}, "
            "with room needed for the answer; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    try:
        without_prompt = msgspec.structs.replace(request, prompt=())
        msgspec.convert(msgspec.to_builtins(without_prompt), Request)  # holds the bounds that its type declares
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is out of bounds: {error}", code="invalid_request") from error
    _check_tokens("prompt", request.prompt, limits.vocab)
    _check_tokens("emitted", emitted, limits.vocab)
    _check_tokens("logit_bias", list(request.sampling.logit_bias), limits.vocab)
    _check_tokens("stop_token_ids", request.sampling.stop_token_ids, limits.vocab)
    asked = request.sampling.prompt_logprobs
    if asked is not None and len(request.prompt) * (1 + asked) > MAX_LOGPROBS:
        raise _invalid(
            "logprobs", f"are of more than {MAX_LOGPROBS} tokens with those of the prompt; shorten the prompt"
        )
    grammar = request.sampling.grammar
    if grammar is not None and len(grammar) > MAX_GRAMMAR_CHARS:
        raise _invalid("response_format", f"makes a grammar longer than {MAX_GRAMMAR_CHARS} characters; shorten it")
    if grammar is not None and not grammars:
        raise _invalid("response_format", "cannot be followed: the model's tokenizer does not say what its tokens are")
    if not request.sampling.is_grammar_tried:
        raise _invalid(
            "response_format", "has a grammar that its front has not tried in bounds; bring that box up to date"
        )


def _check_tokens(param: str, tokens: Sequence[int], vocab: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        raise _invalid(param, f"has token {worst}, and the model's tokens are 0 to {vocab - 1}")


def _invalid(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {why}", param=param, code="invalid_request")
