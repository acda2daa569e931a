"""A running request. Its state follows from the request and the tokens emitted so far, save for its KV blocks."""

from __future__ import annotations

from collections.abc import Sequence as Row
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from edgemoe.errors import InvalidRequest, StoreError
from edgemoe.types.arrays import IntArray
from edgemoe.types.bounds import MAX_LOGPROBS
from edgemoe.types.request import Request, RequestLimits, Sampling, TokenLogprob, conversation_of
from edgemoe.types.step import BLOCK_TOKENS

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from edgemoe.engine.grammar import GrammarMatcher
    from edgemoe.engine.speculation import RequestDrafts

MAX_GRAMMAR_CHARS = 1 << 22  # serialised: a few times the longest that a front makes


def check_request(request: Request, emitted: Row[int], limits: RequestLimits, *, grammars: bool) -> None:
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
    _check_tokens("prediction", request.expected, limits.vocab)
    _check_tokens("logit_bias", list(request.sampling.logit_bias), limits.vocab)
    _check_tokens("stop_token_ids", request.sampling.stop_token_ids, limits.vocab)
    asked = request.sampling.prompt_logprobs
    if asked is not None and len(request.prompt) * (1 + asked) > MAX_LOGPROBS:
        raise _invalid("logprobs", f"need more than {MAX_LOGPROBS} values, the prompt's included; shorten the prompt")
    grammar = request.sampling.grammar
    if grammar is not None and len(grammar) > MAX_GRAMMAR_CHARS:
        raise _invalid("response_format", f"makes a grammar longer than {MAX_GRAMMAR_CHARS} characters; shorten it")
    if grammar is not None and not grammars:
        raise _invalid("response_format", "cannot be followed: the model's tokenizer does not spell out its tokens")
    if not request.sampling.is_grammar_tried:
        raise _invalid("response_format", "has a grammar without a trial by its front; update edgemoe on that box")


def _check_tokens(param: str, tokens: Row[int], vocab: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        raise _invalid(param, f"has token {worst}, and the model's tokens are 0 to {vocab - 1}")


def _invalid(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {why}", param=param, code="invalid_request")


class SwappedWindow(NamedTuple):
    """The blocks that a paused sequence held in layers with windows, from block `first` on."""

    first: int
    rows: torch.Tensor  # [m, ...]


class SwappedBlocks(NamedTuple):
    """The keys, values, signatures and state that a paused sequence had computed."""

    tokens: int
    rows: torch.Tensor  # [n, ...] a KV block each
    signatures: npt.NDArray[np.uint8]  # [n, L, E]
    state: torch.Tensor | None  # [1, ...], where the model has states
    window: SwappedWindow | None  # of a model that has windows
    size_bytes: int  # its share of the budget


class Sequence:
    """Holds the tokens of prompt and output, how many of them are computed, and the KV blocks.

    `computed` tokens have keys and values. The sequence is decoding when all tokens but the last are computed, and
    prefilling when fewer are. After a crash or a preemption, prompt and output are prefilled together, and generation
    goes on after them.
    """

    def __init__(
        self,
        request: Request,
        emitted: tuple[int, ...],
        attempt: int,
        arrived_s: float,
        deadline_s: float,
        timeout_s: float = 0.0,
    ):
        """Takes the deadline of the first progress; each progress moves the deadline to `timeout_s` later."""
        self.request = request
        self.identity = request.identity
        self.attempt = attempt
        self.tokens: list[int] = [*request.prompt, *emitted]
        self.prompt_tokens = len(request.prompt)
        self.first_index = len(emitted)  # of the first token that this attempt emits
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.timeout_s = timeout_s
        self.reported_s = arrived_s  # when its progress was last reported to the front
        self.computed = 0
        self.last_step = 0  # in which tokens of it were computed
        self.blocks: list[int] = []  # the block table
        self.window_blocks: list[int] = []  # the same of layers with windows
        self.window_begin = 0  # the first of them that it holds
        self.window_places: tuple[int, ...] = ()  # blocks after which others may go on
        self.state = 0  # the slot of the state after the computed tokens, where the model has states
        self.next_states: list[tuple[int, int]] = []  # tokens of the next step, and the slot for the state after them
        self.snapshot = 0  # blocks before the last state that this sequence left for the prefix cache
        self.prompt_logprobs: list[
            TokenLogprob
        ] = []  # log probabilities of the prompt's second token and on, as far as they go
        self.keys: list[bytes] = []  # of the full blocks, as far as they have been worked out
        self.cached_tokens: int | None = None  # supplied by the prefix cache at the first admission
        self.started = False  # has been admitted once
        self.ready = request.sampling.grammar is None  # its grammar, if it has one, is compiled
        self.compiling: Future[GrammarMatcher] | None = None
        self.matcher: GrammarMatcher | None = None  # its position in the grammar
        self.restarted = False  # has been computed again because its scores were no numbers
        self.swapped: SwappedBlocks | None = None
        self.drafts: RequestDrafts | None = None  # from its first drafted step on
        self.checked_drafts = [0, 0]  # drafted tokens accepted and rejected since its last emission
        self.missing_expert: StoreError | None = None  # why its last step failed, if it did
        self.missing_since_s = 0.0  # and since when no box has been known to have it
        self.retry_pause_s = self.retry_s = 0.0  # before the next attempt, and its time

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @cached_property
    def prompt_vocabulary(self) -> IntArray:
        """Returns the distinct tokens of the prompt [n] in ascending order."""
        return np.unique(np.array(self.request.prompt, np.int64))

    @cached_property
    def conversation(self) -> int:
        """Returns the conversation's number."""
        return conversation_of(self.request.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Returns whether log probabilities of prompt tokens were asked for and are still to be computed."""
        wanted = self.request.sampling.prompt_logprobs is not None and not self.first_index
        return wanted and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def prompt_logprob_positions(self, tokens: int) -> range:
        """Returns those positions of the next `tokens` whose logits give a wanted log probability of the prompt."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(self.computed, len(self.prompt_logprobs)), min(self.computed + tokens, self.prompt_tokens - 1))

    @property
    def emitted(self) -> int:
        """Counts the tokens of output so far, tokens of earlier attempts included."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.uncomputed == 1 and self.emitted > 0


def blocks_for(tokens: int) -> int:
    """Counts the KV blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)
