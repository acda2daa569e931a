"""Layers that keep a state for each sequence in place of keys and values, and how configurations write them.

A state is the tail of a causal convolution, and a matrix for each head where the mechanism has some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import ClassVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.mechanisms import Layers
from edgemoe.families.read import (
    FULL,
    LINEAR,
    MOST_LAYERS,
    Config,
    ConfigReader,
    choice,
    flag,
    integer,
    layer_count,
    stated_kinds,
)
from edgemoe.families.spec import AttentionHeads, KVRow, LayerAttention, Tensors

MOST_TAPS = 64


@dataclass(frozen=True, slots=True)
class StateHeads(AttentionHeads):
    """The sizes of a layer's state."""

    taps: int = 4  # tokens that the convolution sees, the current one among them

    @property
    def channels(self) -> int:
        """Returns the width of the convolution."""
        return self.dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Returns the number of matrices in a state, and their rows and columns."""
        return 0, 0, 0

    @property
    def state_floats(self) -> int:
        """Returns the numbers in a layer's state: the convolution's tail, then the matrices."""
        return (self.taps - 1) * self.channels + prod(self.matrices)

    @property
    def kv(self) -> KVRow:
        return KVRow()


@dataclass(frozen=True, slots=True)
class DeltaHeads(StateHeads):
    """The heads of a gated delta net: `count` of values, `kv_count` of queries and keys. `dim` is of a key head.

    Each key head serves count / kv_count value heads in a row.
    """

    mechanism: ClassVar[str] = "delta"

    value_dim: int = 0
    grouped: bool = False  # the input projections are two, in each of which a key head's rows lie together

    @property
    def keys(self) -> int:
        """Returns the width of all queries, or of all keys."""
        return self.kv_count * self.dim

    @property
    def values(self) -> int:
        return self.count * self.value_dim

    @property
    def channels(self) -> int:
        """Returns the width of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.count, self.dim, self.value_dim

    def tensors(self, hidden: int) -> Tensors:
        if self.grouped:
            yield "linear_attn.in_proj_qkvz.weight", (self.channels + self.values, hidden)
            yield "linear_attn.in_proj_ba.weight", (2 * self.count, hidden)
        else:
            yield "linear_attn.in_proj_qkv.weight", (self.channels, hidden)
            yield "linear_attn.in_proj_z.weight", (self.values, hidden)
            yield "linear_attn.in_proj_b.weight", (self.count, hidden)
            yield "linear_attn.in_proj_a.weight", (self.count, hidden)
        yield "linear_attn.conv1d.weight", (self.channels, 1, self.taps)
        yield "linear_attn.A_log", (self.count,)
        yield "linear_attn.dt_bias", (self.count,)
        yield "linear_attn.norm.weight", (self.value_dim,)
        yield "linear_attn.out_proj.weight", (hidden, self.values)

    def order(self) -> tuple[list[int], list[int]]:
        """Returns the row numbers of queries, keys, values and gates, then of betas and decays, in the grouped
        projections.
        """
        share = self.count // self.kv_count
        sizes = (self.dim, self.dim, share * self.value_dim, share * self.value_dim)
        return _ungrouped(sizes, self.kv_count), _ungrouped((share, share), self.kv_count)


@dataclass(frozen=True, slots=True)
class ConvHeads(StateHeads):
    """A short convolution between two gates [LFM2], over `dim` channels. It has no heads."""

    mechanism: ClassVar[str] = "conv"

    biases: bool = False

    def tensors(self, hidden: int) -> Tensors:
        for name, shape in (("in_proj", (3 * self.dim, hidden)), ("out_proj", (hidden, self.dim))):
            yield f"conv.{name}.weight", shape
            if self.biases:
                yield f"conv.{name}.bias", shape[:1]
        yield "conv.conv1d.weight", (self.dim, 1, self.taps)
        if self.biases:
            yield "conv.conv1d.bias", (self.dim,)


