"""The manifest of a packed store: its experts, the offsets of their bytes, and their checksums.

A store is a directory: `manifest.json`, `dense.safetensors`, `experts/layer_NNN.safetensors` and the checkpoint's
configuration and tokenizer files. An expert that is not listed is absent, which is no fault. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from edgemoe.durable import remove_file, remove_tree, replace_file, sync
from edgemoe.errors import CorruptExpert, StoreError, StoreVersionError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes, row_tables
from edgemoe.store.files import PageFile, checksum, file_bytes, header_bytes, lock_store, range_checksum
from edgemoe.types.encoding import BFLOAT16, ENCODINGS
from edgemoe.types.experts import PAGE_BYTES, padded
from edgemoe.types.json_object import Json
from edgemoe.types.model_info import ModelInfo, commonest_first

VERSION = 2
READ_VERSIONS = (1, 2)  # 1 has no encodings, and is otherwise the same
MANIFEST, DENSE = "manifest.json", "dense.safetensors"
SHARDS = "shards"  # folder of the kept parts of shards that are packed as they arrive
JOURNAL = "packing.json"  # there while a store is unfinished; names its source
MAX_MANIFEST_BYTES = 32 << 20  # of 170,000 experts; decoded, it takes twenty times as much memory

Size = Annotated[int, Meta(ge=0, le=1 << 60)]
Index = Annotated[int, Meta(ge=0, lt=1 << 20)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
EncodingName = Annotated[str, Meta(pattern=f"^({'|'.join(ENCODINGS)})?$")]
PairName = Annotated[str, Meta(pattern=f"^(({'|'.join(ENCODINGS)})([+]({'|'.join(ENCODINGS)}))?)?$")]
PlainName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)]


def layer_file(layer: int) -> str:
    """Returns the name of the file of one layer's experts."""
    return f"experts/layer_{layer:03d}.safetensors"


def rows_file(number: int) -> str:
    """Returns the name of the file of one table of rows."""
    return f"rows_{number:03d}.safetensors"


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Base of the manifest's parts."""


class ExpertEntry(ManifestPart, frozen=True):
    """One expert: `bytes` from `offset` of its layer's file."""

    expert: Index
    offset: Size
    bytes: Size
    xxh3_128: Digest


class FileEntry(ManifestPart, frozen=True):
    """A file of the store, by its name in the directory, and its size."""

    file: str
    bytes: Size


class LayerEntry(FileEntry, frozen=True):
    """One layer's file and the experts in it. `header` is the checksum of the safetensors header."""

    header: Digest
    experts: tuple[ExpertEntry, ...]
    encoding: PairName = ""  # "": the model's dtype

    @cached_property
    def by_expert(self) -> dict[int, ExpertEntry]:
        return {entry.expert: entry for entry in self.experts}


class DenseEntry(FileEntry, frozen=True):
    """The file of all other weights; `xxh3_128` is the checksum of the bytes after the header.

    `encoding` is of the matrices that are stored as bytes.
    """

    header: Digest
    xxh3_128: Digest
    encoding: EncodingName = ""


class RowsEntry(DenseEntry, frozen=True):
    """The file of a table whose rows are read one by one, each with its checksum behind it."""


class CopyEntry(FileEntry, frozen=True):
    """A file copied from the checkpoint: configuration, tokenizer, chat template."""

    file: PlainName
    xxh3_128: Digest


