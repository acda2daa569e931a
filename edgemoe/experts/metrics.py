"""The tiers' numbers by their final names, for the front's /metrics page."""

from __future__ import annotations

from edgemoe.experts.build import ExpertTiers
from edgemoe.experts.tiers.slots import SlotPool
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
        if tier is not Tier.VRAM or residency.devices:
            values[named(metrics.TIER_HITS, tier=name)] = residency.served[tier]
            values[named(metrics.TIER_MISSES, tier=name)] = slower
            values[named(metrics.STALL_SECONDS, tier=name)] = tiers.experts.stall_s[tier]
    values |= _slab(Tier.RAM, (residency.ram,), "nvme", stride_bytes)
    if residency.devices:
        values[metrics.CPU_EXPERTS] = tiers.experts.cpu_experts.experts
        values |= _slab(Tier.VRAM, residency.devices, "ram", stride_bytes)
    links = {"nvme": tiers.loader.stats} | {str(i): link.stats for i, link in enumerate(tiers.loader.links)}
    for link, stats in links.items():
        values[named(metrics.LINK_RATE, link=link)] = stats.bytes_per_s
        values[named(metrics.LINK_IDLE, link=link)] = stats.idle_share
    return values


def _slab(tier: Tier, pools: tuple[SlotPool, ...], source: str, stride_bytes: int) -> dict[str, float]:
    name = tier.name.lower()
    slots = sum(pool.slots for pool in pools)
    way = {"from": source, "to": name}
    return {
        named(metrics.TIER_SLOTS, tier=name): slots,
        named(metrics.TIER_BYTES, tier=name): slots * stride_bytes,
        named(metrics.TIER_EXPERTS, tier=name): sum(pool.slots - len(pool.free) for pool in pools),
        named(metrics.BYTES_MOVED, **way): sum(pool.moved for pool in pools) * stride_bytes,
        named(metrics.PREFETCHES, **way): sum(pool.prefetched for pool in pools),
        named(metrics.PREFETCH_WASTED, tier=name): sum(pool.wasted for pool in pools) * stride_bytes,
    }
