"""What an expert in a store is made of: rows of source tensors, one below the other. The packer runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from edgemoe.families.spec import ExpertNames, ModelSpec, Shape
from edgemoe.types.experts import ExpertGeometry


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
    if has(names.gate_up):
        for expert in range(geometry.experts):
            yield _of_stack(names, geometry, expert)
        return
    rows = (geometry.width, geometry.hidden)
    for expert in range(geometry.experts):
        gate, up, last = names.separate(expert)
        yield ExpertRecipe((SourceRows(gate, rows), SourceRows(up, rows)), (SourceRows(last, geometry.down_shape),))


def _of_stack(names: ExpertNames, geometry: ExpertGeometry, expert: int) -> ExpertRecipe:
    gate_up = _matrix(names.gate_up, geometry.gate_up_shape, names, geometry, expert)
    down = _matrix(names.down, geometry.down_shape, names, geometry, expert)
    biases: tuple[SourceRows, ...] = ()
    if geometry.biases:
        both, last = (
            SourceRows(f"{name}_bias", (geometry.experts, rows), (expert,))
            for name, rows in ((names.gate_up, 2 * geometry.width), (names.down, geometry.hidden))
        )
        biases = (*_gate_and_up(both, names), last)
    return ExpertRecipe(_gate_and_up(gate_up, names), (down,), biases)


def _matrix(name: str, shape: Shape, names: ExpertNames, geometry: ExpertGeometry, expert: int) -> SourceRows:
    stored = shape[::-1] if names.transposed else shape
    return SourceRows(name, (geometry.experts, *stored), (expert,), names.transposed)


def _gate_and_up(both: SourceRows, names: ExpertNames) -> tuple[SourceRows, ...]:
    """Puts the rows, or elements, of gate before those of up."""
    if not names.interleaved:
        return (both,)
    return replace(both, rows=range(0, both.count, 2)), replace(both, rows=range(1, both.count, 2))