@dataclass(frozen=True, slots=True)
class MambaHeads(StateHeads):
    """The heads of a Mamba-2 layer [Mamba-2]: `count` of `value_dim` channels; `dim` is of a state.

    They form `kv_count` groups, each of which shares its inputs and outputs B and C.
    """

    mechanism: ClassVar[str] = "mamba"

    value_dim: int = 0
    conv_bias: bool = True
    biases: bool = False  # of the projections

    @property
    def values(self) -> int:
        return self.count * self.value_dim

    @property
    def shared(self) -> int:
        """Returns the width of all groups' B, or of their C."""
        return self.kv_count * self.dim

    @property
    def channels(self) -> int:
        """Returns the width of the convolution: values, B, C."""
        return self.values + 2 * self.shared

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.count, self.dim, self.value_dim

    def tensors(self, hidden: int) -> Tensors:
        rows = self.values + self.channels + self.count  # gates, the convolution's channels, steps
        for name, shape in (("in_proj", (rows, hidden)), ("out_proj", (hidden, self.values))):
            yield f"mamba.{name}.weight", shape
            if self.biases:
                yield f"mamba.{name}.bias", shape[:1]
        yield "mamba.conv1d.weight", (self.channels, 1, self.taps)
        if self.conv_bias:
            yield "mamba.conv1d.bias", (self.channels,)
        for name in ("A_log", "D", "dt_bias"):
            yield f"mamba.{name}", (self.count,)
        yield "mamba.norm.weight", (self.values,)


def _ungrouped(sizes: tuple[int, ...], groups: int) -> list[int]:
    """Returns the rows of groups with parts of these sizes, part by part."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [
        group * sum(sizes) + start + row
        for start, size in zip(starts, sizes, strict=True)
        for group in range(groups)
        for row in range(size)
    ]


def delta_layers(grouped: bool) -> Layers:
    """Returns the reader of layers that are gated delta nets where the configuration does not say otherwise."""

    def read(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
        heads = DeltaHeads(
            count=integer(config, "linear_num_value_heads", default=32),
            kv_count=integer(config, "linear_num_key_heads", default=16),
            dim=integer(config, "linear_key_head_dim", default=128),
            value_dim=integer(config, "linear_value_head_dim", default=128),
            taps=_taps(config, "linear_conv_kernel_dim", 4),
            grouped=grouped,
        )
        return _of_kinds(_delta_kinds(config), LINEAR, heads, attention)

    return read


def _delta_kinds(config: Config) -> list[str]:
    """Returns each layer's kind, FULL or LINEAR: as stated, else every fourth is FULL."""
    kinds = stated_kinds(config, "layer_types", (FULL, LINEAR))
    if kinds is None:
        every = integer(config, "full_attention_interval", default=4)
        kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(layer_count(config))]
    return kinds


CONV = "conv"