class Manifest(ManifestPart, frozen=True, omit_defaults=True):
    """The content of a store. `digest` names the model's content, `source` the checkpoint that it was packed from.

    `config` is the checkpoint's `config.json`; `checksum` covers the manifest itself.
    """

    version: int
    name: Annotated[str, Meta(max_length=255)]
    digest: Digest
    source: Digest
    dtype: Annotated[str, Meta(max_length=16)]  # "float32" | "bfloat16"
    config: Json
    dense: DenseEntry
    layers: tuple[LayerEntry, ...]
    files: tuple[CopyEntry, ...]
    tables: tuple[RowsEntry, ...] = ()
    checksum: str = ""

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Reads the manifest and checks every number in it against the files that it names.

        Raises StoreError, StoreVersionError, and CorruptExpert for the first expert that a file is too short for.
        """
        directory = Path(directory)
        manifest = cls.read(directory)
        for layer, entry in enumerate(manifest.layers):
            _check_layer(directory, layer, entry)
        if manifest.dense.file != DENSE:
            raise StoreError(f"{directory / MANIFEST}: dense weights cannot lie in {manifest.dense.file!r}")
        for number, table in enumerate(manifest.tables):
            if table.file != rows_file(number):
                raise StoreError(f"{directory / MANIFEST}: table {number} cannot lie in {table.file!r}")
        for part in (manifest.dense, *manifest.tables, *manifest.files):
            found = file_bytes(directory / part.file)
            if found != part.bytes:
                raise StoreError(f"{directory / part.file} has {found} bytes, not {part.bytes}; pack it again")
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the manifest alone, without a look at the other files. Raises StoreError, StoreVersionError."""
        path = directory / MANIFEST
        if file_bytes(path) > MAX_MANIFEST_BYTES:
            raise StoreError(f"{path} is too large to be a manifest")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: bytes, path: str) -> Self:
        """Parses the bytes of a manifest file; `path` is for error messages. Raises StoreError, StoreVersionError."""
        try:
            version = msgspec.json.decode(text, type=_Version).version
            if version not in READ_VERSIONS:
                known = " and ".join(map(str, READ_VERSIONS))
                raise StoreVersionError(
                    f"{path} is of version {version}, this program reads {known}; pack the checkpoint again"
                )
            manifest = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"{path} is not a manifest: {error}") from error
        if manifest.checksum != own_checksum(msgspec.json.decode(text)):
            raise StoreError(f"{path} is damaged: its checksum is wrong; pack the checkpoint again")
        return manifest

    def save(self, directory: Path) -> None:
        """Writes `manifest.json`, replacing an older one in one step."""
        plain = msgspec.to_builtins(self)
        signed = {**plain, "checksum": own_checksum(plain)}
        replace_file(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(signed), indent=1), 0o644)

    @property
    def spec_config(self) -> Json:
        """Returns the configuration for `spec_from_config`, with the precision that the store really has."""
        return {**self.config, "dtype": self.dtype}

    @property
    def encodings(self) -> tuple[str, ...]:
        """Returns the experts' encodings by layer, if they are not all `dtype`, then that of dense matrices."""
        experts = tuple(layer.encoding for layer in self.layers)
        return (*experts, self.dense.encoding) if any(experts) or self.dense.encoding else ()

    def present(self, layer: int, expert: int) -> bool:
        return 0 <= layer < len(self.layers) and expert in self.layers[layer].by_expert

    def entry(self, layer: int, expert: int) -> ExpertEntry:
        """Returns the entry of an expert. Raises KeyError or IndexError if it is absent."""
        return self.layers[layer].by_expert[expert]

    @property
    def total_bytes(self) -> int:
        """Returns the disk space of the store's files."""
        return sum(part.bytes for part in self.parts)

    @property
    def parts(self) -> tuple[FileEntry, ...]:
        """Returns every file of the store but the manifest."""
        return (*self.weights, *self.files)

    @property
    def weights(self) -> tuple[DenseEntry | LayerEntry, ...]:
        """Returns the weight files."""
        return (self.dense, *self.layers, *self.tables)

    @property
    def table_bytes(self) -> int:
        """Returns the size of the files of tables, which stay on disk."""
        return sum(table.bytes for table in self.tables)


class _Version(msgspec.Struct):
    version: int


def own_checksum(manifest: Json) -> str:
    """Returns the checksum of a manifest as it lies in its file, its `checksum` apart."""
    return checksum(msgspec.json.encode({**manifest, "checksum": ""}))


