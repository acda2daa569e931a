"""Dense matrices in 4 and 8 bits: the kernels compute the same as torch with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import ResidentExperts, Session, Tiny

from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.store.layout import WantedEncodings
from edgemoe.store.manifest import DENSE, spec_of
from edgemoe.store.packer import pack

SIZES = {"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 32}
OF_LATENTS = {
    "hidden_size": 128,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
OF_STATES = {**SIZES, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
MADE = {  # two whose decoding is fused or not, and two mechanisms with matrices of their own
    "fused": ("qwen3_moe", SIZES),
    "by layers": ("olmoe", SIZES),
    "latent attention": ("deepseek_v3", OF_LATENTS),
    "latent attention without a query's latent": ("deepseek_v2", {**OF_LATENTS, "q_lora_rank": None}),
    "delta nets, split": ("qwen3_5_moe_text", OF_STATES),
    "delta nets": ("qwen3_next", OF_STATES),
}


@pytest.mark.parametrize("dense", ["int8", "int4"])
@pytest.mark.parametrize("made", MADE)
def test_encoded_matrices_give_the_logits_of_their_decoded_weights(
    make_tiny: Callable[..., Tiny], kernels: dict[bool, Kernels], tmp_path: Path, dense: str, made: str
) -> None:
    family, sizes = MADE[made]
    tiny = make_tiny(family, fused=False, **sizes)
    tiny.model.save_pretrained(tmp_path / "checkpoint")
    spec = spec_of(pack(tmp_path / "checkpoint", tmp_path / "store", wanted=WantedEncodings("keep", dense)))
    tokens = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for each in (None, kernels[False]):
        decoder = Decoder.load(spec, tmp_path / "store" / DENSE, kernels=each)
        session = Session(replace(tiny, spec=spec, decoder=decoder, experts=ResidentExperts(tmp_path / "store")))
        logits.append(torch.cat([session.step(part) for part in (tokens[:40], *([token] for token in tokens[40:]))]))
    assert spec.dense_encoding == dense
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
