"""What a supported model looks like: one frozen record per model, and the tensors that it has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgemoe.families.kv_layout import KVLayout
from edgemoe.families.records import Attention, Block, FeedForward, Names, RouterSpec, Shape, Tensors
from edgemoe.types.experts import DTYPE_BYTES, ExpertGeometry
from edgemoe.types.step import BLOCK_TOKENS

STATE_ITEM_BYTES = 4  # float32 whatever the model's dtype, because rounding adds up over a sequence


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder, the store and the budgets need to know of a model."""

    family: str
    architecture: str
    vocab: int
    hidden: int
    dtype: str  # "float32" | "bfloat16"
    context_tokens: int
    names: Names
    attention: tuple[Attention, ...]  # of each layer
    router: RouterSpec
    feed_forward: FeedForward
    block: Block
    encodings: tuple[str, ...] = ()  # of each layer's experts, as the store has them; (): `dtype` for all
    dense_encoding: str = ""  # of the dense matrices that are stored as bytes; "": none is
    kv_int8: bool = False  # keys and values are kept in int8, whatever `dtype`

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Returns the layers that have experts. Whatever counts experts counts these layers alone, from 0."""
        return tuple(layer for layer in range(self.layers) if layer not in self.feed_forward.dense_layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def geometry(self) -> ExpertGeometry:
        """Of its experts."""
        router, feed_forward = self.router, self.feed_forward
        return ExpertGeometry(
            layers=self.layers - len(feed_forward.dense_layers),
            experts=router.experts,
            top_k=router.top_k,
            hidden=self.hidden,
            width=feed_forward.width,
            dtype=self.dtype,
            activation=feed_forward.activation,
            biases=feed_forward.expert_biases,
            encodings=self.encodings,
        )

    @property
    def kv_layout(self) -> KVLayout:
        """Where a block has each layer's keys and values."""
        rows = (replace(each.heads.kv, dtype=self.dtype, int8=self.kv_int8) for each in self.attention)
        return KVLayout.of(rows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.kv_layout.block_bytes // BLOCK_TOKENS

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Returns the layers that have states. Whatever counts states counts these layers alone, from 0."""
        return tuple(n for n, each in enumerate(self.attention) if each.heads.state_floats)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of one sequence's states in all layers."""
        return STATE_ITEM_BYTES * sum(each.heads.state_floats for each in self.attention)


def dense_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name (as transformers 5 spells it) -> shape of every tensor that is not an expert's."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer)}
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.block.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> Tensors:
    yield "input_layernorm.weight", (spec.hidden,)
    yield from spec.attention[layer].heads.tensors(spec.hidden)
    yield "post_attention_layernorm.weight", (spec.hidden,)
    if spec.block.parallel:
        for name in ("pre", "post"):
            yield f"{name}_feedforward_layernorm.weight", (spec.hidden,)
        for name in ("pre", "post"):
            yield f"{name}_feedforward_layernorm_2.weight", (spec.hidden,)
        yield "post_feedforward_layernorm_1.weight", (spec.hidden,)
        yield "layer_scalar", (1,)
    if layer in spec.feed_forward.dense_layers:
        yield from _mlp_shapes("mlp", spec.hidden, spec.feed_forward.dense_width)
    else:
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
        yield from _mlp_shapes("mlp.shared_experts", spec.hidden, feed_forward.shared_width)
    if feed_forward.shared_gate:
        yield "mlp.shared_expert_gate.weight", (1, spec.hidden)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Tensors:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
