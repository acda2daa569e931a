"""The record of multi-head latent attention [DeepSeek-V2, 2.1], and how configurations write it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.read import Config, Read, choice, integer, real, rope_table, whole
from edgemoe.families.spec import Heads, KVRow, Tensors

MOST_WIDTH = 1 << 14


@dataclass(frozen=True, slots=True)
class LatentHeads(Heads):
    """The heads of one layer. A token's keys and values are made of `rank` numbers and `dim` that turn.

    `dim` is what rotary embedding turns of a head's key: the same for all heads.
    """

    mechanism: ClassVar[str] = "latent"

    query_rank: int = 0  # 0: queries are made of the hidden state at once
    rank: int = 0
    plain: int = 0  # of a head's key, what rotary embedding leaves alone
    value: int = 0  # of a head's value

    @property
    def key(self) -> int:
        """The width of a head's key."""
        return self.plain + self.dim

    @property
    def kv(self) -> KVRow:
        return KVRow(1, self.rank + self.dim, self.rank, values_in_keys=True)

    def tensors(self, hidden: int) -> Tensors:
        queries = self.count * self.key
        if self.query_rank:
            yield "self_attn.q_a_proj.weight", (self.query_rank, hidden)
            yield "self_attn.q_a_layernorm.weight", (self.query_rank,)
            yield "self_attn.q_b_proj.weight", (queries, self.query_rank)
        else:
            yield "self_attn.q_proj.weight", (queries, hidden)
        yield "self_attn.kv_a_proj_with_mqa.weight", (self.rank + self.dim, hidden)
        yield "self_attn.kv_a_layernorm.weight", (self.rank,)
        yield "self_attn.kv_b_proj.weight", (self.count * (self.plain + self.value), self.rank)
        yield "self_attn.o_proj.weight", (hidden, self.count * self.value)


def _width(key: str, default: int | None = None) -> Read:
    """Returns a reader of a width: even, and not beyond reason."""
    read = whole(key, default=default)

    def width(config: Config) -> int:
        value: int = read(config)
        if value % 2 or value > MOST_WIDTH:
            raise CheckpointError(f"config.json: {key} must be even and at most {MOST_WIDTH}, not {value}")
        return value

    return width


def _value(config: Config) -> int:
    """Returns the width of a value, which lies in a line as wide as a key."""
    value, key = (
        integer(config, "v_head_dim"),
        integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim"),
    )
    if value > key:
        raise UnsupportedModel(f"config.json: v_head_dim = {value} is not supported: at most that of keys, {key}")
    return value


def _scale(config: Config) -> float:
    """Returns what scores are multiplied with: by YaRN, mscale_all_dim's share counts twice."""
    scale = float((integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")) ** -0.5)
    given = rope_table(config)
    if (given.get("rope_type") or given.get("type") or "default") != "default" and given.get("mscale_all_dim"):
        factor = real(given, "factor")
        scale *= (1.0 if factor <= 1.0 else 0.1 * real(given, "mscale_all_dim") * math.log(factor) + 1.0) ** 2
    return scale


LATENT = {  # how configurations write the record
    "kv_count": whole("num_attention_heads"),
    "dim": whole("qk_rope_head_dim"),
    "query_rank": _width("q_lora_rank", default=0),
    "rank": _width("kv_lora_rank"),
    "plain": _width("qk_nope_head_dim"),
    "value": _value,
    "scale": _scale,
    "qkv_bias": choice("attention_bias", {False: False}, False),
}
