"""Describes a supported model: one frozen record per model, and its tensors. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from edgemoe.types.experts import DTYPE_BYTES, SILU, Activation, ExpertGeometry
from edgemoe.types.step import BLOCK_TOKENS, most_kept

ALIGNMENT = 64  # bytes: a cache line
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVRow:
    """One layer's keys and values in a block. Without heads it is empty: the layer keeps none."""

    kv_heads: int = 0
    key_width: int = 0  # elements
    value_width: int = 0
    dtype: str = "float32"
    values_in_keys: bool = False  # a value is the first part of its key
    int8: bool = False  # lines are codes with a scale, and stand for numbers of `dtype`
    offset: int = 0  # bytes from the start of the block
    windowed: bool = field(default=False, repr=False)  # it lies in the blocks of layers with windows

    @property
    def key_bytes(self) -> int:
        return self._bytes(self.key_width)

    @property
    def value_bytes(self) -> int:
        """Of the values that lie behind the keys."""
        if self.values_in_keys:
            return 0
        return self._bytes(self.value_width)

    def _bytes(self, width: int) -> int:
        line = width + SCALE_BYTES if self.int8 else width * DTYPE_BYTES[self.dtype]
        return self.kv_heads * BLOCK_TOKENS * line


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The rows of all layers, one after the other. Layers with windows have blocks of their own.

    The fields of windows are not printed, so that models without them keep the name of their layout.
    """

    rows: tuple[KVRow, ...]
    block_bytes: int
    window_block_bytes: int = field(default=0, repr=False)
    window: int = field(default=0, repr=False)  # tokens, the most of any layer; 0: no layer has a window

    @classmethod
    def of(cls, rows: Iterable[KVRow], window: int = 0) -> KVLayout:
        """Gives each row its offset in the blocks of its kind."""
        placed, ends = [], [0, 0]
        for row in rows:
            placed.append(replace(row, offset=ends[row.windowed]))
            size = row.key_bytes + row.value_bytes
            ends[row.windowed] += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(placed), ends[0], ends[1], window)

    def held_bytes(self, tokens: int) -> int:
        """Returns the bytes of the blocks that a sequence of `tokens` tokens holds between two steps."""
        blocks = -(-tokens // BLOCK_TOKENS)
        in_windows = min(blocks, most_kept(self.window)) if self.window else 0
        return blocks * self.block_bytes + in_windows * self.window_block_bytes


Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]  # names after the layer's prefix, as transformers 5 spells them


class ExpertNames(NamedTuple):
    """Names the tensors of a layer's experts in a checkpoint: one for each expert, or all of them stacked."""

    gate_up: str  # [E, 2I, H], or of up alone
    down: str  # [E, H, I]
    base: str  # of one expert's tensors, before its number
    projections: tuple[str, ...]  # gate and up, or up alone, then down
    transposed: bool = False  # stacks are [E, H, 2I] and [E, I, H]
    interleaved: bool = False  # in stacks, gate and up take turns

    @property
    def stacks(self) -> tuple[str, ...]:
        """Returns the stacks of one projection each, as MLX has them: gate [E, I, H], if any, up and down [E, H, I]."""
        parts = ("gate_proj", "up_proj", "down_proj")[-len(self.projections) :]
        return tuple(f"{self.base}.{part}.weight" for part in parts)

    def separate(self, expert: int) -> tuple[str, ...]:
        """Returns the tensors of one expert: gate [I, H], if it has one, up [I, H] and down [H, I]."""
        return tuple(f"{self.base}.{expert}.{part}.weight" for part in self.projections)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of tensors in a family's checkpoints. Our names follow transformers 5.

    `renames` holds (part of our name, the same part in checkpoints); each one may apply or not.
    `skipped` are regular expressions of tensors that have no place here.
    """

    renames: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False  # see ExpertNames
    interleaved: bool = False

    def spellings(self, name: str) -> tuple[str, ...]:
        """Returns `name` in every way in which checkpoints may write it, ours first."""
        found = [name]
        for ours, theirs in self.renames:
            found += [each.replace(ours, theirs, 1) for each in found if ours in each]
        return tuple(dict.fromkeys(found))

    def experts(self, layer: int) -> ExpertNames:
        """Returns the names of the experts' tensors of a layer, which is counted among all layers."""
        base = f"model.layers.{layer}.mlp.experts"
        first = "gate_up_proj" if len(self.projections) > 2 else "up_proj"
        stacks = f"{base}.{first}", f"{base}.down_proj"
        return ExpertNames(*stacks, base, self.projections, self.transposed, self.interleaved)


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of one layer's attention. Subclasses are other mechanisms, with fields of their own."""

    mechanism: ClassVar[str] = "dense"

    count: int
    kv_count: int
    dim: int
    qk_norm: str = "none"  # "none" | "head": each head by itself | "full": all heads of a token together
    norm_after_rope: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float = 0.0  # of scores; 0: dim ** -0.5
    clip: float = 0.0  # bounds queries, keys and values before rotary embedding; 0: none
    window: int = 0  # tokens that a token sees, itself among them; 0: all
    sinks: bool = False  # each head has one more score, whose value is zero
    v_norm: bool = False  # values are normalised, without weights
    v_is_k: bool = False  # a value is its key before norm and rotary embedding
    output_gate: str = ""  # of heads' outputs: "" | "queries": rows that follow the head's queries' | "element", "head"
    gate_softplus: bool = False  # outputs are weighted by a softplus, else by a sigmoid
    chosen: int = 0  # tokens that a token sees, chosen by an indexer; 0: all
    shares: bool = False  # the layer before it chose the tokens

    @property
    def state_floats(self) -> int:
        """Returns the numbers in the layer's state, 0 where keys and values are all that it keeps."""
        return 0

    @property
    def kv(self) -> KVRow:
        """Returns the shape of the layer's keys and values for one token."""
        return KVRow(self.kv_count, self.dim, self.dim)

    def tensors(self, hidden: int) -> Tensors:
        """Yields name and shape of the layer's tensors."""
        queries, keys = self.count * self.dim, self.kv_count * self.dim
        asked = 2 * queries if self.output_gate == "queries" else queries
        parts = (("q", asked), ("k", keys), ("v", keys))[: 2 if self.v_is_k else 3]
        for part, rows in parts:
            yield f"self_attn.{part}_proj.weight", (rows, hidden)
        yield "self_attn.o_proj.weight", (hidden, queries)
        if self.qkv_bias:
            for part, rows in parts:
                yield f"self_attn.{part}_proj.bias", (rows,)
        if self.o_bias:
            yield "self_attn.o_proj.bias", (hidden,)
        if self.qk_norm != "none":
            full = self.qk_norm == "full"
            yield "self_attn.q_norm.weight", (queries if full else self.dim,)
            yield "self_attn.k_norm.weight", (keys if full else self.dim,)
        if self.output_gate in ("element", "head"):  # a matrix of its own: a row for each element, or head
            yield "self_attn.gate_proj.weight", (queries if self.output_gate == "element" else self.count, hidden)
        if self.sinks:
            yield "self_attn.sinks", (self.count,)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `kind` "default", "linear", "proportional" or "yarn".

    The fields from `original_tokens` on are YaRN's.
    """

    theta: float
    dims: int  # of a head that turn, the first ones
    interleaved: bool = False  # neighbours form pairs, else the two halves do
    kind: str = "default"
    factor: float = 1.0
    share: float = 1.0  # of the frequencies, the first ones, that are not zero
    original_tokens: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The heads and positions of one layer's attention. Layers that are alike share one record."""

    heads: AttentionHeads
    rope: RopeSpec | None  # None: positions are not embedded


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a layer's gate chooses `top_k` of its experts.

    A softmax of the chosen logits alone is a softmax of all that is renormalised, so there is no switch for it.
    """

    experts: int
    top_k: int
    score: str = "softmax"  # of logits: "softmax" | "sigmoid"
    float32: bool = False  # the product with the gate is one of float32
    logit_bias: bool = False
    logit_cap: float = 0.0  # bounds logits by tanh; 0: none
    selection_bias: bool = False  # is added to scores where experts are chosen, and not where they are weighted
    renormalise: bool = False  # a token's weights sum to 1
    least_mass: float = 0.0  # the least divisor of weights
    added_mass: float = 0.0  # is added to the divisor
    scale: float = 1.0  # of weights
    groups: int = 1  # experts form groups, of which only `top_groups` are looked at
    top_groups: int = 1
    group_score: str = "max"  # "max": the best expert's | "top2": the two best experts' together
    input_norm: bool = False  # the gate reads the residual, normalised and scaled by a vector over the root of its size
    expert_scale: bool = False  # each expert has a factor of its weights


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """The part of a block after attention: experts, or one dense network in some layers, or nothing."""

    width: int  # of an expert
    activation: Activation = SILU
    expert_biases: bool = False
    dense_layers: frozenset[int] = frozenset()
    bare_layers: frozenset[int] = frozenset()  # which end after attention
    dense_width: int = 0
    shared_width: int = 0  # of a network that every token uses beside its experts; 0: none
    shared_gate: bool = False  # its output is weighted by a sigmoid
    shared_factor: float = 1.0  # of its output
    shared_stacked: bool = False  # its gate and up are one matrix
    latent: int = 0  # width in which routed experts work, between two projections; 0: the hidden size


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Norms, and the factors of embedding, residual and logits."""

    eps: float
    tied: bool = False  # the head is the embedding
    unit_offset: bool = False  # norms multiply by 1 + weight
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    norms: str = (
        "before"  # of a layer's parts: "before" | "after" | "both" | "once" for all | "alone": there is one part
    )
    centred: bool = False  # norms subtract the mean
    parallel: bool = False  # a dense network runs beside the experts, and norms stand around each part
    soft_cap: float = 0.0  # bounds logits by tanh; 0: none


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A second embedding of each token. Each layer adds its own part of it to the residual, through a gate.

    Its table has a row for each token and is read from disk row by row.
    """

    tokens: int  # rows of the table
    width: int  # of one layer's part
    factor: float  # of the rows


LAYER = re.compile(r"(?:model\.|language_model\.|backbone\.)*layers\.(\d+)\.")
EXTRA = re.compile(r"(?:model\.|language_model\.|backbone\.)*mtp(?:_\w+)?\.")
EXTRA_PART = re.compile(r"\.(?:eh_proj|enorm|hnorm|shared_head|mtp_block|mtp)\.")
STATE_ITEM_BYTES = 4  # float32 for all dtypes, because rounding adds up over a sequence


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder, the store and the budgets need to know of a model."""

    family: str
    architecture: str
    vocab: int
    hidden: int
    dtype: str  # "float32" | "bfloat16"
    context_tokens: int
    names: TensorNames
    attention: tuple[LayerAttention, ...]  # of each layer
    router: RouterSpec
    feed_forward: FeedForwardSpec
    block: BlockSpec
    encodings: tuple[str, ...] = ()  # of each layer's experts, as the store has them; (): `dtype` for all
    dense_encoding: str = ""  # of the dense matrices that are stored as bytes; "": none is
    kv_int8: bool = False  # keys and values are kept in int8 instead of `dtype`
    extra_layers: int = 0  # of checkpoints behind the last one, for predicting several tokens
    layer_inputs: LayerInputs | None = None
    held: tuple[int, int] | None = None  # the layers that this box holds, as first:after; None: all of them

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def held_layers(self) -> range:
        """Returns the layers whose dense weights, keys and values this box holds."""
        return range(*self.held) if self.held is not None else range(self.layers)

    @property
    def has_ends(self) -> bool:
        """Returns whether this box holds the embedding, the last norm and the head: the one with the first layer."""
        return self.held_layers.start == 0

    def unused(self, names: Iterable[str]) -> set[str]:
        """Returns the tensors of a checkpoint that serve other parts: vision, or predicting several tokens.

        A layer behind the last one is such a part if the configuration counts it, or if it has a tensor of that kind.
        """
        names = list(names)
        layers = {name: int(found[1]) for name in names if (found := LAYER.match(name))}
        extra = {layers[name] for name in names if name in layers and EXTRA_PART.search(name)}
        extra |= set(range(self.layers, self.layers + self.extra_layers))
        return {
            name
            for name in names
            if EXTRA.match(name)
            or (layers.get(name, 0) >= self.layers and layers[name] in extra)
            or any(re.match(pattern, name) for pattern in self.names.skipped)
        }

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Returns the layers with experts. Every index of layers of experts counts these alone, from 0."""
        others = self.feed_forward.dense_layers | self.feed_forward.bare_layers
        return tuple(layer for layer in range(self.layers) if layer not in others)

    @property
    def first_expert_layer(self) -> int:
        """Returns the number of this box's first layer with experts, counted among all such layers."""
        return sum(layer < self.held_layers.start for layer in self.expert_layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def geometry(self) -> ExpertGeometry:
        """Number and sizes of the experts."""
        router, feed_forward = self.router, self.feed_forward
        return ExpertGeometry(
            layers=len(self.expert_layers),
            experts=router.experts,
            top_k=router.top_k,
            hidden=feed_forward.latent or self.hidden,
            width=feed_forward.width,
            dtype=self.dtype,
            activation=feed_forward.activation,
            biases=feed_forward.expert_biases,
            encodings=self.encodings,
        )

    @property
    def kv_layout(self) -> KVLayout:
        """The offsets of each layer's keys and values in a block. Layers that other boxes hold have none here."""
        heads, held = [each.heads for each in self.attention], self.held_layers
        rows = [replace(each.kv, dtype=self.dtype, int8=self.kv_int8) for each in heads]
        windows = [each.window if row.kv_heads else 0 for each, row in zip(heads, rows, strict=True)]
        rows = [replace(row, windowed=window > 0) for row, window in zip(rows, windows, strict=True)]
        return KVLayout.of((row if layer in held else KVRow() for layer, row in enumerate(rows)), max(windows))

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in the layers that see all tokens."""
        return self.kv_layout.block_bytes // BLOCK_TOKENS

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Returns this box's layers with states. Every index of states counts these alone, from 0."""
        return tuple(layer for layer in self.held_layers if self.attention[layer].heads.state_floats)

    @property
    def chosen(self) -> int:
        """The tokens that attention sees where an indexer chooses them; 0 without one."""
        return max(each.heads.chosen for each in self.attention)

    @property
    def has_states(self) -> bool:
        """Returns whether any layer of the model has states, here or on another box."""
        return any(each.heads.state_floats for each in self.attention)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of one sequence's states on this box."""
        return STATE_ITEM_BYTES * sum(self.attention[layer].heads.state_floats for layer in self.state_layers)


NORMS = {  # `norms` of a block -> the norms of a layer, in the order of their use
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "once": ("input_layernorm",),
    "alone": ("input_layernorm",),
}


def row_tables(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the tables of which a step reads single rows, by their names in transformers 5."""
    if (inputs := spec.layer_inputs) is None:
        return {}
    return {"model.embed_tokens_per_layer.weight": (inputs.tokens, spec.layers * inputs.width)}


def dense_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Returns the shape of every tensor that this box holds outside the experts and the row tables.

    Its name is the one in transformers 5.
    """
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)} if spec.has_ends else {}
    for layer in spec.held_layers:
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer)}
    if not spec.has_ends:
        return shapes
    shapes["model.norm.weight"] = (spec.hidden,)
    if (inputs := spec.layer_inputs) is not None:
        shapes["model.per_layer_model_projection.weight"] = (spec.layers * inputs.width, spec.hidden)
        shapes["model.per_layer_projection_norm.weight"] = (inputs.width,)
    if not spec.block.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> Tensors:
    for name in NORMS[spec.block.norms]:
        yield f"{name}.weight", (spec.hidden,)
    yield from spec.attention[layer].heads.tensors(spec.hidden)
    if spec.block.parallel:
        for name in ("pre", "post"):
            yield f"{name}_feedforward_layernorm.weight", (spec.hidden,)
        for name in ("pre", "post"):
            yield f"{name}_feedforward_layernorm_2.weight", (spec.hidden,)
        yield "post_feedforward_layernorm_1.weight", (spec.hidden,)
        yield "layer_scalar", (1,)
    if (inputs := spec.layer_inputs) is not None:
        yield "per_layer_input_gate.weight", (inputs.width, spec.hidden)
        yield "per_layer_projection.weight", (spec.hidden, inputs.width)
        yield "post_per_layer_input_norm.weight", (spec.hidden,)
    feed_forward = spec.feed_forward
    if layer in feed_forward.dense_layers:
        yield from _mlp_shapes("mlp", spec.hidden, feed_forward.dense_width, feed_forward.activation)
    elif layer not in feed_forward.bare_layers:
        yield from _expert_layer_shapes(spec)


