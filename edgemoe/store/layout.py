"""Plans the content of a store's weight files from a checkpoint, before anything is written.

An expert becomes one run of bytes in the encoding of its layer: gate rows and up rows [2I, H], then down [H, I], as in
transformers 5. Experts without a gate have up rows alone. Pad tensors fill the run up to whole pages, because
safetensors allows no holes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from edgemoe.errors import CheckpointError, ConfigError, UnsupportedModel
from edgemoe.families.config import decoder_config, spec_from_config
from edgemoe.families.spec import ModelSpec, Shape, dense_shapes, row_tables
from edgemoe.store.checkpoint import ITEM_BYTES, Checkpoint
from edgemoe.store.files import SEAL_BYTES
from edgemoe.store.gguf.checkpoint_of_gguf import GgufCheckpoint
from edgemoe.store.gguf.gguf_tensors import GgufTensors
from edgemoe.store.manifest import DENSE, Manifest, layer_file, rows_file
from edgemoe.store.pieces import ByteRun, FilePiece, SourceTensors, file_pieces
from edgemoe.store.quantisation_config import check_method
from edgemoe.store.sources import SourceRows, SourceTensor
from edgemoe.types.bounds import is_number
from edgemoe.types.encoding import AFFINE, ENCODINGS, FLOAT32, INT4, INT8, PAIR, Encoding, pair_name, pair_of
from edgemoe.types.experts import ExpertGeometry, padded

KEEP = "keep"
ENCODING_NAMES = {  # as asked for -> an encoding's name
    **{each.name: each.name for each in (INT4, INT8, *AFFINE)},
    "bf16": "bfloat16",
    "f32": "float32",
    KEEP: KEEP,
}
DENSE_NAMES = ("int4", "int8", "bf16", "f32", KEEP)


@dataclass(frozen=True, slots=True)
class WantedEncodings:
    """The encoding of experts, by layer where it differs, and of dense matrices; `KEEP` leaves them as they are."""

    experts: str = KEEP
    dense: str = KEEP
    layers: tuple[tuple[str, str], ...] = ()  # "first", "last" or a layer's number, and its experts' encoding
    finite: bool = field(default=True, compare=False)  # weights that are not numbers or infinite are refused

    @classmethod
    def parse(cls, experts: str, dense: str) -> WantedEncodings:
        """Reads "int4,first=int8,last=int8" and "int8". Raises ConfigError."""
        usual, *others = experts.split(",")
        layers = []
        for other in others:
            layer, equals, name = other.strip().partition("=")
            by_number = is_number(layer)
            if not equals or not (layer in ("first", "last") or by_number):
                raise ConfigError(f"--experts: {other!r} is no LAYER=ENCODING, such as first=int8, last=int8 or 3=int8")
            layers.append((str(int(layer)) if by_number else layer, _expert_encoding(name)))
        return cls(_expert_encoding(usual), _encoding_name(dense, "--dense", DENSE_NAMES), tuple(sorted(layers)))

    def of_layer(self, layer: int, layers: int) -> str:
        """Returns the encoding of one layer's experts."""
        named = dict(self.layers)
        for key in named:
            if is_number(key) and int(key) >= layers:
                raise ConfigError(f"--experts: there is no layer {key} with experts; it has {layers}, from 0 on")
        ends = {at: named[end] for end, at in (("first", 0), ("last", layers - 1)) if end in named}
        return named.get(str(layer)) or ends.get(layer) or self.experts

    def allows(self, found: Manifest, geometry: ExpertGeometry, is_quantised: bool) -> bool:
        """Whether a finished store can be in these encodings, judged by names and sizes.

        The encodings of an `is_quantised` checkpoint are unknown, so `KEEP` allows any for it.
        """
        sizes = (geometry.hidden, geometry.width)
        return _fits(self.dense, found.dense.encoding or found.dtype, (geometry.hidden,), is_quantised) and all(
            _fits(self.of_layer(number, geometry.layers), layer.encoding or found.dtype, sizes, is_quantised)
            for number, layer in enumerate(found.layers)
        )

    @property
    def label(self) -> str:
        """The part of the store's name for the encodings; "" if all are kept."""
        if self == WantedEncodings():
            return ""
        parts = [self.experts, *(f"{layer}-{name}" for layer, name in self.layers)]
        parts += [f"dense-{self.dense}"] if self.dense != KEEP else []
        return "-".join(parts)


