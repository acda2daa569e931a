"""Latent attention against transformers' own, over a cache whose blocks are dealt out in no particular order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from edgemoe.families.kv_layout import KVLayout, KVRow
from edgemoe.families.latent import LatentSpec
from edgemoe.families.records import RopeSpec
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model import latent
from edgemoe.model.attention import StepAttention
from edgemoe.model.kv import KVCache
from edgemoe.model.latent import LatentAttention, LatentWeights
from edgemoe.model.rope import frequencies
from edgemoe.types.step import Batch

HIDDEN, CONTEXT = 48, 100
SPEC = LatentSpec(heads=4, query_rank=24, rank=32, plain=16, rope=8, value=20, scale=24**-0.5)
HALVES = [*range(0, SPEC.rope, 2), *range(1, SPEC.rope, 2)]
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": SPEC.heads,
    "num_key_value_heads": SPEC.heads,
    "kv_lora_rank": SPEC.rank,
    "qk_nope_head_dim": SPEC.plain,
    "qk_rope_head_dim": SPEC.rope,
    "v_head_dim": SPEC.value,
    "num_hidden_layers": 1,
    "attn_implementation": "eager",
}


def their_attention(family: str, query_rank: int | None, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """Returns the weights of a random layer and its attention of x [T, H]."""
    torch.manual_seed(0)
    config: Any
    layer: Any
    positions, mask = torch.arange(len(x))[None], torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    if family == "deepseek_v2":
        config = transformers.DeepseekV2Config(**SIZES, q_lora_rank=query_rank)
        layer, angles = DeepseekV2Attention(config, 0), DeepseekV2RotaryEmbedding(config)(x[None], positions)
    else:
        config = transformers.DeepseekV3Config(**SIZES, q_lora_rank=query_rank)
        layer, angles = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)(x[None], positions)
    for parameter in layer.parameters():
        parameter.data = torch.rand_like(parameter) if parameter.dim() == 1 else torch.randn_like(parameter) * 0.2
    with torch.inference_mode():
        out = layer.eval()(x[None], attention_mask=mask, position_embeddings=angles)[0][0]
    return {name.removesuffix(".weight"): value for name, value in layer.state_dict().items()}, out


def ours(state: dict[str, torch.Tensor]) -> LatentWeights:
    query = state["q_b_proj"] if "q_b_proj" in state else state["q_proj"]
    heads = query.view(SPEC.heads, SPEC.key, -1)
    plain = list(range(SPEC.plain)), list(range(SPEC.rank))
    return LatentWeights(
        state.get("q_a_proj"),
        state.get("q_a_layernorm"),
        heads[:, plain[0] + [SPEC.plain + k for k in HALVES]].flatten(0, 1),
        state["kv_a_proj_with_mqa"][plain[1] + [SPEC.rank + k for k in HALVES]],
        state["kv_a_layernorm"],
        state["kv_b_proj"].view(SPEC.heads, SPEC.plain + SPEC.value, SPEC.rank),
        state["o_proj"],
    )


@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(("family", "query_rank"), [("deepseek_v2", None), ("deepseek_v3", 24)])
def test_latent_attention_equals_transformers_however_the_prompt_is_cut(
    kernels: dict[bool, Kernels], family: str, query_rank: int | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(CONTEXT, HIDDEN, generator=torch.Generator().manual_seed(1))
    state, expected = their_attention(family, query_rank, x)
    used = kernels[False] if compiled else None
    layer = LatentAttention(SPEC, ours(state), used)
    row = KVRow(1, SPEC.stored, SPEC.rank, values_in_keys=True)
    # whole, one by one, and cut so that the keys are computed anew, absorbed, and a head at a time
    for cuts, most_bytes in (([100], 1 << 20), ([1] * 100, 0), ([90, 3, 1, 6], 0)):
        monkeypatch.setattr(latent, "EXPANDED_BYTES", most_bytes)
        cache, start, found = KVCache(KVLayout.of([row]), 7), 0, []
        cache.data.fill_(0xFF)
        for count in cuts:
            positions = torch.arange(start, start + count)
            angles = positions[:, None] * frequencies(RopeSpec(1e4, SPEC.rope))
            tokens, after = torch.zeros(count, dtype=torch.int64), start + count
            batch = Batch(tokens, positions, [count], [after], [[5, 3, 0, 1, 2, 4, 6]], tokens, count == 1)
            step = StepAttention(batch, cache, used)
            found.append(layer(0, x[start:after], angles.cos(), angles.sin(), step))
            start = after
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)