def content_digest(config: Json, dtype: str, encodings: Sequence[str], checksums: Iterable[str]) -> str:
    """Names a model by its configuration and weights: equal on every box that packed the same checkpoint alike.

    `encodings` are none where all weights are plain, so that such a store has one name in all versions.
    """
    parts = [config, dtype, list(checksums)]
    return checksum(msgspec.json.encode([*parts, list(encodings)] if encodings else parts, order="sorted"))


def _check_layer(directory: Path, layer: int, entry: LayerEntry) -> None:
    where = directory / MANIFEST
    if entry.file != layer_file(layer):
        raise StoreError(f"{where}: layer {layer} cannot lie in {entry.file!r}")
    if len(entry.by_expert) != len(entry.experts):
        raise StoreError(f"{where}: layer {layer} lists an expert twice")
    if not entry.experts:
        return
    end = 0
    found = file_bytes(directory / entry.file)
    for expert in sorted(entry.experts, key=lambda expert: expert.offset):
        if expert.offset % PAGE_BYTES or expert.offset < end or not expert.bytes:
            raise StoreError(f"{where}: expert {expert.expert} of layer {layer} has an impossible place")
        end = expert.offset + padded(expert.bytes)
        if end > found:
            raise CorruptExpert(str(directory / entry.file), layer, expert.expert, f"the file ends at byte {found}")
    if found != entry.bytes:
        raise StoreError(f"{directory / entry.file} (layer {layer}) has {found} bytes, not {entry.bytes}")


def finish_clearing(store: Path) -> None:
    """Clears the remains in a finished store whose packer was killed, unless it is in use or read-only."""
    if (store / JOURNAL).is_file() or (store / SHARDS).is_dir():
        with contextlib.suppress(StoreError, OSError), lock_store(store, exclusive=True):
            Manifest.load(store)  # of a damaged one the journal says how to go on
            clear(store)


def clear(store: Path) -> None:
    """Deletes the files that a finished store no longer needs."""
    remove_file(store / JOURNAL, missing_ok=True)
    with contextlib.suppress(OSError):
        remove_tree(store / SHARDS)
    sync(store)


def model_of(store: str) -> str:
    """Returns a store's name, as the packer makes it, without version and fingerprint."""
    return re.sub(r"-v\d+-[0-9a-f]{12}$", "", store)


def spec_of(manifest: Manifest) -> ModelSpec:
    """Returns the model of a store, after checking that the files are large enough for it.

    So memory that is reserved by the configuration is bounded by the files' sizes. Raises UnsupportedModel,
    CheckpointError, and StoreError if they contradict each other.
    """
    spec = spec_from_config(manifest.spec_config)
    experts = tuple(layer.encoding or manifest.dtype for layer in manifest.layers)
    if any(encoding != manifest.dtype for encoding in experts):
        spec = replace(spec, encodings=experts)
    spec = replace(spec, dense_encoding=manifest.dense.encoding)
    geometry = spec.geometry
    if len(manifest.layers) != geometry.layers:
        raise _contradiction(manifest, f"{len(manifest.layers)} layers of experts", f"{geometry.layers}")
    for layer, entry in enumerate(manifest.layers):
        count, expert_bytes = geometry.experts_of(layer), geometry.expert_bytes(layer)
        for expert in entry.experts:
            if expert.expert >= count:
                raise _contradiction(manifest, f"an expert {expert.expert} of layer {layer}", f"{count} experts")
            if expert.bytes != expert_bytes:
                found = f"{expert.bytes} bytes for expert {expert.expert} of layer {layer}"
                raise _contradiction(manifest, found, f"{expert_bytes} bytes an expert")
    encoding = ENCODINGS.get(manifest.dense.encoding, BFLOAT16)
    least_bytes = sum(map(math.prod, dense_shapes(spec).values())) * encoding.bits // 8
    if manifest.dense.bytes < least_bytes:
        raise _contradiction(manifest, f"{manifest.dense.bytes} bytes of dense weights", f"{least_bytes} or more")
    if len(manifest.tables) != len(row_tables(spec)):
        raise _contradiction(manifest, f"{len(manifest.tables)} tables of rows", str(len(row_tables(spec))))
    return spec