def _expert_layer_shapes(spec: ModelSpec) -> Tensors:
    router, feed_forward = spec.router, spec.feed_forward
    yield "mlp.gate.weight", (router.experts, spec.hidden)
    if router.logit_bias:
        yield "mlp.gate.bias", (router.experts,)
    if router.selection_bias:
        yield "mlp.gate.e_score_correction_bias", (router.experts,)
    if router.input_norm:
        yield "mlp.gate.scale", (spec.hidden,)
    if router.expert_scale:
        yield "mlp.gate.per_expert_scale", (router.experts,)
    if feed_forward.shared_width:
        sizes, stacked = (spec.hidden, feed_forward.shared_width), feed_forward.shared_stacked
        yield from _mlp_shapes("mlp.shared_experts", *sizes, feed_forward.activation, stacked)
    if feed_forward.latent:
        yield "mlp.fc1_latent_proj.weight", (feed_forward.latent, spec.hidden)
        yield "mlp.fc2_latent_proj.weight", (spec.hidden, feed_forward.latent)
    if feed_forward.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, spec.hidden)


def _mlp_shapes(prefix: str, hidden: int, width: int, activation: Activation, stacked: bool = False) -> Tensors:
    if stacked:
        yield f"{prefix}.gate_up_proj.weight", (activation.inputs * width, hidden)
    else:
        for part in ("gate_proj", "up_proj")[-activation.inputs :]:
            yield f"{prefix}.{part}.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
