"""What a store's weight files will hold, worked out from a checkpoint before anything is written.

An expert becomes one run of bytes: gate rows and up rows [2I, H], then down [H, I], as transformers 5 stacks them;
pad tensors fill the run up to whole pages, because safetensors allows no holes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from edgemoe.errors import CheckpointError, UnsupportedModel
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, Shape, dense_shapes
from edgemoe.store.checkpoint import ITEM_BYTES, Checkpoint, Tensor
from edgemoe.store.manifest import DENSE, layer_file
from edgemoe.types.experts import padded

STORED_AS = {"F32": "F32", "BF16": "BF16", "F16": "BF16"}  # safetensors dtype of the source -> of the store
DTYPES = {"F32": "float32", "BF16": "bfloat16"}
IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry and that follow from the configuration
NO_DIGEST = "0" * 32


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a source tensor."""

    tensor: Tensor
    offset: int  # in the tensor's file
    bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a file of the store that have one checksum; `padding` zeros follow."""

    pieces: tuple[Piece, ...]
    padding: int = 0

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class FilePlan:
    """One weight file of the store: its tensors (name, dtype, shape) in order, and the runs that they lie in."""

    file: str
    tensors: tuple[tuple[str, str, Shape], ...]
    runs: tuple[Run, ...]

    def header(self, digests: Sequence[str]) -> bytes:
        """Returns the safetensors header with the runs' checksums in it; whole pages, whatever the checksums."""
        entries: dict[str, object] = {"__metadata__": {"xxh3_128": " ".join(digests)}}
        at = 0
        for name, dtype, shape in self.tensors:
            end = at + tensor_bytes(dtype, shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        size = padded(8 + len(text)) - 8
        return size.to_bytes(8, "little") + text.ljust(size)

    @cached_property
    def header_bytes(self) -> int:
        return len(self.header([NO_DIGEST] * len(self.runs)))

    @cached_property
    def bytes(self) -> int:
        return self.header_bytes + sum(run.bytes + run.padding for run in self.runs)

    def offsets(self) -> Iterator[int]:
        """Returns where each run begins."""
        at = self.header_bytes
        for run in self.runs:
            yield at
            at += run.bytes + run.padding


@dataclass(frozen=True, slots=True)
class Layout:
    """The weight files of a store. `rounded` counts the tensors that are float16 and become bfloat16."""

    spec: ModelSpec
    dense: FilePlan
    layers: tuple[FilePlan, ...]
    rounded: int


def plan(checkpoint: Checkpoint) -> Layout:
    """Finds every tensor that the configuration asks for and checks its shape.

    Raises UnsupportedModel and CheckpointError, naming the tensor, what was expected and what was found.
    """
    spec = spec_from_config({**checkpoint.config, "dtype": "bfloat16"})  # precision: from the tensors, below
    if spec.layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json promises {spec.layers} layers, the files hold only "
            f"{len(checkpoint.tensors)} tensors"
        )
    tensors = _Tensors(checkpoint, spec)
    dense = _dense_plan(tensors)
    layers = tuple(_layer_plan(tensors, layer) for layer in range(spec.layers))
    tensors.refuse_leftovers()
    kinds = sorted({dtype for layer in layers for name, dtype, _ in layer.tensors if not name.startswith("pad")})
    if len(kinds) > 1:
        raise CheckpointError(f"{checkpoint.directory}: experts of several types ({', '.join(kinds)})")
    return Layout(replace(spec, dtype=DTYPES[kinds[0]]), dense, layers, tensors.rounded)


