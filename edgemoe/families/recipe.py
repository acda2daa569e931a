"""What an expert in a store is made of: rows of source tensors, one below the other. The packer runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgemoe.families.records import Shape
from edgemoe.families.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of a source matrix, or elements of a source vector."""

    source: str  # the tensor's name in the family's newest spelling, unquantised
    shape: Shape  # of the whole source tensor
    index: tuple[int, ...] = ()  # which matrix of a stack
    transposed: bool = False  # the source holds [columns, rows]
    rows: range | None = None  # which of the matrix, in this order; None: all

    @property
    def matrix(self) -> Shape:
        """Returns the shape after `index` and transposition, before `rows`."""
        shape = self.shape[len(self.index) :]
        return shape[::-1] if self.transposed else shape

    @property
    def count(self) -> int:
        """Returns how many rows, or elements, it yields."""
        return self.matrix[0] if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True)
class ExpertRecipe:
    """One expert: gate rows and up rows, down rows, and its biases."""

    gate_up: tuple[SourceRows, ...]
    down: tuple[SourceRows, ...]
    biases: tuple[SourceRows, ...] = ()


def expert_recipes(spec: ModelSpec, layer: int, has: Callable[[str], bool]) -> Iterator[ExpertRecipe]:
    """Yields the experts of a layer, which is counted among all. `has` tells whether the checkpoint has a tensor."""
    names, geometry = spec.names.experts(layer), spec.geometry
    gate_up, down, count = geometry.gate_up_shape, geometry.down_shape, geometry.experts
    if has(names.gate_up):
        for expert in range(count):
            both = SourceRows(names.gate_up, (count, *gate_up), (expert,))
            yield ExpertRecipe((both,), (SourceRows(names.down, (count, *down), (expert,)),))
        return
    rows = (geometry.width, geometry.hidden)
    for expert in range(count):
        gate, up, last = names.separate(expert)
        yield ExpertRecipe((SourceRows(gate, rows), SourceRows(up, rows)), (SourceRows(last, down),))