def _fits(name: str, held: str, columns: tuple[int, ...], is_quantised: bool) -> bool:
    if name == KEEP:
        return is_quantised or not any(encoding.group for encoding in pair_of(held))
    return held == name or not all(encoding.fits(size) for encoding in pair_of(name) for size in columns)


def _encoding_name(name: str, option: str, names: Collection[str]) -> str:
    if name.strip() not in names:
        raise ConfigError(f"{option}: {name.strip()!r} is none of {', '.join(names)}")
    return ENCODING_NAMES[name.strip()]


def _expert_encoding(name: str) -> str:
    """Reads "q4_k", or "q4_k+q6_k" for gate and up, and down. Raises ConfigError."""
    gate_up, pair, down = name.partition(PAIR)
    found = _encoding_name(gate_up, "--experts", ENCODING_NAMES)
    if not pair:
        return found
    encoded = [each for each in ENCODING_NAMES if ENCODINGS.get(each, FLOAT32).group]
    return pair_name(*(_encoding_name(each, f"--experts {name}", encoded) for each in (gate_up, down)))


STORED_AS = {"float32": "F32", "bfloat16": "BF16"}  # encoding -> safetensors dtype; others are bytes, U8
MATRICES = (  # dense, to be encoded
    *("_proj.weight", "_proj_with_mqa.weight", "embed_tokens.weight", "lm_head.weight"),
    "embed_tokens_per_layer.weight",
    *("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
    *("indexer.wq_b.weight", "indexer.wk.weight"),
)
NO_DIGEST = "0" * 32


@dataclass(frozen=True)
class FilePlan:
    """One weight file of the store: its tensors (name, dtype, shape) in order, and the runs that they lie in."""

    file: str
    tensors: tuple[tuple[str, str, Shape], ...]
    runs: tuple[ByteRun, ...]
    finite: bool = True  # weights that are not numbers or infinite are refused
    row_bytes: int = 0  # of each row of a table, which its checksum follows; 0: this is no table

    def header(self, digests: Sequence[str]) -> bytes:
        """Returns the safetensors header with the runs' checksums in it: always the same number of whole pages."""
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
        return self.header_bytes + sum(self.stored_bytes(run) + run.padding for run in self.runs)

    def stored_bytes(self, run: ByteRun) -> int:
        """Returns the bytes of a run in the file, with the checksums of its rows."""
        return run.bytes + (run.bytes // self.row_bytes * SEAL_BYTES if self.row_bytes else 0)

    def offsets(self) -> Iterator[int]:
        """Yields the offset of each run."""
        at = self.header_bytes
        for run in self.runs:
            yield at
            at += self.stored_bytes(run) + run.padding


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The weight files of a store. `spec` has their precision and encodings."""

    spec: ModelSpec
    dense: FilePlan
    layers: tuple[FilePlan, ...]
    unfit: tuple[str, ...]  # tensors that keep their type, because their rows do not fit the wanted encoding
    tables: tuple[FilePlan, ...] = ()  # of rows that are read one by one

    @property
    def files(self) -> tuple[FilePlan, ...]:
        """Returns all weight files, in the order of `Manifest.weights`."""
        return (self.dense, *self.layers, *self.tables)

    @property
    def encodings(self) -> tuple[str, ...]:
        """Returns the encodings by layer, then that of dense matrices; () where all are plain."""
        experts = self.spec.encodings or ("",) * len(self.layers)
        return (*experts, self.spec.dense_encoding) if any(experts) or self.spec.dense_encoding else ()

    @property
    def rounded(self) -> int:
        """Returns the number of tensors that are float16 and become bfloat16."""
        pieces = itertools.chain.from_iterable(run.pieces for file in self.files for run in file.runs)
        return len({piece.half for piece in pieces} - {None})

    def is_of(self, manifest: Manifest) -> bool:
        """Returns whether the weights of a finished store are encoded as here."""
        return (manifest.dtype, manifest.encodings) == (self.spec.dtype, self.encodings)


def plan(checkpoint: Checkpoint, wanted: WantedEncodings) -> StoreLayout:
    """Finds every tensor of the configuration, and checks its shape and whether it can be encoded so.

    Raises UnsupportedModel and CheckpointError with the tensor, and its expected and actual properties.
    """
    check_method(checkpoint.config)
    spec = spec_from_config({**checkpoint.config, "dtype": "bfloat16"})  # precision: from the tensors, below
    if spec.layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json promises {spec.layers} layers, the files hold only "
            f"{len(checkpoint.tensors)} tensors"
        )
    tensors = _finder(checkpoint, spec)
    dense = {name: tensors.claim(name, shape) for name, shape in dense_shapes(spec).items()}
    layers = [_experts(tensors, layer) for layer in spec.expert_layers]
    found_tables = {name: tensors.claim(name, shape) for name, shape in row_tables(spec).items()}
    tensors.refuse_leftovers()
    unfit: list[str] = []
    dtype = _dtype(checkpoint, layers, wanted)
    spec = replace(spec, dtype=dtype)
    chosen = [_layer_encoding(layer, number, spec, wanted, unfit) for number, layer in enumerate(layers)]
    if any(each != dtype for each in chosen):
        spec = replace(spec, encodings=tuple(chosen))
    dense_file, encoding = _dense_plan(dense, spec, wanted, unfit)
    spec = replace(spec, dense_encoding=encoding)
    tables = [_table_plan(number, *found, spec, wanted, unfit) for number, found in enumerate(found_tables.items())]
    files = (replace(_layer_plan(layer, number, spec), finite=wanted.finite) for number, layer in enumerate(layers))
    dense_file = replace(dense_file, finite=wanted.finite)
    return StoreLayout(spec, dense_file, tuple(files), tuple(unfit), tuple(tables))


def precision(config: Mapping[str, Any]) -> str:
    """Returns the type of packed weights by the configuration alone; the tensors may differ."""
    said = decoder_config(config)
    dtype = str(said.get("dtype") or said.get("torch_dtype")).removeprefix("torch.")
    return "float32" if dtype == "float32" else "bfloat16"


def plan_layer(checkpoint: Checkpoint, wanted: WantedEncodings, number: int) -> FilePlan:
    """Plans one file of experts as `plan` does, from the tensors of its layer alone. Raises the same."""
    spec = spec_from_config({**checkpoint.config, "dtype": "bfloat16"})
    layer = _experts(_finder(checkpoint, spec), spec.expert_layers[number])
    spec = replace(spec, dtype=_dtype(checkpoint, [layer], wanted))
    encoding = _layer_encoding(layer, number, spec, wanted, [])
    if encoding != spec.dtype:
        spec = replace(spec, encodings=(encoding,) * spec.geometry.layers)
    return replace(_layer_plan(layer, number, spec), finite=wanted.finite)


def tensor_bytes(dtype: str, shape: Shape) -> int:
    """Returns the size of a tensor of the store."""
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def stored_encoding(spec: ModelSpec, name: str, columns: int) -> Encoding:
    """Returns the encoding of a tensor outside the experts in a store of this spec."""
    encoded = ENCODINGS[spec.dense_encoding or spec.dtype]
    return encoded if name.endswith(MATRICES) and encoded.fits(columns) else ENCODINGS[spec.dtype]


def table_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Returns the bytes of all tables of rows in a store of this spec, and of their largest row."""
    shapes = row_tables(spec).items()
    sizes = [(rows, stored_encoding(spec, name, columns).row_bytes(columns)) for name, (rows, columns) in shapes]
    return sum(rows * (size + SEAL_BYTES) for rows, size in sizes), max((size for _, size in sizes), default=0)


Rows = tuple[SourceTensor, SourceRows]


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: tuple[Rows, ...]
    down: tuple[Rows, ...]
    biases: tuple[Rows, ...]


Finder = SourceTensors | GgufTensors


def _finder(checkpoint: Checkpoint, spec: ModelSpec) -> Finder:
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufTensors(checkpoint.model, spec)
    return SourceTensors(checkpoint, spec)


def _experts(tensors: Finder, layer: int) -> list[_Expert]:
    return [
        _Expert(*(tuple(map(tensors.locate, part)) for part in (recipe.gate_up, recipe.down, recipe.biases)))
        for recipe in tensors.experts(layer)
    ]


def _matrices(layer: Sequence[_Expert]) -> Iterator[Rows]:
    return itertools.chain.from_iterable((*expert.gate_up, *expert.down) for expert in layer)


def _dtype(checkpoint: Checkpoint, layers: Sequence[Sequence[_Expert]], wanted: WantedEncodings) -> str:
    """Returns the type of hidden states: of plain experts, or of config.json if all are quantised."""
    plain = {source.kept_as for layer in layers for source, _ in _matrices(layer) if source.kept_as in STORED_AS}
    kept = plain.pop() if len(plain) == 1 else "bfloat16" if plain else precision(checkpoint.config)
    return wanted.dense if wanted.dense in STORED_AS else kept


def _layer_encoding(
    layer: Sequence[_Expert], number: int, spec: ModelSpec, wanted: WantedEncodings, unfit: list[str]
) -> str:
    """Returns the name of the encodings of one layer's experts, as `pair_of` reads it."""
    geometry = spec.geometry
    name = wanted.of_layer(number, geometry.layers)
    gate_up = _kept([rows for expert in layer for rows in expert.gate_up], spec, demanded=name == KEEP)
    down = _kept([rows for expert in layer for rows in expert.down], spec, demanded=name == KEEP)
    if gate_up in STORED_AS or down in STORED_AS:
        gate_up = down = spec.dtype if gate_up != down else gate_up
    if name == KEEP:
        return pair_name(gate_up, down)
    if all(each.fits(size) for each in pair_of(name) for size in (geometry.hidden, geometry.width)):
        return name
    unfit.append(f"experts of layer {number}")
    return gate_up if gate_up in STORED_AS else spec.dtype


def _kept(matrices: Sequence[Rows], spec: ModelSpec, *, demanded: bool) -> str:
    """Returns the encoding that keeps matrices, the finest where they are of several kinds.

    Raises UnsupportedModel where all are of one that is `demanded`, and codes cannot be kept as they are.
    """
    kinds = {source.kept_as for source, _ in matrices}
    kept = max(kinds, key=lambda kind: (ENCODINGS[kind].bits, kind))
    for source, selection in matrices if demanded and len(kinds) == 1 else ():
        if not source.is_approximated:
            _demand_kept(source, selection)
    return spec.dtype if len(kinds) > 1 and kept in STORED_AS else kept


def _demand_kept(source: SourceTensor, selection: SourceRows) -> None:
    """Raises UnsupportedModel where codes cannot be kept as they are."""
    if source.plain:
        return
    encoding = ENCODINGS[source.kept_as]
    if not source.keeps(encoding) or selection.transposed or not encoding.fits(source.shape[-1]):
        raise UnsupportedModel(
            f"{source.codes.file}: {source.name} cannot be kept in {source.kept_as}, for its scales serve "
            f"{source.block[1]} of {source.shape[-1]} columns; name an encoding, as in --experts int8"
        )


def _dense_plan(
    found: dict[str, SourceTensor], spec: ModelSpec, wanted: WantedEncodings, unfit: list[str]
) -> tuple[FilePlan, str]:
    stored: list[tuple[str, str, Shape, tuple[FilePiece, ...]]] = []
    encoded: set[str] = set()
    for name, source in found.items():
        encoding = _dense_encoding(name, source, spec, wanted, unfit)
        pieces = file_pieces(source, SourceRows(name, source.shape), encoding)
        if dtype := STORED_AS.get(encoding.name):
            stored.append((name, dtype, source.shape, pieces))
            continue
        encoded.add(encoding.name)
        stored.append((name, "U8", (source.shape[0], encoding.row_bytes(source.shape[1])), pieces))
    if len(encoded) > 1:
        raise UnsupportedModel(
            f"dense weights in several encodings ({', '.join(sorted(encoded))}); name one: --dense int8"
        )
    stored.sort(key=lambda entry: -ITEM_BYTES[entry[1]])  # so that all are aligned
    run = ByteRun(tuple(itertools.chain.from_iterable(pieces for *_, pieces in stored)))
    tensors = tuple((name, dtype, shape) for name, dtype, shape, _ in stored)
    return FilePlan(DENSE, tensors, (run,)), "".join(encoded)


def _dense_encoding(
    name: str, source: SourceTensor, spec: ModelSpec, wanted: WantedEncodings, unfit: list[str]
) -> Encoding:
    usual = ENCODINGS[source.kept_as if source.plain and source.kind != "F16" else spec.dtype]
    if len(source.shape) != 2 or not name.endswith(MATRICES):
        return usual
    encoding = ENCODINGS[source.kept_as if wanted.dense == KEEP else wanted.dense]
    if wanted.dense == KEEP and not source.plain and (encoding.is_affine or not source.keeps(encoding)):
        return usual
    if encoding.fits(source.shape[1]):
        return encoding
    unfit.append(name)
    return usual


def _table_plan(
    number: int, name: str, source: SourceTensor, spec: ModelSpec, wanted: WantedEncodings, unfit: list[str]
) -> FilePlan:
    encoding = _dense_encoding(name, source, spec, wanted, unfit)
    if encoding.name not in STORED_AS and encoding.name != spec.dense_encoding:
        raise UnsupportedModel(f"{name} is in {encoding.name}, other dense weights are not; name one: --dense int8")
    rows, columns = source.shape
    row_bytes = encoding.row_bytes(columns)
    run = ByteRun(file_pieces(source, SourceRows(name, source.shape), encoding))
    entry = (name, "U8", (rows, row_bytes + SEAL_BYTES))
    return FilePlan(rows_file(number), (entry,), (run,), wanted.finite, row_bytes)


def _layer_plan(layer: Sequence[_Expert], number: int, spec: ModelSpec) -> FilePlan:
    geometry = spec.geometry
    encoding, down = geometry.encoding(number), geometry.down_encoding(number)
    entries: list[tuple[str, str, Shape]] = []
    runs: list[ByteRun] = []
    for index, expert in enumerate(layer):
        name = f"experts.{index}"
        first = "gate_up_proj" if geometry.activation.inputs > 1 else "up_proj"
        entries.append(_entry(f"{name}.{first}", encoding, geometry.gate_up_shape))
        entries.append(_entry(f"{name}.down_proj", down, geometry.down_shape))
        parts = [*((rows, encoding) for rows in expert.gate_up), *((rows, down) for rows in expert.down)]
        if expert.biases:
            entries.append((f"{name}.biases", "F32", (geometry.bias_bytes // 4,)))
            parts += [(rows, FLOAT32) for rows in expert.biases]
        pieces = tuple(itertools.chain.from_iterable(file_pieces(*rows, each) for rows, each in parts))
        run = ByteRun(pieces, padded(geometry.expert_bytes(number)) - geometry.expert_bytes(number))
        assert run.bytes == geometry.expert_bytes(number)
        if run.padding:
            entries.append((f"pad.{index}", "U8", (run.padding,)))
        runs.append(run)
    return FilePlan(layer_file(number), tuple(entries), tuple(runs))


def _entry(name: str, encoding: Encoding, shape: tuple[int, int]) -> tuple[str, str, Shape]:
    if dtype := STORED_AS.get(encoding.name):
        return name, dtype, shape
    return name, "U8", (shape[0], encoding.row_bytes(shape[1]))