def _contradiction(manifest: Manifest, found: str, configured: str) -> StoreError:
    return StoreError(
        f"{MANIFEST} of {manifest.name[:80]} has {found}, its configuration says {configured}; "
        "pack the checkpoint again"
    )


THREADS = 4  # that read and hash blocks of one file
READ_BY_NAME = (".json", ".jinja")  # files that are used if they are present, listed or not


def verify_weights(directory: Path, entry: LayerEntry | DenseEntry) -> None:
    """Compares a weight file's header, and all of it but experts, with the manifest. Raises StoreError."""
    _verify(directory, entry, direct=True)


def verify_dense(directory: Path, entry: DenseEntry, report: Callable[[float], None]) -> None:
    """Compares the dense weights with the manifest and leaves them in the page cache for the next reader.

    Calls `report` with the share done. Raises StoreError.
    """
    _verify(directory, entry, direct=False, report=report)


def verify_table(directory: Path, entry: RowsEntry) -> None:
    """Compares the header of a table's file with the manifest; its rows have checksums of their own.

    Raises StoreError.
    """
    path = directory / entry.file
    try:
        with PageFile(path, direct=False) as file:
            intact = range_checksum(file, 0, min(header_bytes(file), entry.bytes)) == entry.header
    except (OSError, EOFError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not intact:
        raise _damaged(path)


def _verify(
    directory: Path, entry: LayerEntry | DenseEntry, *, direct: bool, report: Callable[[float], None] | None = None
) -> None:
    path = directory / entry.file
    try:
        with PageFile(path, direct=direct) as file:
            start = min(header_bytes(file), entry.bytes)
            intact = range_checksum(file, 0, start) == entry.header
            if intact and isinstance(entry, DenseEntry):
                found = range_checksum(file, start, entry.bytes - start, threads=THREADS, report=report)
                intact = found == entry.xxh3_128
    except (OSError, EOFError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not intact:
        raise _damaged(path)


def verify_copy(directory: Path, entry: CopyEntry) -> None:
    """Compares one file that came from the checkpoint as it is. Raises StoreError."""
    path = directory / entry.file
    try:
        with PageFile(path, direct=False) as file:
            found = range_checksum(file, 0, entry.bytes)
    except (OSError, EOFError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if found != entry.xxh3_128:
        raise _damaged(path)


def verify_copies(directory: Path, manifest: Manifest) -> None:
    """Compares configuration, tokenizer and chat template with the manifest, before anything reads them.

    Raises StoreError, for a file of their kind that the manifest does not know too.
    """
    for entry in manifest.files:
        verify_copy(directory, entry)
    known = {MANIFEST, JOURNAL, *(entry.file for entry in manifest.files)}
    for path in sorted(directory.iterdir()):
        if path.suffix in READ_BY_NAME and path.name not in known:
            raise StoreError(f"{path} is not part of this store; remove it, or pack a checkpoint that has it")


def _damaged(path: Path) -> StoreError:
    return StoreError(
        f"{path} is damaged: its checksum is wrong; `edgemoe models verify {path.parent}` lists all that is, "
        "packing the checkpoint again mends it"
    )


def served_info(name: str, manifest: Manifest, spec: ModelSpec) -> ModelInfo:
    """Returns the description of a model that is served under `name`; "" is the store's own name."""
    geometry = spec.geometry
    return ModelInfo(
        id=name or manifest.name,
        family=spec.family,
        digest=manifest.digest,
        context_tokens=spec.context_tokens,
        vocab=spec.vocab,
        layers=geometry.layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        dtype=spec.dtype,
        expert_bytes=max(map(geometry.expert_bytes, range(geometry.layers))),
        layer_experts=geometry.layer_experts,
        encodings=commonest_first([geometry.encoding_name(layer) for layer in range(geometry.layers)]),
        dense_encoding=spec.dense_encoding,
        kv_dtype="int8" if spec.kv_int8 else spec.dtype,
        layer_bytes=tuple(geometry.strides_bytes.tolist()),
    )
