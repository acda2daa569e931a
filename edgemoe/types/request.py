"""Requests and what they emit: built by the front, carried over the wire, run by the engine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from edgemoe.types.bounds import (
    Attempt,
    Bias,
    Grammar,
    Label,
    Logprob,
    LongText,
    Name,
    Penalty,
    Repetition,
    Seconds,
    Seed,
    Share,
    Small,
    StopTokens,
    Temperature,
    TokenCount,
    TokenId,
    Tokens,
    Told,
    Word,
)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 are off.

    The engine holds requests to these bounds too.
    """

    temperature: Temperature = 1.0
    top_p: Share = 1.0  # the likeliest token is always kept
    top_k: TokenCount = 0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0  # of the prompt's and the output's tokens
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1 << 16)] = {}
    logprobs: Told | None = None  # None: none; 0: of the chosen token; n: also the n likeliest
    prompt_logprobs: Told | None = None  # the same of the prompt's tokens but the first
    stop_token_ids: StopTokens = ()  # end-of-sequence ids included; never delivered
    max_tokens: TokenCount = 16
    min_tokens: TokenCount = 0
    grammar: Grammar | None = None  # a serialised llguidance grammar, already checked by the front


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. A request for n choices is n of these, told apart by `choice`.

    The engine's state for a request is a function of this object and the tokens emitted so far (random
    numbers are a hash of seed, choice and position), so that any engine can replay it after any crash.
    """

    id: Name  # unique per front and choice
    prompt: Tokens  # token ids
    sampling: Sampling
    seed: Seed  # 64 bit; the front draws one where the app gave none
    choice: Small = 0
    user: Label = ""  # for fairness: peer uid, or the request's `user`


Likeliest = Annotated[tuple[tuple[TokenId, Logprob], ...], Meta(max_length=1 << 16)]
TokenLogprob = tuple[Logprob, Likeliest]  # a token's, and the likeliest tokens there with theirs
PromptLogprobs = Annotated[tuple[TokenLogprob, ...], Meta(max_length=1 << 22)]


class Emission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=False):
    """What one step adds to one request: a token, an end, or both.

    `index` counts the request's tokens from 0 (replayed ones included), `attempt` the front's submissions.
    `finish` is "", "stop", "length" or "error"; with "error" the message and code say why.
    """

    request: Name
    attempt: Attempt
    index: TokenCount
    token: TokenId | None = None
    logprob: Logprob | None = None
    top: Likeliest = ()
    finish: Word = ""
    error: LongText = ""
    error_code: Word = ""
    retry_after_s: Seconds = 0.0  # with error_code "queue_full"
    cached_tokens: TokenCount = 0  # prompt tokens that the prefix cache supplied; on the first emission only
    prompt_logprobs: PromptLogprobs = ()  # of the prompt's second token and on; on the first emission only
