"""Requests, which the front builds and the engine runs, their origin and limits, and the emissions that answer them.

A request's origin is the authenticated principal, and the user that its application names. A principal has one name on
all boxes of a cluster. A key is named by a digest of its secret. A user of a machine, or an address without a key,
carries the name of its box.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgemoe.types.bounds import (
    Attempt,
    Bias,
    Bytes,
    Grammar,
    Label,
    Logprob,
    LogprobCount,
    LongText,
    Name,
    Penalty,
    Repetition,
    Salt,
    Seconds,
    Seed,
    Share,
    Small,
    StopTokens,
    Temperature,
    TokenCount,
    TokenId,
    Tokens,
    Word,
)

Principal = NewType("Principal", str)  # the unit by which shares, service, caches and bounds are counted
KEY, UID, ADDRESS = "key:", "uid:", "address:"
IPV6_SITE_BITS = 64  # of an IPv6 address; the rest a client chooses
SALT_BYTES = 16
USER_BYTES = 16  # of the digest that stands for a user's name


@dataclass(frozen=True, slots=True)
class Identity:
    """A principal and one of its users. `user` is unique among all principals; it is the principal where none is named.

    Only the principal is authenticated. Users divide their principal's share, however an application names them.
    """

    principal: Principal
    user: str

    @classmethod
    def of(cls, principal: Principal, named: str | None = None) -> Identity:
        """Returns the identity of an application's user. It holds a digest of `named`; the name stays on this box."""
        if not named:
            return cls(principal, principal)
        return cls(principal, f"{principal}/{_digest(named, size=USER_BYTES)}")


NOBODY = Identity(Principal(""), "")


def key_principal(secret: str) -> Principal:
    """Returns the principal of a key. Slow, so that a weak secret cannot be guessed from it."""
    return Principal(KEY + hashlib.scrypt(secret.encode(), salt=b"edgemoe", n=1 << 12, r=8, p=1, dklen=16).hex())


def uid_principal(uid: int, node: str = "") -> Principal:
    """Returns the principal of a user of the machine `node`; "" is a box on its own."""
    return _at(node, f"{UID}{uid}")


def address_principal(address: str, node: str = "") -> Principal:
    """Returns the principal of a client that has given no key: its IPv4 address, or its IPv6 network."""
    return _at(node, f"{ADDRESS}{site_of(address)}")


def site_of(address: str) -> str:
    """Returns the part of an address that its client cannot choose freely; the text itself where it is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, IPV6_SITE_BITS), strict=False))
        found = found.ipv4_mapped
    return str(found)


def as_told_by(node: str, principal: Principal) -> Principal:
    """Returns the principal of a request that the box `node` forwards: no box speaks for another one's users."""
    if principal.startswith((KEY, f"{node}/")):
        return principal
    return _at(node, principal)


def cache_salt_of(principal: Principal, cache_salt: str | None = None, *, shared: bool = False) -> bytes:
    """Returns the salt that begins the keys of cached blocks; b"" where all principals share blocks.

    With a `cache_salt` of the application's choice, only requests with the same one share blocks.
    """
    if shared and not cache_salt:
        return b""
    parts = ("" if shared else principal, cache_salt or "")
    return hashlib.blake2b(repr(parts).encode(), digest_size=SALT_BYTES, person=b"edgemoe salt").digest()


def _at(node: str, name: str) -> Principal:
    return Principal(f"{node}/{name}" if node else name)


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


DIGEST_BYTES = 16
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]

# llguidance's limits (LLParserLimits); limits that are missing here keep its defaults.
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 100_000,  # of up to 400 bytes each
    "max_grammar_size": 500_000,
}


class GrammarTrial(msgspec.Struct, frozen=True):
    """Proof that a grammar compiles and gives a first mask within limits, with the served model's tokenizer."""

    digest: Digest  # of the grammar
    seconds: Seconds  # of a processor
    bytes: Bytes  # that the compiled grammar takes


def digest_of(grammar: str) -> bytes:
    """Returns the digest of a serialised grammar."""
    return hashlib.blake2b(grammar.encode(), digest_size=DIGEST_BYTES).digest()


