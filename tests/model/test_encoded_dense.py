"""Dense matrices in 4 and 8 bits: the kernels give what torch gives with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import ResidentExperts, Session, Tiny

from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.model.decoder import Decoder
from edgemoe.store.consistency import spec_of
from edgemoe.store.manifest import DENSE
from edgemoe.store.packer import pack
from edgemoe.store.wanted import WantedEncodings

SIZES = {"hidden_size": 128, "moe_intermediate_size": 32, "head_dim": 32}


@pytest.mark.parametrize("dense", ["int8", "int4"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by layers"])
def test_encoded_matrices_give_the_logits_of_their_decoded_weights(
    make_tiny: Callable[..., Tiny], kernels: dict[bool, Kernels], tmp_path: Path, dense: str, fused: bool
) -> None:
    tiny = make_tiny("qwen3_moe" if fused else "olmoe", fused=False, **SIZES)
    tiny.model.save_pretrained(tmp_path / "checkpoint")
    spec = spec_of(pack(tmp_path / "checkpoint", tmp_path / "store", wanted=WantedEncodings("keep", dense)))
    tokens = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for made in (None, kernels[False]):
        decoder = Decoder.load(spec, tmp_path / "store" / DENSE, kernels=made)
        session = Session(replace(tiny, spec=spec, decoder=decoder, experts=ResidentExperts(tmp_path / "store")))
        logits.append(torch.cat([session.step(part) for part in (tokens[:40], *([token] for token in tokens[40:]))]))
    assert spec.dense_encoding == dense
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
