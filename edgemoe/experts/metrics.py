"""The tiers' numbers by their final names, for the front's /metrics page."""

from __future__ import annotations

from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.tiers.slots import TierUsage
from edgemoe.telemetry import metrics
from edgemoe.telemetry.metrics import named
from edgemoe.types.experts import Tier


def figures(tiers: ExpertTiers) -> dict[str, float]:
    """Hits, moves, stalls, arenas and links. From any thread."""
    residency, stride_bytes = tiers.residency, tiers.shape.stride_bytes
    values: dict[str, float] = {}
    for tier in Tier:
        name = tier.name.lower()
        slower = sum(residency.served[tier + 1 :])
        if tier >= residency.fastest:
            values[named(metrics.TIER_HITS, tier=name)] = residency.served[tier]
            values[named(metrics.TIER_MISSES, tier=name)] = slower
            values[named(metrics.STALL_SECONDS, tier=name)] = tiers.experts.stall_s[tier]
    values |= _slab(Tier.RAM, residency.usage(Tier.RAM), "nvme", stride_bytes)
    if residency.fastest is Tier.VRAM:
        values[metrics.CPU_EXPERTS] = tiers.experts.cpu_experts.experts
        values |= _slab(Tier.VRAM, residency.usage(Tier.VRAM), "ram", stride_bytes)
    links = {"nvme": tiers.loader.stats} | {str(i): link.stats for i, link in enumerate(tiers.loader.links)}
    for link, stats in links.items():
        values[named(metrics.LINK_RATE, link=link)] = stats.bytes_per_s
        values[named(metrics.LINK_IDLE, link=link)] = stats.idle_share
    return values


def _slab(tier: Tier, usage: TierUsage, source: str, stride_bytes: int) -> dict[str, float]:
    name = tier.name.lower()
    way = {"from": source, "to": name}
    return {
        named(metrics.TIER_SLOTS, tier=name): usage.slots,
        named(metrics.TIER_BYTES, tier=name): usage.slots * stride_bytes,
        named(metrics.TIER_EXPERTS, tier=name): usage.used,
        named(metrics.BYTES_MOVED, **way): usage.moved * stride_bytes,
        named(metrics.PREFETCHES, **way): usage.prefetched,
        named(metrics.PREFETCH_WASTED, tier=name): usage.wasted * stride_bytes,
    }