Phases = Literal["both", "prefill", "decode"]


ENDING = 3  # tokens, with which a chat template ends every turn's prompt


def conversation_of(prompt: Sequence[int] | npt.NDArray[np.integer]) -> int:
    """Returns the same number, of 56 bits, for equal prompts and for all turns of a chat; 0 for an empty prompt.

    Hashes the prompt up to the first occurrence of its last ENDING tokens. A chat template ends each turn's prompt with
    the same tokens, which begin an answer, so the hashed part is the first turn's prompt. With a template that ends its
    prompts otherwise, each turn is a conversation of its own.
    """
    tokens = np.asarray(prompt, "<i4")
    if not len(tokens):
        return 0
    ending = min(ENDING, len(tokens))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, ending)
    first = int((windows == tokens[-ending:]).all(axis=1).argmax())
    return int.from_bytes(hashlib.blake2b(tokens[: first + ending].tobytes(), digest_size=7).digest(), "little")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The served model's limits on one request."""

    context_tokens: int  # of prompt and output together; at most the tokens that the KV blocks hold
    vocab: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of token choice. `temperature` 0 is greedy.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 turn these off. The engine checks the bounds too.
    """

    temperature: Temperature = 1.0
    top_p: Share = 1.0  # the most probable token is always kept
    top_k: TokenCount = 0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition = 1.0  # applies to tokens of prompt and output
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1 << 16)] = {}
    logprobs: LogprobCount | None = None  # None: none; 0: of the chosen token; n: also of the n most probable
    prompt_logprobs: LogprobCount | None = None  # the same for the prompt's tokens, except the first
    stop_token_ids: StopTokens = ()  # end-of-sequence ids included; never delivered
    max_tokens: TokenCount = 16
    min_tokens: TokenCount = 0
    grammar: Grammar | None = None  # a serialised llguidance grammar
    grammar_trial: GrammarTrial | None = None  # of that grammar, by the front

    @property
    def is_grammar_tried(self) -> bool:
        """Returns whether the grammar, if there is one, is the one that was tried in bounds."""
        if self.grammar is None:
            return True
        return self.grammar_trial is not None and self.grammar_trial.digest == digest_of(self.grammar)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. An HTTP request for n choices becomes n of these, which differ in `choice`.

    The engine's state for a request is a function of this object and the tokens emitted so far. Random numbers are a
    hash of seed, choice and position. So any engine can continue the request after a crash.
    """

    id: Name  # unique per front and choice
    prompt: Tokens  # token ids
    sampling: Sampling
    seed: Seed  # 64 bit; the front draws one where the app gave none
    choice: Small = 0
    user: Label = ""  # the principal's, unique among all; for fairness
    principal: Label = ""  # authenticated; "" from a front of an earlier release: then each user counts alone
    salt: Salt = b""  # of the keys of its cached blocks: only requests with the same one share them
    private_salt: Salt = b""  # of the keys of blocks that were fetched for it alone, and of its blocks behind them
    expected: Tokens = ()  # a text that the output may repeat in part, as a source of drafts; changes no token

    @property
    def identity(self) -> Identity:
        """Returns the principal and user that sent the request."""
        return Identity(Principal(self.principal or self.user), self.user)


Likeliest = Annotated[tuple[tuple[TokenId, Logprob], ...], Meta(max_length=1 << 16)]
TokenLogprob = tuple[Logprob, Likeliest]  # of a token, and the most probable tokens at its position with theirs
PromptLogprobs = Annotated[tuple[TokenLogprob, ...], Meta(max_length=1 << 22)]


class Emission(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=False):
    """The output of one step for one request: a token, an end, or both; neither only says that it makes progress.

    `index` counts the request's tokens from 0 over all attempts; `attempt` counts the front's submissions.
    `finish` is "", "stop", "length" or "error"; with "error", `error` and `error_code` say why.
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
    prompt_logprobs: PromptLogprobs = ()  # from the prompt's second token on; on the first emission only
    accepted_drafts: TokenCount = 0  # drafted tokens that were right and wrong, since the emission before
    rejected_drafts: TokenCount = 0
