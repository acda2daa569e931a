"""Slabs are exact, aligned and fixed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.slab import HostSlab, layout_in
from edgemoe.types.experts import ExpertGeometry
from edgemoe.types.size_classes import SlabLayout

SHAPE = ExpertGeometry(layers=2, experts=4, top_k=2, hidden=64, width=48, dtype="bfloat16")


def test_a_slot_is_an_expert_in_whole_pages() -> None:
    assert SHAPE.expert_bytes(0) == 3 * 64 * 48 * 2
    assert SHAPE.stride_bytes(0) % 4096 == 0
    assert 0 <= SHAPE.stride_bytes(0) - SHAPE.expert_bytes(0) < 4096


def test_a_budget_buys_whole_slots_and_no_more_than_there_are_experts() -> None:
    stride = SHAPE.stride_bytes(0)
    assert layout_in(3 * stride + stride - 1, SHAPE, "RAM").count == 3
    assert layout_in(100 * stride, SHAPE, "RAM").count == 8
    with pytest.raises(CapacityError, match=r"RAM: 4096 bytes hold no expert.*raise the budget"):
        layout_in(4096, SHAPE, "RAM")


def test_a_slab_is_page_aligned_and_exactly_its_slots() -> None:
    slab = HostSlab(SlabLayout.even(5, SHAPE.stride_bytes(0)))
    assert slab.address % 4096 == 0
    assert slab.bytes.nbytes == slab.size_bytes == 5 * SHAPE.stride_bytes(0)
    for slot in range(5):
        slab.view(slot)[:] = bytes([slot + 1]) * SHAPE.stride_bytes(0)
    assert [set(row.tolist()) for row in slab.slots()] == [{1}, {2}, {3}, {4}, {5}]


def test_memory_that_cannot_be_locked_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(mlock=lambda address, size: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: refusing)
    with pytest.raises(CapacityError, match=r"cannot lock 8192 bytes.*LimitMEMLOCK"):
        HostSlab(SlabLayout.even(2, 4096), lock=True)


def test_a_locked_slab_is_locked() -> None:
    def locked_kib() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmLck:")[1].split()[0])

    before = locked_kib()
    slab = HostSlab(SlabLayout.even(8, 4096), lock=True)
    assert locked_kib() - before == slab.size_bytes >> 10


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="has no huge pages")
def test_a_slab_asks_for_huge_pages() -> None:
    slab = HostSlab(SlabLayout.even(2, 4 << 20))
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if last:
            inside = int(first, 16) <= slab.address < int(last, 16)
        elif inside and first == "VmFlags:":
            flags = line
    assert "hg" in flags.split()
