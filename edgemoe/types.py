"""The nouns that several rooms share, and the protocols between them. Imports their bounds, and no torch.

Conventions: L layers, E experts per layer, T tokens of one step, k experts per token, H hidden width,
I expert width, V vocabulary. Sizes carry their unit in the name (`_bytes`, `_s`, `_ms`, `_tokens`).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgemoe.bounds import (
    MAX_NODES,
    Attempt,
    Bias,
    Bitmap,
    Bytes,
    Count,
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
    Text,
    TokenCount,
    TokenId,
    Tokens,
    Told,
    Word,
)

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

BLOCK_TOKENS = 16  # tokens per KV block, everywhere


class Tier(enum.IntEnum):
    """Where an expert can be. Lower is faster."""

    VRAM = 0
    RAM = 1
    NVME = 2


class ExpertId(NamedTuple):
    """One expert of one layer, both counted from 0."""

    layer: int
    expert: int


class Move(NamedTuple):
    """A copy of one expert to a faster tier, wished for before it is needed.

    `score` is its worth in the units of the target tier's `CachePolicy.rank`: it takes the place of an expert
    ranked lower, or none. Where the order alone is known, infinity stands for "needed for certain". `chance` that it
    is needed soon: how much it may get in the way of a demand.
    """

    expert: ExpertId
    source: Tier
    target: Tier
    score: float
    chance: float = 1.0


# --- requests: built by the front, carried over the wire, run by the engine -----------------------------


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


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of the served model."""

    id: LongText
    family: Text
    digest: Text
    context_tokens: Count
    vocab: TokenCount
    layers: Small
    experts: Small
    top_k: Small
    dtype: Word
    expert_bytes: Bytes


# --- the step, as the decoder sees it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens: S sequences, each contributing `query_lens[s]` tokens, laid end to end (T in all).

    A decoding sequence contributes one token, a prefilling one a chunk. The keys and values of the T tokens
    are written to the KV blocks first; each token then attends to its sequence's positions up to its own.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_lens: Sequence[int]  # [S]
    context_lens: Sequence[int]  # [S] tokens of the sequence after this step
    block_tables: Sequence[Sequence[int]]  # [S][blocks] KV block ids, in order
    logit_rows: torch.Tensor  # [R] int64, the rows of T whose logits are wanted
    decode: bool  # every sequence contributes one token


class Experts(Protocol):
    """The expert side of a MoE layer, as the decoder calls it. Called on the compute thread only."""

    lookahead: int  # how many layers ahead `hint` is wanted (0: never call it)

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs, [T, H], best in float32.

        `hidden` [T, H] in the model's dtype; `ids` [T, k] int64; `weights` [T, k] float32.
        Raises MissingExpert, CorruptExpert.
        """

    def hint(self, layer: int, probs: torch.Tensor) -> None:
        """Layer `layer`'s real gate applied to an earlier layer's hidden state: `probs` [T, E] float32."""


@dataclass(frozen=True, slots=True)
class StepRouting:
    """What the gates chose in one step: the one observation of cache policy, predictors and recorder."""

    requests: tuple[str, ...]  # [S] request ids
    query_lens: IntArray  # [S] tokens that each contributed
    decode: npt.NDArray[np.bool_]  # [S] true where the sequence was decoding
    tokens: IntArray  # [T] input token ids
    positions: IntArray  # [T]
    ids: npt.NDArray[np.int16]  # [L, T, k]
    weights: FloatArray  # [L, T, k]
    hints: dict[int, FloatArray]  # distance in layers -> [L, T, E]; empty where not collected
    step_s: float  # wall time of the step
    stall_s: float  # of it, spent waiting for experts


# --- the cache policy, as residency and replay drive it -------------------------------------------------


class CachePolicy(Protocol):
    """Ranks experts for one tier. Pure: no clock, thread or device; runs the same live and in replay."""

    def touch(self, layer: int, experts: IntArray) -> None:
        """One layer-step demanded these distinct experts [n]."""

    def rank(self, layer: int) -> FloatArray:
        """Worth of keeping each expert while `layer` executes, [L, E]; the lowest unpinned one goes first."""


class LivePolicy(CachePolicy, Protocol):
    """A policy that an engine may run: it can tell what a prefetch may replace."""

    def foresee(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """What the gate of a layer that runs next says of some experts [n], weighed with all else that is known.

        `chance` [n] is that each is needed there. The chance to go by, and the worth in units of `rank`; both [n].
        """


class Store(Protocol):
    """Where experts are read from: the NVMe tier."""

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Size of one expert as stored, padding excluded."""

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads one expert into `into` and verifies it. Raises CorruptExpert, MissingExpert."""


# --- several boxes: who keeps which expert, and who computes it for whom ----------------------------------


def digest_of(data: bytes | memoryview) -> str:
    """Names what a plan was written as."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class PlacementPlan(msgspec.Struct, frozen=True):
    """Where every expert is at home: a home keeps it in memory for all. Named by epoch, version and digest."""

    epoch: Count
    version: Count
    model: Text  # digest
    layers: Small
    experts: Small
    nodes: Annotated[tuple[Text, ...], Meta(max_length=MAX_NODES)]
    homes: Annotated[tuple[Bitmap, ...], Meta(max_length=MAX_NODES)]  # per node, of L * E bits, see `pack_bits`

    def digest(self) -> str:
        """Names the plan as this release writes it; one that was received goes by the bytes that came."""
        return digest_of(msgspec.msgpack.encode(self))

    def homes_of(self, node: str) -> BoolArray:
        """Experts [L, E] that are at home at the node; none where the plan does not name it."""
        if node not in self.nodes:
            return np.zeros((self.layers, self.experts), np.bool_)
        return unpack_bits(self.homes[self.nodes.index(node)], self.layers, self.experts)

    def nodes_of(self, layer: int, expert: int) -> tuple[str, ...]:
        """The nodes where one expert is at home."""
        bit = layer * self.experts + expert
        pairs = zip(self.nodes, self.homes, strict=True)
        return tuple(node for node, homes in pairs if homes[bit >> 3] >> (bit & 7) & 1)


