"""Divides the memory for experts among sizes: a slab of extents, each of which holds slots of one size class.

This is memcached's slab allocator: memory goes from one size to another by whole extents. Here an extent is a whole
number of slots of every size. So slot i of a class begins at i times its slots' bytes from the slab's start. Where all
experts are of one size, an extent is a slot, and no byte is lost.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from edgemoe.types.arrays import IntArray
from edgemoe.types.experts import PAGE_BYTES, ExpertGeometry

MOST_SLOTS = 16  # of the largest experts in an extent


@dataclass(frozen=True, slots=True)
class SizeClasses:
    """Names the sizes C that a model's experts have, ascending; all experts of a layer are of one class."""

    layer_class: tuple[int, ...]  # [L]
    layer_experts: tuple[int, ...]  # [L] how many there are
    bytes: tuple[int, ...]  # [C] that one expert takes

    @classmethod
    def of(cls, geometry: ExpertGeometry) -> SizeClasses:
        """Returns the classes of a model."""
        strides = [geometry.stride_bytes(layer) for layer in range(geometry.layers)]
        sizes = sorted(set(strides))
        layer_experts = tuple(geometry.experts_of(layer) for layer in range(geometry.layers))
        return cls(tuple(sizes.index(stride) for stride in strides), layer_experts, tuple(sizes))

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns how many experts there are of each class, [C]."""
        pairs = list(zip(self.layer_class, self.layer_experts, strict=True))
        return tuple(sum(n for which, n in pairs if which == size_class) for size_class in range(len(self.bytes)))

    def keys(self, experts: int) -> list[IntArray]:
        """Returns for each class its experts' numbers among all, layer * `experts` + expert."""
        numbers = [np.arange(n) + layer * experts for layer, n in enumerate(self.layer_experts)]
        return [
            np.concatenate([keys for keys, which in zip(numbers, self.layer_class, strict=True) if which == size_class])
            for size_class in range(len(self.bytes))
        ]

    @property
    def all_bytes(self) -> tuple[int, ...]:
        """Returns the bytes that all experts of each class take, [C]."""
        return tuple(size * count for size, count in zip(self.bytes, self.counts, strict=True))


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The division of a slab. Slots are numbered class by class, as if every extent were of that class."""

    classes: SizeClasses
    extents: int  # X
    extent_bytes: int
    per_extent: tuple[int, ...]  # [C] slots

    @classmethod
    def even(cls, slots: int, size_bytes: int = PAGE_BYTES, *, layers: int = 1, experts: int = 1) -> SlabLayout:
        """Returns the layout of `slots` slots of one size."""
        return cls(SizeClasses((0,) * layers, (experts,) * layers, (size_bytes,)), slots, size_bytes, (1,))

    @classmethod
    def within(cls, budget_bytes: int, geometry: ExpertGeometry) -> SlabLayout | None:
        """Returns the layout that fits a budget, at most all experts; None where some class would have no slot."""
        classes = SizeClasses.of(geometry)
        layouts = [cls._with(classes, budget_bytes, most) for most in range(1, MOST_SLOTS + 1)]
        fitting = [layout for layout in layouts if layout.extents >= len(classes.bytes)]
        return max(fitting, key=lambda layout: layout.useful_bytes, default=None)

    @classmethod
    def least_bytes(cls, geometry: ExpertGeometry) -> int:
        """Returns the bytes of the smallest slab that holds an expert of each size."""
        classes = SizeClasses.of(geometry)
        return len(classes.bytes) * cls._with(classes, geometry.all_bytes, 1).extent_bytes

    @classmethod
    def whole_bytes(cls, geometry: ExpertGeometry) -> int:
        """Returns the bytes of a slab that holds all experts."""
        most = cls.within(1 << 62, geometry)
        assert most is not None, "it holds an expert of each size"
        return most.size_bytes

    @classmethod
    def _with(cls, classes: SizeClasses, budget_bytes: int, most: int) -> SlabLayout:
        """Returns the layout whose extents hold `most` of the largest experts."""
        if len(classes.bytes) == 1:
            return cls(classes, min(budget_bytes // classes.bytes[0], classes.counts[0]), classes.bytes[0], (1,))
        least_bytes = most * classes.bytes[-1]
        per_extent = tuple(least_bytes // size for size in classes.bytes)
        whole_bytes = math.lcm(*per_extent) * PAGE_BYTES  # in whole pages for every class
        extent_bytes = -(-least_bytes // whole_bytes) * whole_bytes
        needed = sum(-(-count // per) for count, per in zip(classes.counts, per_extent, strict=True))
        return cls(classes, min(budget_bytes // extent_bytes, needed), extent_bytes, per_extent)

    @property
    def useful_bytes(self) -> float:
        """Returns the bytes that experts take in it when it is divided in proportion to the classes' bytes.

        Half an extent of each class counts as lost, because a class's due share is no whole number of extents.
        """
        pairs = zip(self.classes.all_bytes, self.classes.bytes, self.per_extent, strict=True)
        shares = sum(whole * per * size for whole, size, per in pairs)
        return self.extents * shares / sum(self.classes.all_bytes) - len(self.per_extent) * self.extent_bytes / 2

    @property
    def size_bytes(self) -> int:
        return self.extents * self.extent_bytes

    def slot_bytes(self, size_class: int) -> int:
        """Returns the bytes from slot to slot of a class."""
        return self.extent_bytes // self.per_extent[size_class]

    def slots(self, size_class: int) -> int:
        """Returns how many slots of a class the whole slab would make."""
        return self.extents * self.per_extent[size_class]

    @property
    def count(self) -> int:
        """Returns how many numbers of slots there are."""
        return self.first(len(self.per_extent))

    def first(self, size_class: int) -> int:
        """Returns the number of the first slot of a class."""
        return self.extents * sum(self.per_extent[:size_class])

    def place(self, slot: int) -> tuple[int, int]:
        """Returns the offset of a slot in the slab, and the bytes of its expert."""
        size_class = 0
        while slot >= self.slots(size_class):
            slot -= self.slots(size_class)
            size_class += 1
        return slot * self.slot_bytes(size_class), self.classes.bytes[size_class]

    @property
    def holds_all(self) -> bool:
        """Returns whether it has a slot for every expert."""
        pairs = zip(self.classes.counts, self.per_extent, strict=True)
        return self.extents >= sum(-(-count // per) for count, per in pairs)

    def divided(self) -> tuple[int, ...]:
        """Returns how many extents each class begins with, [C]: one at least, else in proportion to their bytes."""
        return divide(self.extents, self.most, self.classes.all_bytes)

    @property
    def most(self) -> tuple[int, ...]:
        """Returns how many extents each class has a use for, [C]."""
        return tuple(-(-count // per) for count, per in zip(self.classes.counts, self.per_extent, strict=True))


@functools.cache
def divide(extents: int, most: tuple[int, ...], weights: tuple[int, ...]) -> tuple[int, ...]:
    """Divides extents in proportion to weights: one at least, `most` at most for each. Surplus extents stay unused."""
    given = [1] * len(most)
    for _ in range(min(extents, sum(most)) - len(most)):
        open_ = [c for c in range(len(most)) if given[c] < most[c]]
        given[min(open_, key=lambda c: (given[c] + 1) / max(weights[c], 1))] += 1
    return tuple(given)
