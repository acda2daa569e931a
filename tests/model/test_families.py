"""Every family over tiers: the same greedy tokens with all experts in memory as with a few percent of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.gate import in_gate
from support.tiers_kit import running
from support.tiny_models import DISTINCT, FAMILIES, Session, Tiny

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.kernels.cpu.runtime import Kernels
from edgemoe.policy.cache_ranks import LRU
from edgemoe.store.manifest import Manifest
from edgemoe.store.reader import ExpertStore
from edgemoe.types.experts import Tier

TOKENS = 64


@pytest.mark.parametrize("family", in_gate(FAMILIES, DISTINCT))
def test_64_greedy_tokens_equal_transformers_with_all_experts_and_with_two(
    make_tiny: Callable[..., Tiny], kernels: dict[bool, Kernels], family: str
) -> None:
    tiny = make_tiny(family)
    prompt = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    geometry = tiny.spec.geometry
    for slots in (geometry.layers * geometry.experts, 2):
        policy = LRU(geometry.layers, geometry.experts)
        with ExpertStore(tiny.store, Manifest.load(tiny.store)) as store:
            tiers = ExpertTiers(
                geometry,
                store,
                TierMemory(slots * geometry.stride_bytes(0), ()),
                {Tier.RAM: policy, Tier.VRAM: policy},
                kernels[False],
            )
            with running(tiers):
                session = Session(replace(tiny, experts=tiers.experts))
                chosen = [int(session.step(prompt)[-1].argmax())]
                while len(chosen) < TOKENS:
                    chosen.append(int(session.step([chosen[-1]])[-1].argmax()))
        assert chosen == tiny.greedy(prompt, chosen), f"with {slots} experts in memory"
