"""The engine's figures by name: what the engine sends, /metrics shows and `edgemoe status` reads.

A figure is a number under its final Prometheus name, labels included; families that end in _total only ever grow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TIER_HITS = "edgemoe_tier_hits_total"  # {tier}: expert calls by the tier that had the expert when it was asked for
TIER_MISSES = "edgemoe_tier_misses_total"  # {tier}: expert calls that the tier did not have
MOVED_BYTES = "edgemoe_moved_bytes_total"  # {link}: expert bytes moved, "nvme-ram" or "ram-vram"
PREFETCHES = "edgemoe_prefetches_total"  # {link}: loads that no step was waiting for
STALL_SECONDS = "edgemoe_stall_seconds_total"  # {tier}: steps waiting for experts that were in this tier
TIER_SLOTS = "edgemoe_tier_slots"  # {tier}: experts that the arena holds at most
TIER_EXPERTS = "edgemoe_tier_experts"  # {tier}: experts in it now
TIER_BYTES = "edgemoe_tier_bytes"  # {tier}: size of the arena
KV_BLOCKS = "edgemoe_kv_blocks"  # blocks of keys and values in all
KV_BLOCKS_USED = "edgemoe_kv_blocks_used"  # held by requests; what the prefix cache could give up is not counted
PREFIX_HIT_TOKENS = "edgemoe_prefix_hit_tokens_total"  # prompt tokens that the prefix cache supplied
RUNNING = "edgemoe_running_requests"
WAITING = "edgemoe_waiting_requests"
PREEMPTIONS = "edgemoe_preemptions_total"
STEPS = "edgemoe_steps_total"
STEP_SECONDS = "edgemoe_step_seconds_total"

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")


def named(family: str, **labels: str) -> str:
    """The figure of a family that has these labels: `named(TIER_HITS, tier="ram")`."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{family}{{{inside}}}" if labels else family


def parse(page: str) -> dict[str, float]:
    """The figures on a /metrics page, by full name."""
    matches = (_SAMPLE.match(line) for line in page.splitlines() if not line.startswith("#"))
    return {match[1] + (match[2] or ""): float(match[3]) for match in matches if match}


def by_label(figures: Mapping[str, float], family: str) -> dict[str, float]:
    """The figures of a family with one label, by the label's value, in the page's order."""
    pattern = re.compile(re.escape(family) + r'\{\w+="([^"]*)"\}')
    return {match[1]: value for name, value in figures.items() if (match := pattern.fullmatch(name))}
