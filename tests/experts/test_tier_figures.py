"""The tiers' figures add up."""

from __future__ import annotations

import numpy as np
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers

from edgemoe.experts.metrics import figures
from edgemoe.telemetry import metrics
from edgemoe.telemetry.metrics import select


def test_figures_add_up() -> None:
    weights = Weights(SMALL)
    store, rng = FileStore(weights), np.random.default_rng(0)
    with running(small_tiers(store, 8, (4,))) as tiers:
        calls = 0
        for _ in range(20):
            for layer in range(SMALL.layers):
                hidden, ids, shares = weights.route(3, rng)
                tiers.experts.forward(layer, hidden, ids, shares)
                calls += len(np.unique(ids))
        values = figures(tiers)
    assert select(values, metrics.TIER_HITS) == calls
    vram = select(values, metrics.TIER_HITS, tier="vram")
    assert select(values, metrics.TIER_MISSES, tier="vram") == calls - vram
    assert select(values, metrics.TIER_MISSES, tier="ram") == select(values, metrics.TIER_HITS, tier="nvme")
    assert select(values, metrics.CPU_EXPERTS) <= select(values, metrics.TIER_HITS, tier="ram")
    assert select(values, metrics.BYTES_MOVED, to="ram") == len(store.reads) * SMALL.stride_bytes
    assert select(values, metrics.TIER_SLOTS, tier="ram") == 8
    assert select(values, metrics.TIER_BYTES, tier="vram") == 4 * SMALL.stride_bytes
    assert 0 < select(values, metrics.TIER_EXPERTS, tier="vram") <= 4
    assert select(values, metrics.STALL_SECONDS) > 0
    assert select(values, metrics.LINK_RATE, link="nvme") > 0
    assert 0 <= select(values, metrics.LINK_IDLE, link="0") <= 1


def test_without_a_device_there_is_no_vram() -> None:
    with running(small_tiers(FileStore(Weights(SMALL)), 8)) as tiers:
        assert not any("vram" in name for name in figures(tiers))