def conv_layers(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Reads layers that are short convolutions or attention, as `layer_types` or `full_attn_idxs` say."""
    kinds = stated_kinds(config, "layer_types", (FULL, CONV))
    if kinds is None:
        full = config.get("full_attn_idxs")
        if not isinstance(full, list):
            raise CheckpointError("config.json: layer_types is missing, the list of the layers that are attention")
        kinds = [FULL if layer in full else CONV for layer in range(layer_count(config))]
    hidden, biases = integer(config, "hidden_size"), flag("conv_bias")(config)
    heads = ConvHeads(1, 1, hidden, taps=_taps(config, "conv_L_cache", 3), biases=biases)
    return _of_kinds(kinds, CONV, heads, attention)


@dataclass(frozen=True, slots=True)
class NoHeads(AttentionHeads):
    """Stands for the attention of layers that have none. Its sizes mean nothing."""

    mechanism: ClassVar[str] = "none"

    @property
    def kv(self) -> KVRow:
        return KVRow()

    def tensors(self, hidden: int) -> Tensors:
        return iter(())


NO_ATTENTION = LayerAttention(NoHeads(1, 1, 2), None)
MambaSizes = Callable[[Config], MambaHeads]


def granite_mamba(config: Config) -> MambaHeads:
    """Reads the Mamba-2 heads of a Granite hybrid."""
    count = integer(config, "mamba_n_heads", default=128)
    width = integer(config, "mamba_expand", default=2) * integer(config, "hidden_size")
    stated = config.get("mamba_d_head") not in (None, "auto")
    return MambaHeads(
        count=count,
        kv_count=integer(config, "mamba_n_groups", default=1),
        dim=integer(config, "mamba_d_state", default=256),
        value_dim=integer(config, "mamba_d_head") if stated else max(1, width // count),
        taps=_taps(config, "mamba_d_conv", 4),
        conv_bias=flag("mamba_conv_bias", default=True)(config),
        biases=flag("mamba_proj_bias")(config),
    )


PARTS = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}  # as patterns write them
LEGACY_PARTS = {"mamba": LINEAR, "attention": FULL}


def part_kinds(config: Config) -> list[str]:
    """Reads layers of one part each: the kind of each, of PARTS. Raises CheckpointError and UnsupportedModel."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        listed = [PARTS.get(letter, letter) for letter in pattern]
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_LAYERS:
        raise CheckpointError(
            f"config.json: layers_block_type must name 1 to {MOST_LAYERS} layers, or hybrid_override_pattern have a "
            f"letter for each, not {str(listed)[:80]}"
        )
    kinds = [LEGACY_PARTS.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]
    if unknown := [str(kind)[:80] for kind in kinds if kind not in PARTS.values()]:
        known = ", ".join(PARTS.values())
        raise UnsupportedModel(f"config.json: layers_block_type has {unknown[0]!r}; supported are {known}")
    return kinds


def layers_of_part(*parts: str) -> ConfigReader:
    """Returns a reader of the layers that are one of these parts."""
    return lambda config: frozenset(n for n, kind in enumerate(part_kinds(config)) if kind in parts)


def dense_part_width(config: Config) -> int:
    """Returns the width of layers that are dense networks; 0 for a model without such layers."""
    return integer(config, "intermediate_size") if "mlp" in part_kinds(config) else 0


NEMOTRON_LACKS: dict[str, tuple[bool | int | str, ...]] = {  # switches, and the values that are supported
    "mamba_hidden_act": ("silu",),
    "mlp_bias": (False,),
    "n_shared_experts": (1,),
}


def nemotron_layers(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Reads layers of one part each: Mamba-2, attention, or another part and no attention."""
    _demand_free_steps(config)
    for key, values in NEMOTRON_LACKS.items():
        choice(key, dict.fromkeys(values), None)(config)
    heads = MambaHeads(
        count=integer(config, "mamba_num_heads", default=128),
        kv_count=integer(config, "n_groups", "mamba_n_groups", default=8),
        dim=integer(config, "ssm_state_size", default=128),
        value_dim=integer(config, "mamba_head_dim", default=64),
        taps=_taps(config, "conv_kernel", 4),
        conv_bias=flag("use_conv_bias", default=True)(config),
        biases=flag("use_bias")(config),
    )
    kinds = part_kinds(config)
    if FULL not in kinds:
        raise UnsupportedModel("config.json: no layer is attention; a model without any is not supported")
    made = {LINEAR: LayerAttention(heads, None), FULL: attention}
    return tuple(made.get(kind, NO_ATTENTION) for kind in kinds)


def mamba_layers(sizes: MambaSizes) -> Layers:
    """Returns a reader of layers that are Mamba-2 or attention."""

    def read(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
        kinds = config.get("layer_types") or config.get("layers_block_type")
        if not isinstance(kinds, list):
            raise CheckpointError("config.json: layer_types is missing, the list of the layers that are attention")
        names = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}
        kinds = [names.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        checked = stated_kinds({**config, "layer_types": kinds}, "layer_types", (FULL, LINEAR))
        assert checked is not None
        _demand_free_steps(config)
        return _of_kinds(checked, LINEAR, sizes(config), attention)

    return read


def _demand_free_steps(config: Config) -> None:
    """Raises UnsupportedModel where the steps of time are bounded."""
    limit = config.get("time_step_limit")
    known = (0.0, inf), (0.0, "Infinity"), (0.0, {"__float__": "Infinity"})  # as JSON may write it
    if limit is not None and (not isinstance(limit, list | tuple) or tuple(limit) not in known):
        raise UnsupportedModel(f"config.json: time_step_limit = {str(limit)[:80]} is not supported; 0 to infinity is")


def _taps(config: Config, key: str, usual: int) -> int:
    taps = integer(config, key, default=usual)
    if not 2 <= taps <= MOST_TAPS:
        raise CheckpointError(f"config.json: {key} = {taps} is none of 2 to {MOST_TAPS}")
    return taps


def _of_kinds(kinds: list[str], kind: str, heads: StateHeads, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    """Returns the layers. Layers of `kind` have states. Raises UnsupportedModel for a model without attention."""
    if FULL not in kinds:
        raise UnsupportedModel(f"config.json: layer_types has no {FULL}; a model without any is not supported")
    with_state = LayerAttention(heads, None)
    return tuple(with_state if each == kind else attention for each in kinds)
