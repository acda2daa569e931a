"""The gated delta net in place of attention, as three of four layers of Qwen3-Next and Qwen3.5-MoE have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import FULL, LINEAR, Config, integer, layer_count, stated_kinds
from edgemoe.families.spec import Attention, Heads, KVRow, Tensors

MOST_TAPS = 64
Layers = Callable[[Config, Attention], tuple[Attention, ...]]


@dataclass(frozen=True, slots=True)
class DeltaHeads(Heads):
    """The heads of a gated delta net: `count` of values, `kv_count` of queries and keys, `dim` those of a key head.

    Each key head serves count / kv_count value heads in a row.
    """

    mechanism: ClassVar[str] = "delta"

    value_dim: int = 0
    taps: int = 4  # tokens that the convolution sees, the current one among them
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
    def state_floats(self) -> int:
        """Returns the numbers in a layer's state: the convolution's tail, and a matrix for each value head."""
        return (self.taps - 1) * self.channels + self.count * self.dim * self.value_dim

    @property
    def kv(self) -> KVRow:
        return KVRow()

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
        """Returns where queries, keys, values and gates, then betas and decays, lie in the grouped projections."""
        share = self.count // self.kv_count
        sizes = (self.dim, self.dim, share * self.value_dim, share * self.value_dim)
        return _ungrouped(sizes, self.kv_count), _ungrouped((share, share), self.kv_count)


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

    def read(config: Config, attention: Attention) -> tuple[Attention, ...]:
        heads = DeltaHeads(
            count=integer(config, "linear_num_value_heads", default=32),
            kv_count=integer(config, "linear_num_key_heads", default=16),
            dim=integer(config, "linear_key_head_dim", default=128),
            value_dim=integer(config, "linear_value_head_dim", default=128),
            taps=integer(config, "linear_conv_kernel_dim", default=4),
            grouped=grouped,
        )
        if not 2 <= heads.taps <= MOST_TAPS:
            raise CheckpointError(f"config.json: linear_conv_kernel_dim = {heads.taps} is none of 2 to {MOST_TAPS}")
        kinds = {FULL: attention, LINEAR: replace(attention, heads=heads, rope=None)}
        return tuple(kinds[kind] for kind in _kinds(config))

    return read


def _kinds(config: Config) -> list[str]:
    """Returns what each layer is: as stated, else every fourth is attention."""
    kinds = stated_kinds(config, "layer_types", (FULL, LINEAR))
    if kinds is None:
        every = integer(config, "full_attention_interval", default=4)
        kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(layer_count(config))]
    if FULL not in kinds:
        raise UnsupportedModel(f"config.json: layer_types has no {FULL}; a model without any is not supported")
    return kinds
