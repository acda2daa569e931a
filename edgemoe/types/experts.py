"""Experts and their sizes, the tiers that hold them, and the protocol of cache policies, which rank them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from edgemoe.types.arrays import BoolArray, FloatArray, IntArray
from edgemoe.types.encoding import Encoding, pair_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
BIAS_BYTES = 4  # float32 in every encoding
PAGE_BYTES = 4096  # experts start and end at multiples of it, in a store's files as in a slab


def padded(size_bytes: int) -> int:
    """Returns the size rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Activation(NamedTuple):
    """The activation between an expert's products, of a gate g and an up u.

    "silu": silu(g) u. "gelu_tanh": gelu(g) u, gelu by its approximation with tanh. "clamped_swiglu":
    g sigmoid(alpha g) (u + 1), with g at most `limit`, and u at most `limit` away from 0 [GPT-OSS].
    "relu2" has no gate: the square of relu(u).
    """

    kind: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def inputs(self) -> int:
        """Returns the number of products that it takes: gate and up, or up alone."""
        return 1 if self.kind == "relu2" else 2


SILU = Activation()


def layers_of_sizes(layer_bytes: Sequence[int]) -> list[IntArray]:
    """Returns the layers whose experts are of each size, the smallest first, from the size of one expert by layer."""
    sizes = np.array(layer_bytes, np.int64)
    return [np.flatnonzero(sizes == size) for size in np.unique(sizes)]


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """The sizes of a model's experts: L layers of E experts, k of them per token, of width I.

    An expert's bytes are its gate and up rows [2I, H], then down [H, I], in its layer's encoding. Its biases follow, if
    it has any: gate and up [2I], then down [H], float32. Experts whose activation takes no gate have up rows alone:
    [I, H]. Hidden states are of `dtype`. Layers may have fewer experts than E.
    """

    layers: int
    experts: int  # of the layer that has most
    top_k: int
    hidden: int
    width: int
    dtype: str  # "float32" | "bfloat16"
    activation: Activation = SILU
    biases: bool = False
    encodings: tuple[str, ...] = ()  # of each layer's experts, see `pair_of`; (): `dtype` for all
    layer_experts: tuple[int, ...] = ()  # of each layer; (): all have as many
    layer_bytes: tuple[int, ...] = ()  # of one expert of each layer where they are stated; (): as encodings have them

    @property
    def bf16(self) -> bool:
        """Returns whether hidden states are bfloat16, else they are float32."""
        return self.dtype == "bfloat16"

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def first_rows(self) -> int:
        """Returns the rows of gate and up together, or of up alone."""
        return self.activation.inputs * self.width

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        return self.first_rows, self.hidden

    @property
    def down_shape(self) -> tuple[int, int]:
        return self.hidden, self.width

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one row of hidden states."""
        return self.hidden * self.item_bytes

    def encoding_name(self, layer: int) -> str:
        """Returns the name of the encodings of a layer's experts."""
        return self.encodings[layer] if self.encodings else self.dtype

    def encoding(self, layer: int) -> Encoding:
        """Returns how gate and up of a layer's experts are encoded."""
        return pair_of(self.encoding_name(layer))[0]

    def down_encoding(self, layer: int) -> Encoding:
        """Returns how down of a layer's experts is encoded."""
        return pair_of(self.encoding_name(layer))[1]

    @property
    def bias_bytes(self) -> int:
        return BIAS_BYTES * (self.first_rows + self.hidden) if self.biases else 0

    def experts_of(self, layer: int) -> int:
        """Returns how many experts a layer has: those from 0 on."""
        return self.layer_experts[layer] if self.layer_experts else self.experts

    @property
    def exists(self) -> BoolArray:
        """Returns which experts there are, [L, E]."""
        counts = [self.experts_of(layer) for layer in range(self.layers)]
        return np.arange(self.experts) < np.array(counts)[:, None]

    @property
    def count(self) -> int:
        """Returns how many experts there are."""
        return sum(self.layer_experts) if self.layer_experts else self.layers * self.experts

    def expert_bytes(self, layer: int) -> int:
        """Returns the bytes of one expert of a layer, without padding."""
        if self.layer_bytes:
            return self.layer_bytes[layer]
        gate_up = self.first_rows * self.encoding(layer).row_bytes(self.hidden)
        down = self.hidden * self.down_encoding(layer).row_bytes(self.width)
        return gate_up + down + self.bias_bytes

    def stride_bytes(self, layer: int) -> int:
        """Returns the bytes that one expert of a layer takes: rounded up to whole pages."""
        return padded(self.expert_bytes(layer))

    @property
    def strides_bytes(self) -> IntArray:
        """Returns the bytes that an expert takes, by layer [L]."""
        return np.array([self.stride_bytes(layer) for layer in range(self.layers)], np.int64)

    @property
    def largest_bytes(self) -> int:
        """Returns the bytes that an expert of the largest size takes."""
        return max(self.stride_bytes(layer) for layer in range(self.layers))

    @property
    def all_bytes(self) -> int:
        """Returns the bytes that all experts take."""
        return sum(self.experts_of(layer) * self.stride_bytes(layer) for layer in range(self.layers))


class Tier(enum.IntEnum):
    """A memory that can hold experts. Lower is faster."""

    VRAM = 0
    RAM = 1
    NVME = 2


class ExpertId(NamedTuple):
    """One expert of one layer, both counted from 0."""

    layer: int
    expert: int


class Move(NamedTuple):
    """A prefetch request: a copy of one expert to a faster tier before it is needed.

    `score` is the expert's utility in the target tier, in the units of `CachePolicy.rank`. The expert replaces one of
    lower rank, or is not copied. NaN takes the rank at the time of the copy. Infinity marks an expert that is certain
    to be needed. `chance` is the probability that it is needed soon; it limits how far the copy may delay demands.
    """

    expert: ExpertId
    source: Tier
    target: Tier
    score: float
    chance: float = 1.0


class CachePolicy(Protocol):
    """Ranks experts for one tier. Uses no clock, thread or device, so that it runs the same live and in replay."""

    def touch(self, layer: int, experts: IntArray) -> None:
        """Counts one demand by a layer-step for each of these distinct experts [n]."""

    def rank(self, layer: int) -> FloatArray:
        """Returns each expert's utility while `layer` runs, [L, E]; the lowest unpinned one is evicted first."""


class LivePolicy(CachePolicy, Protocol):
    """Ranks experts in a running engine, and scores prefetch requests in the same units.

    Any thread may ask for ranks, also while the compute thread runs `touch`. They are asked for only where an expert
    has to be evicted.
    """

    @property
    def margin(self) -> float:
        """Returns by how much a missed expert must outrank another, to be copied in its place without being awaited."""

    def fuse_chances(self, layer: int, experts: IntArray, chance: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Combines a coming layer's gate forecast for experts [n] with the policy's own predictions.

        `chance` [n] is the gate's probability that `layer` needs each expert. Returns the combined probabilities and
        the utilities in units of `rank`, both [n].
        """


class ExpertReader(Protocol):
    """Reads experts from the NVMe tier."""

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Returns the size of one expert as stored, without padding."""

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads one expert into `into` and verifies it. Raises CorruptExpert, MissingExpert."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names the served model, and the sizes of its experts."""

    digest: str  # of its store; the same on all boxes that serve it
    geometry: ExpertGeometry