class _Tensors:
    """The checkpoint's tensors under any of the family's spellings; knows which have been asked for."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self.spec = spec
        self.rounded = 0
        self._where = checkpoint.directory
        self._left = dict(checkpoint.tensors)

    def has(self, name: str) -> bool:
        return any(spelling in self._left for spelling in self.spec.names.spellings(name))

    def take(self, name: str, shape: Shape) -> Tensor:
        found = [spelling for spelling in self.spec.names.spellings(name) if spelling in self._left]
        if not found:
            raise CheckpointError(f"{self._where}: tensor {name} is missing; its shape should be {list(shape)}")
        if len(found) > 1:
            raise CheckpointError(f"{self._where}: {' and '.join(found)} are the same tensor")
        tensor = self._left.pop(found[0])
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} should have the shape {list(shape)} by config.json, "
                f"but has {list(tensor.shape)}"
            )
        if tensor.dtype not in STORED_AS:
            raise UnsupportedModel(
                f"{tensor.file}: tensor {tensor.name} is of type {tensor.dtype}; supported are {', '.join(STORED_AS)}"
            )
        self.rounded += tensor.dtype == "F16"
        return tensor

    def refuse_leftovers(self) -> None:
        tied = ("lm_head.weight",) if self.spec.tied else ()
        left = [name for name in self._left if not name.endswith(IGNORED + tied)]
        if left:
            raise UnsupportedModel(
                f"{self._where}: {len(left)} tensors have no place in a {self.spec.architecture} "
                f"of this configuration, such as {left[0]!r}"
            )


def tensor_bytes(dtype: str, shape: Shape) -> int:
    """Returns the size of a tensor of the store."""
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def _dense_plan(tensors: _Tensors) -> FilePlan:
    found = {name: tensors.take(name, shape) for name, shape in dense_shapes(tensors.spec).items()}
    by_alignment = sorted(found.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    return FilePlan(
        file=DENSE,
        tensors=tuple((name, STORED_AS[tensor.dtype], tensor.shape) for name, tensor in by_alignment),
        runs=(Run(tuple(Piece(tensor, tensor.offset, tensor.bytes) for _, tensor in by_alignment)),),
    )


def _layer_plan(tensors: _Tensors, layer: int) -> FilePlan:
    spec, geometry = tensors.spec, tensors.spec.geometry
    take = _take_stacked if tensors.has(spec.names.stacked(layer)[0]) else _take_separate
    entries: list[tuple[str, str, Shape]] = []
    runs: list[Run] = []
    for expert, pieces in enumerate(take(tensors, layer)):
        size = sum(piece.bytes for piece in pieces)
        run = Run(pieces, padded(size) - size)
        dtypes = {STORED_AS[piece.tensor.dtype] for piece in pieces}
        if len(dtypes) > 1:
            raise CheckpointError(f"{pieces[0].tensor.file}: expert {expert} of layer {layer} is of several types")
        dtype = dtypes.pop()
        entries.append((f"experts.{expert}.gate_up_proj", dtype, geometry.gate_up_shape))
        entries.append((f"experts.{expert}.down_proj", dtype, geometry.down_shape))
        if run.padding:
            entries.append((f"pad.{expert}", "U8", (run.padding,)))
        runs.append(run)
    return FilePlan(layer_file(layer), tuple(entries), tuple(runs))


def _take_stacked(tensors: _Tensors, layer: int) -> Iterator[tuple[Piece, ...]]:
    spec, geometry = tensors.spec, tensors.spec.geometry
    shapes = ((spec.experts, *geometry.gate_up_shape), (spec.experts, *geometry.down_shape))
    whole = [tensors.take(name, shape) for name, shape in zip(spec.names.stacked(layer), shapes, strict=True)]
    for expert in range(spec.experts):
        yield tuple(_share(tensor, expert, spec.experts) for tensor in whole)


def _share(tensor: Tensor, index: int, count: int) -> Piece:
    size = tensor.bytes // count
    return Piece(tensor, tensor.offset + index * size, size)


def _take_separate(tensors: _Tensors, layer: int) -> Iterator[tuple[Piece, ...]]:
    spec = tensors.spec
    rows = (spec.expert_width, spec.hidden)
    shapes = (rows, rows, spec.geometry.down_shape)
    for expert in range(spec.experts):
        names = spec.names.separate(layer, expert)
        found = [tensors.take(name, shape) for name, shape in zip(names, shapes, strict=True)]
        yield tuple(Piece(tensor, tensor.offset, tensor.bytes) for tensor in found)
