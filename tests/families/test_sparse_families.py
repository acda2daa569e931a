"""Configurations of families whose attention sees the tokens that an indexer chooses."""

from __future__ import annotations

from typing import Any

import pytest
from families.test_latent_families import V3

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.sparse_families import SparseLatentHeads
from edgemoe.families.spec import KVRow, dense_shapes

INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
V32: dict[str, Any] = {**V3, **INDEXER, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
GLM: dict[str, Any] = {
    **V32,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 6,
    "index_n_heads": 32,
    "n_group": 1,
    "topk_group": 1,
}


def _sharing(config: dict[str, Any]) -> str:
    """Returns a letter for each layer, as `index_topk_pattern` has them."""
    heads = [layer.heads for layer in spec_from_config(config).attention]
    assert all(isinstance(each, SparseLatentHeads) for each in heads)
    return "".join("S" if isinstance(each, SparseLatentHeads) and each.shares else "F" for each in heads)


def test_deepseek_v32_as_published() -> None:
    spec = spec_from_config(V32)
    heads = spec.attention[0].heads
    assert isinstance(heads, SparseLatentHeads)
    assert (heads.chosen, heads.index_count, heads.index_dim, heads.index_interleaved) == (2048, 64, 128, False)
    assert spec.chosen == 2048
    assert spec.kv_layout.rows[1] == KVRow(1, 704, 512, "bfloat16", values_in_keys=True, offset=16 * 704 * 2)
    shapes = dense_shapes(spec)
    assert shapes["model.layers.60.self_attn.indexer.wq_b.weight"] == (64 * 128, 1536)
    assert shapes["model.layers.0.self_attn.indexer.k_norm.bias"] == (128,)


@pytest.mark.parametrize(
    ("said", "letters"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_pattern": "FSSFSF", "index_topk_freq": 2}, "FSSFSF"),
        ({"index_topk_pattern": ["full", "shared"] * 3}, "FSFSFS"),
        ({"indexer_types": ["full"] * 5 + ["shared"], "index_topk_pattern": "FSSSSS"}, "FFFFFS"),
    ],
)
def test_layers_without_an_indexer_are_named_in_any_of_three_ways(said: dict[str, Any], letters: str) -> None:
    assert _sharing(GLM | said) == letters


def test_layers_without_an_indexer_keep_no_keys_of_one() -> None:
    rows = spec_from_config(GLM | {"index_topk_pattern": "FSFSFS"}).kv_layout.rows
    assert [row.key_width for row in rows] == [704, 576] * 3
    names = dense_shapes(spec_from_config(GLM | {"index_topk_pattern": "FSFSFS"}))
    assert sorted({int(name.split(".")[2]) for name in names if ".indexer." in name}) == [0, 2, 4]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q_lora_rank": None}, UnsupportedModel, "q_lora_rank is not set"),
        ({"index_head_dim": 32}, CheckpointError, "index_head_dim = 32 is less than qk_rope_head_dim = 64"),
        ({"index_head_dim": 1 << 40}, CheckpointError, "index_head_dim must be even and at most"),
        ({"index_n_heads": 1 << 20}, CheckpointError, "index_n_heads = 1048576 is impossible"),
        ({"index_topk": 0}, CheckpointError, "index_topk"),
        ({"index_topk_pattern": "FXFFFF"}, UnsupportedModel, "index_topk_pattern has 'X'"),
        ({"index_topk_pattern": "FS"}, CheckpointError, "must name 6 layers"),
        ({"index_topk_freq": "often"}, CheckpointError, "index_topk_freq"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, CheckpointError, "the first layer attends as the one"),
    ],
)
def test_impossible_indexers_are_refused_by_name(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        spec_from_config(GLM | changes)
