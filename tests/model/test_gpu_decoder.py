"""The decoder on a GPU gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.tiny_models import FAMILIES, ResidentExperts, Session, Tiny

from edgemoe.model.decoder import Decoder
from edgemoe.model.kv import KVCache
from edgemoe.store.manifest import DENSE

pytestmark = pytest.mark.gpu


class Behind(ResidentExperts):
    """Experts on the CPU for a decoder on the GPU."""

    def forward(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, hidden.cpu(), ids.cpu(), weights.cpu()).to(hidden.device)


class GpuSession(Session):
    """A session whose cache lies on the GPU."""

    def __init__(self, tiny: Tiny, sequences: int = 1) -> None:
        super().__init__(tiny, sequences)
        self.kv, self.device = KVCache.of(tiny.spec, 64, 4 * sequences + 2, "cuda"), "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_decode_and_mixed_batches(
    make_tiny: Callable[..., Tiny], family: str, dtype: torch.dtype
) -> None:
    tiny = make_tiny(family, dtype=dtype, initializer_range=0.05)
    there = replace(tiny, decoder=Decoder.load(tiny.spec, tiny.store / DENSE, "cuda"), experts=Behind(tiny.store))
    ours, gpu = Session(tiny, sequences=2), GpuSession(there, sequences=2)
    long, short = list(range(100)), list(range(50, 60))
    rounding = 1e-3 if dtype == torch.float32 else 0.1
    for chunks in ((long[:64], short), (long[64:], [7]), ([8], [9]), ([10], [11])):
        torch.testing.assert_close(gpu.step(*chunks).cpu(), ours.step(*chunks), atol=rounding, rtol=rounding)
    torch.testing.assert_close(gpu.kv.gather([3, 5]), gpu.kv.data[[3, 5]].cpu())
