"""What an expert in a store is made of: rows of source tensors, one below the other. The packer runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgemoe.families.spec import ModelSpec, Shape


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
    """Yields the experts of a layer. `has` tells whether the checkpoint has a tensor."""
    stacked = spec.names.stacked(layer)
    gate_up, down = spec.geometry.gate_up_shape, spec.geometry.down_shape
    if has(stacked[0]):
        shapes = (spec.experts, *gate_up), (spec.experts, *down)
        for expert in range(spec.experts):
            both = [SourceRows(name, shape, (expert,)) for name, shape in zip(stacked, shapes, strict=True)]
            yield ExpertRecipe((both[0],), (both[1],))
        return
    rows = (spec.expert_width, spec.hidden)
    for expert in range(spec.experts):
        names = spec.names.separate(layer, expert)
        yield ExpertRecipe((SourceRows(names[0], rows), SourceRows(names[1], rows)), (SourceRows(names[2], down),))
