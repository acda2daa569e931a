"""What a supported model looks like: one table of families, one frozen record per model. Imports no torch.

`spec_from_config` reads `config.json` as transformers 4 and 5 write it. A variant that the decoder does not have
is refused here, by name, so that nothing downstream needs to ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgemoe.errors import CheckpointError, UnsupportedModel

N = TypeVar("N", int, float)
Shape = tuple[int, ...]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MAX_EXPERTS = 1 << 17  # of all layers together
MOST = {  # of anything that is to come; what is larger is nonsense
    "vocab": 1 << 24,
    "hidden": 1 << 20,
    "layers": 1 << 12,
    "heads": 1 << 14,
    "head_dim": 1 << 14,
    "expert_width": 1 << 22,
    "experts": 1 << 16,
    "context_tokens": 1 << 31,
}
LEAST_REAL, MOST_REAL = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture names its tensors, and what its configuration leaves unsaid.

    Names are those of transformers 5; `older` holds (part, the part as transformers 4 spells it).
    """

    name: str  # `model_type` of the configuration
    architecture: str
    width_key: str  # where the configuration has the experts' width
    projections: tuple[str, str, str]  # gate, up and down of one expert where each is a tensor of its own
    qk_norm: bool
    norm_topk: bool | None  # None: the configuration says
    default_theta: float
    default_eps: float
    older: tuple[tuple[str, str], ...] = ()

    def spellings(self, name: str) -> tuple[str, ...]:
        """`name` as each version of transformers writes it, newest first."""
        return (name, *(name.replace(new, old) for new, old in self.older if new in name))

    def stacked(self, layer: int) -> tuple[str, str]:
        """Tensors with a whole layer's experts: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
        base = f"model.layers.{layer}.mlp.experts"
        return f"{base}.gate_up_proj", f"{base}.down_proj"

    def separate(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Tensors of one expert: gate [I, H], up [I, H] and down [H, I]; see `spellings`."""
        base = f"model.layers.{layer}.mlp.experts.{expert}"
        gate, up, down = self.projections
        return f"{base}.{gate}.weight", f"{base}.{up}.weight", f"{base}.{down}.weight"


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            width_key="intermediate_size",
            projections=("w1", "w3", "w2"),
            qk_norm=False,
            norm_topk=True,
            default_theta=1e6,
            default_eps=1e-5,
            older=((".mlp.", ".block_sparse_moe."),),
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            width_key="moe_intermediate_size",
            projections=("gate_proj", "up_proj", "down_proj"),
            qk_norm=True,
            norm_topk=None,
            default_theta=1e4,
            default_eps=1e-6,
        ),
    )
}


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

    @property
    def names(self) -> Family:
        """The family's record in the table."""
        return FAMILIES[self.architecture]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def expert_bytes(self) -> int:
        """One expert: gate and up rows [2I, H], then down [H, I]."""
        return 3 * self.expert_width * self.hidden * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def gate_up_shape(self) -> Shape:
        return 2 * self.expert_width, self.hidden

    @property
    def down_shape(self) -> Shape:
        return self.hidden, self.expert_width


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


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a `config.json`. Raises UnsupportedModel, and CheckpointError for nonsense."""
    family = _family(config)
    _refuse_variants(config, family)
    hidden = _integer(config, "hidden_size")
    heads = _integer(config, "num_attention_heads")
    norm_topk = config.get("norm_topk_prob", False) if family.norm_topk is None else family.norm_topk
    rope, context_tokens = _rope(config, family)
    spec = ModelSpec(
        family=family.name,
        architecture=family.architecture,
        vocab=_integer(config, "vocab_size"),
        hidden=hidden,
        layers=_integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads", default=heads),
        head_dim=_integer(config, "head_dim", default=hidden // heads),
        expert_width=_integer(config, family.width_key),
        experts=_integer(config, "num_local_experts", "num_experts"),
        top_k=_integer(config, "num_experts_per_tok"),
        norm_topk=bool(norm_topk),
        rms_eps=_real(config, "rms_norm_eps", default=family.default_eps),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
        dtype=_dtype(config),
        context_tokens=context_tokens,
    )
    _check_sizes(spec)
    return spec


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise CheckpointError(f"config.json: architectures must be a list, not {named!r}")
    for family in FAMILIES.values():
        if family.architecture in named or (not named and config.get("model_type") == family.name):
            return family
    found = ", ".join(map(str, named)) or config.get("model_type") or "none named in config.json"
    raise UnsupportedModel(f"architecture not supported: {found}; supported are {', '.join(sorted(FAMILIES))}")


def _refuse_variants(config: Mapping[str, Any], family: Family) -> None:
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    unsupported = {
        "attention_bias": config.get("attention_bias", False),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_only_layers": config.get("mlp_only_layers") or False,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "sliding_window": windowed and _integer(config, "sliding_window") < _integer(config, "max_position_embeddings"),
        "quantization_config": config.get("quantization_config") or False,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, refused in unsupported.items():
        if refused:
            raise UnsupportedModel(
                f"{family.architecture} with {key} = {config.get(key)!r} is not supported; "
                f"supported are {', '.join(sorted(FAMILIES))} with dense attention, SiLU, an expert layer in every "
                "block and unquantised float32 or bfloat16 weights"
            )


def _rope(config: Mapping[str, Any], family: Family) -> tuple[RopeSpec, int]:
    """The rotary embedding and the tokens of context that it reaches."""
    context_tokens = _integer(config, "max_position_embeddings")
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be a table, not {given!r}")
    theta = _real(given, "rope_theta", default=_real(config, "rope_theta", default=family.default_theta))
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", "linear", "yarn") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"rotary embedding {dict(given)!r} is not supported; have default, linear and yarn")
    if kind == "default":
        return RopeSpec(theta), context_tokens
    original = _integer(config, "original_max_position_embeddings", default=_original_tokens(given, context_tokens))
    if kind == "yarn" and given.get("factor") is None:
        factor = context_tokens / original
    else:
        factor = _real(given, "factor")
    if kind == "linear":
        return RopeSpec(theta, kind, factor), context_tokens
    rope = RopeSpec(
        theta,
        kind,
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=_real(given, "beta_fast", default=32.0),
        beta_slow=_real(given, "beta_slow", default=1.0),
        truncate=bool(given.get("truncate", True)),
    )
    return rope, max(context_tokens, int(original * factor))


def _original_tokens(given: Mapping[str, Any], context_tokens: int) -> int:
    return _integer(given, "original_max_position_embeddings", default=context_tokens)


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Stated, or from `factor` [YaRN, 3.4], with DeepSeek's mscale pair."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return _real(given, "attention_factor")
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(_real(given, "mscale")) / scale(_real(given, "mscale_all_dim"))
    return scale(1.0)


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"weights of type {dtype} are not supported; have {', '.join(DTYPE_BYTES)}")
    return dtype


def _check_sizes(spec: ModelSpec) -> None:
    for name, most in MOST.items():
        if getattr(spec, name) > most:
            raise CheckpointError(f"config.json: {name} = {getattr(spec, name)} is impossible; {most} is the most")
    for fault, what in (
        (spec.layers * spec.experts > MAX_EXPERTS, f"more than {MAX_EXPERTS} experts are impossible"),
        (spec.heads % spec.kv_heads, "num_attention_heads must be a multiple of num_key_value_heads"),
        (spec.head_dim % 2, "head_dim must be even"),
        (spec.hidden % 2 or spec.expert_width % 2, "hidden_size and the experts' width must be even"),
        (spec.top_k > spec.experts, "num_experts_per_tok must be at most the number of experts"),
    ):
        if fault:
            raise CheckpointError(f"config.json: {what}")


def _integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    return _number(config, keys, default, int)


def _real(config: Mapping[str, Any], *keys: str, default: float | None = None) -> float:
    return _number(config, keys, default, float)


def _number(config: Mapping[str, Any], keys: tuple[str, ...], default: N | None, kind: type[N]) -> N:
    """The first of `keys` that is set, a positive number."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default) if config.get(key) is not None else default
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys)}")
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not LEAST_REAL <= value <= MOST_REAL:
        raise CheckpointError(f"config.json: {key} must be a positive number, not {str(value)[:80]!r}")
    return kind(value)
