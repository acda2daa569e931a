"""What a supported model looks like: one frozen record per model, and the tensors that it has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgemoe.families.kv_layout import KVLayout, KVRow
from edgemoe.families.table import FAMILIES, Family
from edgemoe.types.experts import DTYPE_BYTES, ExpertGeometry
from edgemoe.types.step import BLOCK_TOKENS

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `kind` "default", "linear" or "yarn"; the fields after `factor` are YaRN's."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that the decoder, the store and the budgets need to know of a model."""

    family: str
    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int
    experts: int
    top_k: int
    norm_topk: bool
    rms_eps: float
    qk_norm: bool
    tied: bool  # the head is the embedding
    rope: RopeSpec
    dtype: str  # "float32" | "bfloat16"
    context_tokens: int
    encodings: tuple[str, ...] = ()  # of each layer's experts, as the store has them; (): `dtype` for all

    @property
    def names(self) -> Family:
        """The family's record in the table."""
        return FAMILIES[self.architecture]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def geometry(self) -> ExpertGeometry:
        """Of its experts."""
        sizes = (self.layers, self.experts, self.top_k, self.hidden, self.expert_width)
        return ExpertGeometry(*sizes, self.dtype, encodings=self.encodings)

    @property
    def kv_layout(self) -> KVLayout:
        """Where a block has each layer's keys and values."""
        row = KVRow(self.kv_heads, self.head_dim, self.head_dim, self.dtype)
        return KVLayout.of([row] * self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.kv_layout.block_bytes // BLOCK_TOKENS


def dense_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name (as transformers 5 spells it) -> shape of every tensor that is not an expert's."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec)}
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "input_layernorm.weight", (spec.hidden,)
    yield "self_attn.q_proj.weight", (queries, spec.hidden)
    yield "self_attn.k_proj.weight", (keys, spec.hidden)
    yield "self_attn.v_proj.weight", (keys, spec.hidden)
    yield "self_attn.o_proj.weight", (spec.hidden, queries)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield "post_attention_layernorm.weight", (spec.hidden,)
    yield "mlp.gate.weight", (spec.experts, spec.hidden)
