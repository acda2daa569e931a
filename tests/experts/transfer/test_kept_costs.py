"""Measured transfer costs survive a restart, and a damaged file does no harm."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.tiers_kit import SMALL, FileStore, Weights, emulated, running

from edgemoe.experts.build import ExpertTiers, TierMemory
from edgemoe.experts.transfer.link_stats import KEPT, LinkStats, SavedLinkStats
from edgemoe.policy.cache_ranks import LRU
from edgemoe.types.experts import Tier

FIXED_S, PER_BYTE_S = 1e-3, 1e-9
SIZES = (1_000_000, 4_000_000)


def measured(times: int = 100) -> LinkStats:
    stats = LinkStats()
    for i in range(times):
        stats.observe(SIZES[i % 2], FIXED_S + PER_BYTE_S * SIZES[i % 2])
    return stats


def test_a_link_continues_from_its_measured_costs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    SavedLinkStats(path, {"nvme": measured(), "0": LinkStats()}).save()
    again, other = LinkStats(), LinkStats()
    SavedLinkStats(path, {"nvme": again, "0": other})
    assert again.cost() == pytest.approx((FIXED_S, PER_BYTE_S), rel=1e-6)
    assert again.bytes_per_s == again.unhindered_bytes_per_s > 0
    assert other.bytes_per_s == 0, "it was never measured"
    for _ in range(4 * int(KEPT)):  # on another machine, for example
        again.observe(SIZES[0], 10 * SIZES[0] * PER_BYTE_S)
    assert again.bytes_per_s < 0.2 / PER_BYTE_S


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"[1, 2]",
        b'{"nvme": [1, 2, 3]}',
        b'{"nvme": [10, 1e7, -1, 1e13, 1]}',
        b'{"nvme": [10, 1e7, 1e-300, 1e13, 1]}',
        b'{"nvme": [1e-300, 1e7, 1, 1e13, 1]}',
        b'{"nvme": [10, 1e7, 1, 1, 1]}',
        b'{"nvme": [10, 1e7, 1, null, 1]}',
        b'{"nvme": [1, 1e200, 1e190, 1e300, 1e300]}',
        b'{"nv\xffme": [10, 1e7, 1, 1e13, 1]}',
        b"[" * 100_000,
        b'{"other": [10, 1e7, 1, 1e13, 1]}',
        b" " * (1 << 17) + b'{"nvme": [10, 1e7, 1, 1e13, 1e6]}',
    ],
)
def test_a_damaged_file_is_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    stats = LinkStats()
    SavedLinkStats(path, {"nvme": stats})
    assert stats.bytes_per_s == 0


def test_nothing_is_written_where_nothing_was_measured_or_no_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    SavedLinkStats(path, {"nvme": LinkStats()}).save()
    SavedLinkStats(None, {"nvme": measured()}).save()
    assert not path.exists()


def test_a_folder_that_is_gone_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SavedLinkStats(tmp_path / "gone" / "costs.json", {"nvme": measured()}).save()
    assert "could not be saved" in caplog.text


def test_restarted_tiers_know_the_times_of_reads_and_copies(tmp_path: Path) -> None:
    store, policy, path = FileStore(Weights(SMALL)), LRU(SMALL.layers, SMALL.experts), tmp_path / "costs.json"
    memory = TierMemory(8 * SMALL.largest_bytes, [emulated(4 * SMALL.largest_bytes, 1e9)], costs=path)

    def tiers() -> ExpertTiers:
        return ExpertTiers(SMALL, store, memory, {Tier.VRAM: policy, Tier.RAM: policy}, None)

    with running(tiers(), fill=True) as first:
        first.experts.forward(0, *Weights(SMALL).route(1, np.random.default_rng(1)))
    assert set(msgspec.json.decode(path.read_bytes())) == {"nvme", "0"}
    with running(tiers()) as second:
        assert second.loader.stats.bytes_per_s == pytest.approx(first.loader.stats.bytes_per_s)
        assert second.loader.links[0].stats.bytes_per_s == pytest.approx(1e9, rel=1e-3)
