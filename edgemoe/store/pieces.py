"""The content of a store's files: bytes of a checkpoint, copied or encoded. Sizes are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.spec import ExpertNames, ModelSpec, Shape
from edgemoe.store.checkpoint import Checkpoint, CheckpointTensor
from edgemoe.store.foreign_weights import GptqLayout, find_foreign, has_foreign
from edgemoe.store.mlx_weights import MLX_NAMES, find_mlx
from edgemoe.store.quantisation_config import (
    is_asymmetric,
    is_reordered,
    mlx_quantisation,
    quantisation,
    zeros_are_less,
)
from edgemoe.store.sources import (
    UNUSED,
    EncodedRows,
    SourceRows,
    SourceTensor,
    find_source,
    has_source,
    transforms,
)
from edgemoe.types.encoding import Encoding
from edgemoe.types.experts import ExpertGeometry


@dataclass(frozen=True, slots=True)
class ExpertRecipe:
    """One expert: gate rows, if any, and up rows, down rows, and its biases."""

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
    *first, last = names.stacks
    if has(last):
        count = geometry.experts
        for expert in range(count):
            yield ExpertRecipe(
                tuple(SourceRows(name, (count, *rows), (expert,)) for name in first),
                (SourceRows(last, (count, *geometry.down_shape), (expert,)),),
            )
        return
    for expert in range(geometry.experts):
        *first, last = names.separate(expert)
        yield ExpertRecipe(tuple(SourceRows(name, rows) for name in first), (SourceRows(last, geometry.down_shape),))


def _of_stack(names: ExpertNames, geometry: ExpertGeometry, expert: int) -> ExpertRecipe:
    gate_up = _matrix(names.gate_up, geometry.gate_up_shape, names, geometry, expert)
    down = _matrix(names.down, geometry.down_shape, names, geometry, expert)
    biases: tuple[SourceRows, ...] = ()
    if geometry.biases:
        both, last = (
            SourceRows(f"{name}_bias", (geometry.experts, rows), (expert,))
            for name, rows in ((names.gate_up, geometry.first_rows), (names.down, geometry.hidden))
        )
        biases = (*_gate_and_up(both, names), last)
    return ExpertRecipe(_gate_and_up(gate_up, names), (down,), biases)


def _matrix(name: str, shape: Shape, names: ExpertNames, geometry: ExpertGeometry, expert: int) -> SourceRows:
    stored = shape[::-1] if names.transposed else shape
    return SourceRows(name, (geometry.experts, *stored), (expert,), names.transposed)


def _gate_and_up(both: SourceRows, names: ExpertNames) -> tuple[SourceRows, ...]:
    """Puts the rows, or elements, of gate before the ones of up."""
    if not names.interleaved:
        return (both,)
    return replace(both, rows=range(0, both.count, 2)), replace(both, rows=range(1, both.count, 2))


IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and that follow from the configuration


def _is_there(left: Mapping[str, CheckpointTensor], name: str) -> bool:
    """Returns whether a checkpoint has a tensor, in any form."""
    return has_source(left, name) or has_foreign(left, name)


class SourceTensors:
    """Finds tensors, each once."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        if mlx_quantisation(checkpoint.config):
            spec = replace(spec, names=replace(spec.names, renames=(*MLX_NAMES, *spec.names.renames)))
        self._spec, self._checkpoint = spec, checkpoint
        self._left = dict(checkpoint.tensors)
        self._stacks: dict[str, SourceTensor] = {}

    def has(self, name: str) -> bool:
        """Returns whether a tensor is there that has not been taken."""
        return any(_is_there(self._left, spelling) for spelling in self._spec.names.spellings(name))

    def claim(self, name: str, shape: Shape) -> SourceTensor:
        """Returns a tensor. Raises CheckpointError and UnsupportedModel where it is not as it should be."""
        found = [each for each in self._spec.names.spellings(name) if _is_there(self._left, each)]
        where = self._checkpoint.directory
        if not found:
            raise CheckpointError(f"{where}: tensor {name} is missing; its shape should be {list(shape)}")
        if len(found) > 1:
            raise CheckpointError(f"{where}: {' and '.join(found)} are the same tensor")
        config = self._checkpoint.config
        layout = GptqLayout(int(zeros_are_less(config)), is_reordered(config), is_asymmetric(config))
        source = find_mlx(self._left, found[0], shape) or find_foreign(self._left, found[0], shape, layout)
        source = source or find_source(self._left, found[0], shape, config)
        for tensor in source.tensors:
            del self._left[tensor.name]
        return source

    def locate(self, selection: SourceRows) -> tuple[SourceTensor, SourceRows]:
        """Returns the tensor of some rows, and the rows in it.

        A stack of MXFP4 is always [rows, columns], as is one in a family with transposed stacks whose shape says so.
        """
        stored = selection
        if selection.transposed:
            *lead, columns, rows = selection.shape
            turned = replace(selection, shape=(*lead, rows, columns), transposed=False)
            stored = turned if self._lies_in_rows(turned) else selection
        if not selection.index:
            return self.claim(selection.source, stored.shape), stored
        if selection.source not in self._stacks:
            self._stacks[selection.source] = self.claim(selection.source, stored.shape)
        source = self._stacks[selection.source]
        in_rows = source.kind == "mxfp4" or source.shape != selection.shape
        return source, replace(selection, shape=source.shape, transposed=selection.transposed and not in_rows)

    def _lies_in_rows(self, selection: SourceRows) -> bool:
        """Returns whether a stack is there as [rows, columns]; one that fits both ways is not."""
        for name in self._spec.names.spellings(selection.source):
            if f"{name}_blocks" in self._left:
                return True
            if name in self._left and selection.shape[-1] != selection.shape[-2]:
                return self._left[name].shape == selection.shape
        return False

    def experts(self, layer: int) -> Iterator[ExpertRecipe]:
        """Yields the experts of a layer, which is counted among all."""
        return expert_recipes(self._spec, layer, self.has)

    def refuse_leftovers(self) -> None:
        """Raises UnsupportedModel where tensors are left that the configuration does not ask for."""
        ignored = (*IGNORED, "lm_head.weight") if self._spec.block.tied else IGNORED
        if quantisation(self._checkpoint.config):
            ignored = (*ignored, *UNUSED)
        unused = self._spec.unused(self._left)
        if left := [name for name in self._left if not name.endswith(ignored) and name not in unused]:
            raise UnsupportedModel(
                f"{self._checkpoint.directory}: {len(left)} tensors have no place in a {self._spec.architecture} "
                f"of this configuration, such as {left[0]!r}"
            )


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """Consecutive bytes of a source tensor."""

    tensor: CheckpointTensor
    offset: int  # in the tensor
    bytes: int

    @property
    def half(self) -> str | None:
        """Returns the name of a float16 tensor that is rounded to bfloat16 here."""
        return self.tensor.name if self.tensor.dtype == "F16" else None


FilePiece = TensorCopy | EncodedRows


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Consecutive bytes of a file of the store that have one checksum; `padding` zeros follow."""

    pieces: tuple[FilePiece, ...]
    padding: int = 0

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def tensors(self) -> Iterator[CheckpointTensor]:
        """Yields the tensors that it is made of, some of them several times."""
        for piece in self.pieces:
            if isinstance(piece, TensorCopy):
                yield piece.tensor
                continue
            yield from piece.source.tensors


def file_pieces(source: SourceTensor, selection: SourceRows, encoding: Encoding) -> tuple[FilePiece, ...]:
    """Returns the pieces that hold these rows in an encoding: a copy where they lie so already."""
    whole = selection.rows is None and not selection.transposed
    if whole and source.plain and source.kept_as == encoding.name:
        count = 1
        for length in source.shape[: len(selection.index)]:
            count *= length
        size = source.codes.bytes // count
        return (TensorCopy(source.codes, source.number(selection.index) * size, size),)
    if len(selection.matrix) > 2:  # kernels of convolutions
        shape = (math.prod(source.shape[:-1]), source.shape[-1])
        source, selection = replace(source, shape=shape), replace(selection, shape=shape)
    return transforms(source, selection, encoding)
