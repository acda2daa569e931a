"""A slab is divided among experts of different sizes without a byte that two of them share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgemoe.errors import CapacityError
from edgemoe.experts.tiers.slab import HostSlab, layout_in
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry
from edgemoe.types.size_classes import SizeClasses, SlabLayout, divide

SAME = ExpertGeometry(layers=6, experts=32, top_k=2, hidden=512, width=128, dtype="bfloat16")
MIB = 1 << 20


def mixed(seed: int) -> ExpertGeometry:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(4 * PAGE_BYTES, 100 * PAGE_BYTES, 1 + seed % 4)
    return replace(
        SAME,
        layer_bytes=tuple(rng.choice(sizes, SAME.layers).tolist()),
        layer_experts=tuple(rng.integers(8, SAME.experts + 1, SAME.layers).tolist()),
    )


def test_a_model_of_one_size_loses_no_byte_to_extents() -> None:
    for slots in (1, 7, 100, SAME.count):
        layout = layout_in(slots * SAME.stride_bytes(0) + 4095, SAME, "RAM")
        assert (layout.count, layout.extent_bytes) == (slots, SAME.stride_bytes(0))
        assert layout.size_bytes == slots * SAME.stride_bytes(0)
        assert layout.divided() == (slots,)


@pytest.mark.parametrize("seed", range(40))
def test_slots_of_all_classes_lie_on_pages_within_their_extent(seed: int) -> None:
    geometry = mixed(seed)
    layout = layout_in(int(geometry.all_bytes * (0.1 + 0.9 * (seed % 7) / 7)), geometry, "RAM")
    for size_class, per in enumerate(layout.per_extent):
        assert per * layout.slot_bytes(size_class) == layout.extent_bytes
        assert layout.slot_bytes(size_class) % PAGE_BYTES == 0
        assert layout.slot_bytes(size_class) >= layout.classes.bytes[size_class]
        for i in range(layout.slots(size_class)):
            start, size_bytes = layout.place(layout.first(size_class) + i)
            assert size_bytes == layout.classes.bytes[size_class]
            assert start // layout.extent_bytes == (start + size_bytes - 1) // layout.extent_bytes == i // per
    assert sum(layout.divided()) == layout.extents
    assert min(layout.divided()) >= 1


@pytest.mark.parametrize("seed", range(40))
def test_little_is_lost_where_memory_is_not_scarce(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(MIB, 9 * MIB, 2 + seed % 3)
    geometry = ExpertGeometry(48, 128, 8, 2048, 768, "bfloat16", layer_bytes=tuple(rng.choice(sizes, 48).tolist()))
    budget = geometry.all_bytes // 4
    layout = layout_in(budget, geometry, "RAM")
    assert layout.size_bytes <= budget
    assert layout.useful_bytes >= 0.9 * budget


@pytest.mark.parametrize("seed", range(40))
def test_a_layout_s_bytes_give_the_same_layout(seed: int) -> None:
    geometry = mixed(seed)
    layout = layout_in(int(geometry.all_bytes * (0.2 + seed % 5 / 3)), geometry, "RAM")
    assert layout_in(layout.size_bytes, geometry, "RAM") == layout


@pytest.mark.parametrize("seed", range(40))
def test_a_slab_for_everything_has_a_slot_for_every_expert(seed: int) -> None:
    geometry = mixed(seed)
    layout = layout_in(SlabLayout.whole_bytes(geometry), geometry, "RAM")
    given = zip(layout.divided(), layout.per_extent, layout.classes.counts, strict=True)
    assert all(extents * per >= count for extents, per, count in given)
    assert sum(layout.classes.counts) == geometry.count == geometry.exists.sum()


def test_a_budget_that_lacks_a_slot_of_some_size_says_which_there_are() -> None:
    geometry = replace(SAME, layer_bytes=(PAGE_BYTES, 64 * PAGE_BYTES, *[PAGE_BYTES] * 4))
    layout_in(SlabLayout.least_bytes(geometry), geometry, "RAM")
    with pytest.raises(
        CapacityError, match=r"RAM: 200000 bytes hold not one expert of each size \(4096, 262144 bytes\)"
    ):
        layout_in(200_000, geometry, "RAM")


def test_extents_are_divided_by_weight_and_everybody_has_one_and_nobody_too_many() -> None:
    assert divide(10, (100, 100), (9, 1)) == (9, 1)
    assert divide(10, (100, 100), (1000, 1)) == (9, 1)
    assert divide(100, (200, 200), (3, 1)) == (75, 25)
    assert divide(100, (20, 200), (3, 1)) == (20, 80)
    assert divide(100, (20, 30), (3, 1)) == (20, 30)


def test_views_of_all_classes_are_of_the_same_bytes() -> None:
    geometry = replace(SAME, layer_bytes=(PAGE_BYTES, 3 * PAGE_BYTES, *[PAGE_BYTES] * 4))
    slab = HostSlab(layout_in(MIB, geometry, "RAM"))
    large = slab.layout.first(1)
    slab.slot(large)[:] = 7
    assert slab.slots(1)[0, : 3 * PAGE_BYTES].tolist() == [7] * (3 * PAGE_BYTES)
    assert slab.slots(0)[0].tolist() == [7] * PAGE_BYTES
    assert bytes(slab.view(0)) == b"\7" * PAGE_BYTES


def test_layers_are_sorted_into_classes_by_their_experts_size() -> None:
    geometry = replace(SAME, layer_bytes=(5000, 100, 8192, 4096, 1, 9000), layer_experts=(1, 2, 3, 4, 5, 6))
    assert SizeClasses.of(geometry) == SizeClasses((1, 0, 1, 0, 0, 2), (1, 2, 3, 4, 5, 6), (4096, 8192, 12288))
    assert SizeClasses.of(geometry).counts == (11, 4, 6)