def pack_bits(which: BoolArray) -> bytes:
    """Booleans [L, E] as a bitmap: bit l * E + e, the lowest of each byte first."""
    return np.packbits(which.ravel(), bitorder="little").tobytes()


def unpack_bits(bitmap: bytes, layers: int, experts: int) -> BoolArray:
    """Booleans [L, E] from a bitmap. Raises ValueError where it has another size."""
    bits = layers * experts
    if len(bitmap) != -(-bits // 8):
        raise ValueError(f"a bitmap of {len(bitmap)} bytes for {layers} layers of {experts} experts")
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=bits, bitorder="little")
    return flags.reshape(layers, experts).astype(np.bool_)


class ExpertWork(NamedTuple):
    """Calls of distinct experts [n] of one layer; the i-th has the calls `offsets[i]:offsets[i + 1]` of m.

    Its result is the weighted sum of the experts' outputs by row, [r, H], in the model's dtype as `hidden` is.
    """

    layer: int
    experts: IntArray  # [n]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [m] row of `hidden`
    weights: FloatArray  # [m] routing weight
    hidden: npt.NDArray[np.uint8]  # [r, H * bytes of an item]


class Offer(NamedTuple):
    """What a peer would take, in seconds, for some experts [n] of a layer."""

    node: str
    open_s: float  # once: the round trip
    row_s: float  # each row of hidden states, there and back
    unit_s: float  # each unit of work, see `work_units`
    wait_s: FloatArray  # [n] until the expert is at hand there; inf: it has not got it


class RemoteCall:
    """Work that a peer was asked to do, and what came of it."""

    __slots__ = ("asked_s", "error", "node", "result", "work")

    def __init__(self, node: str, work: ExpertWork, asked_s: float) -> None:
        self.node, self.work, self.asked_s = node, work, asked_s
        self.result: memoryview | None = None  # [r, H] in the model's dtype
        self.error: Exception | None = None


class Peers(Protocol):
    """The other boxes, as the compute thread sees them. Never waits."""

    timeout_s: float  # after which a call has failed

    def offers(self, layer: int, experts: IntArray) -> Sequence[Offer]:
        """What the peers that can be reached would take for some experts [n] of a layer."""

    def fetch_s(self, layer: int, experts: IntArray, without: Collection[str]) -> FloatArray:
        """Seconds to bring each expert's bytes [n] here from a peer, some left out; inf where none has it."""

    def call(self, node: str, work: ExpertWork, answers: SimpleQueue[RemoteCall]) -> RemoteCall:
        """Asks a peer; puts the call into `answers` when it has a result or an error."""


TOKENS_PER_READ = 8  # tokens that an expert computes in the time that reading its weights takes


def work_units(offsets: IntArray) -> FloatArray:
    """What computing each of n experts costs, in reads of one expert's weights; `offsets` [n + 1] of their calls."""
    units: FloatArray = np.maximum(1.0, np.diff(offsets) / TOKENS_PER_READ).astype(np.float32)
    return units


Json = dict[str, Any]
