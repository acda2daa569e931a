"""The tiers' numbers by their final names, for the front's /metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgemoe.experts.tiers.slots import TierUsage
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named
from edgemoe.types.experts import Tier

if TYPE_CHECKING:
    from edgemoe.experts.build import ExpertTiers


def tier_metrics(tiers: ExpertTiers) -> dict[str, float]:
    """Counts hits, moves, stalls, slabs and links. From any thread."""
    residency = tiers.residency
    metrics: dict[str, float] = {}
    for tier in Tier:
        name = tier.name.lower()
        slower = sum(residency.served[tier + 1 :])
        if tier >= residency.fastest:
            metrics[named(names.TIER_HITS, tier=name)] = residency.served[tier]
            metrics[named(names.TIER_MISSES, tier=name)] = slower
            metrics[named(names.STALL_SECONDS, tier=name)] = tiers.experts.stall_s[tier]
    metrics |= _slab(Tier.RAM, residency.usage(Tier.RAM), "nvme")
    if residency.fastest is Tier.VRAM:
        metrics[names.CPU_EXPERTS] = tiers.experts.cpu_experts.experts
        metrics |= _slab(Tier.VRAM, residency.usage(Tier.VRAM), "ram")
    for link, stats in tiers.link_stats.items():
        metrics[named(names.LINK_RATE, link=link)] = stats.bytes_per_s
        metrics[named(names.LINK_IDLE, link=link)] = stats.idle_share
    return metrics


def _slab(tier: Tier, usage: TierUsage, source: str) -> dict[str, float]:
    name = tier.name.lower()
    way = {"from": source, "to": name}
    return {
        named(names.TIER_SLOTS, tier=name): usage.slots,
        named(names.TIER_BYTES, tier=name): usage.size_bytes,
        named(names.TIER_EXPERTS, tier=name): usage.used,
        named(names.BYTES_MOVED, **way): usage.moved_bytes,
        named(names.PREFETCHES, **way): usage.prefetched,
        named(names.PREFETCH_WASTED, tier=name): usage.wasted_bytes,
    }
