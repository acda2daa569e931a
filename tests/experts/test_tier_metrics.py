"""The tiers' metrics add up."""

from __future__ import annotations

import numpy as np
from support.tiers_kit import SMALL, FileStore, Weights, running, small_tiers

from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import select


def test_metrics_add_up() -> None:
    weights = Weights(SMALL)
    store, rng = FileStore(weights), np.random.default_rng(0)
    with running(small_tiers(store, 8, (4,))) as tiers:
        calls = 0
        for _ in range(20):
            for layer in range(SMALL.layers):
                hidden, ids, shares = weights.route(3, rng)
                tiers.experts.forward(layer, hidden, ids, shares)
                calls += len(np.unique(ids))
        metrics = tiers.metrics()
    assert select(metrics, names.TIER_HITS) == calls
    vram = select(metrics, names.TIER_HITS, tier="vram")
    assert select(metrics, names.TIER_MISSES, tier="vram") == calls - vram
    assert select(metrics, names.TIER_MISSES, tier="ram") == select(metrics, names.TIER_HITS, tier="nvme")
    assert select(metrics, names.CPU_EXPERTS) <= select(metrics, names.TIER_HITS, tier="ram")
    assert select(metrics, names.BYTES_MOVED, to="ram") == len(store.reads) * SMALL.stride_bytes(0)
    assert select(metrics, names.TIER_SLOTS, tier="ram") == 8
    assert select(metrics, names.TIER_BYTES, tier="vram") == 4 * SMALL.stride_bytes(0)
    assert 0 < select(metrics, names.TIER_EXPERTS, tier="vram") <= 4
    assert select(metrics, names.STALL_SECONDS) > 0
    assert select(metrics, names.LINK_RATE, link="nvme") > 0
    assert 0 <= select(metrics, names.LINK_IDLE, link="0") <= 1


def test_without_a_device_there_is_no_vram() -> None:
    with running(small_tiers(FileStore(Weights(SMALL)), 8)) as tiers:
        assert not any("vram" in name for name in tiers.metrics())
