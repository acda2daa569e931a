"""Families whose attention sees chosen tokens only: the attention, how configurations write it, and the records.

A small attention of its own, the indexer, scores all tokens before a query. The query attends to the tokens with
the highest scores [DeepSeek-V3.2, 2.1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.family import DEEPSEEK_V3_ROUTER, SHARED_EXPERTS, Family, FieldSources
from edgemoe.families.mechanisms import LATENT, LatentHeads, width
from edgemoe.families.read import Config, flag, integer, layer_count, stated_kinds, typed_layers, whole
from edgemoe.families.spec import KVRow, LayerAttention, ModelSpec, Tensors

KINDS = ("full", "shared")
MOST_HEADS = 1 << 14
OFFSET = "index_skip_topk_offset"
LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True, slots=True)
class SparseLatentHeads(LatentHeads):
    """The heads of latent attention to chosen tokens, and of the layer's indexer.

    The indexer's key of a token lies behind its latent in the cache. `dim` of its elements turn, the first ones.
    """

    mechanism: ClassVar[str] = "sparse latent"

    index_count: int = 0  # heads of the indexer's queries; one key serves all
    index_dim: int = 0
    index_interleaved: bool = False  # neighbours form pairs in the indexer, else the two halves do

    @property
    def line(self) -> int:
        """The width of a token's latent and rotated key."""
        return self.rank + self.dim

    @property
    def kv(self) -> KVRow:
        return KVRow(1, self.line + (0 if self.shares else self.index_dim), self.rank, values_in_keys=True)

    def tensors(self, hidden: int) -> Tensors:
        yield from LatentHeads.tensors(self, hidden)
        if not self.shares:
            yield "self_attn.indexer.wq_b.weight", (self.index_count * self.index_dim, self.query_rank)
            yield "self_attn.indexer.wk.weight", (self.index_dim, hidden)
            yield "self_attn.indexer.k_norm.weight", (self.index_dim,)
            yield "self_attn.indexer.k_norm.bias", (self.index_dim,)
            yield "self_attn.indexer.weights_proj.weight", (self.index_count, hidden)


def _query_rank(config: Config) -> int:
    """Returns the width of the queries' latent, which the indexer reads, too."""
    if config.get("q_lora_rank") is None:
        raise UnsupportedModel("config.json: q_lora_rank is not set, but the indexer's queries are made of that latent")
    rank: int = width("q_lora_rank")(config)
    return rank


def _index_dim(config: Config) -> int:
    """Returns the width of the indexer's heads, whose first elements turn."""
    dim: int = width("index_head_dim", default=128)(config)
    if dim < (turned := integer(config, "qk_rope_head_dim")):
        raise CheckpointError(f"config.json: index_head_dim = {dim} is less than qk_rope_head_dim = {turned}")
    return dim


def indexer_kinds(config: Config) -> Sequence[str]:
    """Returns for each layer whether it has an indexer ("full") or attends as the one before it ("shared").

    The first of these keys that is set decides: `indexer_types`, `index_topk_pattern`, `index_topk_freq`.
    """
    pattern, key = config.get("index_topk_pattern"), "indexer_types"
    if config.get(key) is None and pattern is not None:
        key = "index_topk_pattern"
        kinds = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
        config = {**config, key: kinds}
    if (stated := stated_kinds(config, key, KINDS)) is None:
        period = integer(config, "index_topk_freq", default=1)
        offset = 0 if config.get(OFFSET) == 0 else integer(config, OFFSET, default=2)
        numbers = (max(layer - offset + 1, 0) for layer in range(layer_count(config)))
        stated = [KINDS[number % period > 0] for number in numbers]
    if stated[0] == "shared":
        raise CheckpointError(f"config.json: the first layer attends as the one before it, by {key}")
    return stated


def beginnings(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the layers with which a box's part of the layers may begin: they need no choice of the layer before."""
    return tuple(layer for layer, each in enumerate(spec.attention) if not each.heads.shares)


def _by_indexer(config: Config, attention: LayerAttention) -> tuple[LayerAttention, ...]:
    assert isinstance(attention.heads, SparseLatentHeads)
    shared = replace(attention, heads=replace(attention.heads, shares=True))
    return tuple(shared if kind == "shared" else attention for kind in indexer_kinds(config))


def _index_count(usual: int) -> Callable[[Config], int]:
    """Returns a reader of the number of the indexer's heads."""

    def count(config: Config) -> int:
        heads: int = whole("index_n_heads", default=usual)(config)
        if heads > MOST_HEADS:
            raise CheckpointError(f"config.json: index_n_heads = {heads} is impossible; {MOST_HEADS} is the most")
        return heads

    return count


SPARSE_LATENT: FieldSources = {
    **LATENT,
    "query_rank": _query_rank,
    "chosen": whole("index_topk", default=2048),
    "index_dim": _index_dim,
}
DEEPSEEK_V32 = Family(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    mechanism=SparseLatentHeads,
    heads={**SPARSE_LATENT, "index_count": _index_count(usual=64)},
    rope={"interleaved": True},
    router=DEEPSEEK_V3_ROUTER,
    feed_forward={**SHARED_EXPERTS, "dense_layers": partial(typed_layers, usual=3)},
)
SPARSE_FAMILIES = (
    DEEPSEEK_V32,
    replace(
        DEEPSEEK_V32,
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        layers=_by_indexer,
        heads={**SPARSE_LATENT, "index_count": _index_count(usual=32), "index_interleaved": True},
        block={"tied": flag("tie_word_embeddings")},
    ),
)
