"""Packs a checkpoint whose shards come one by one, so that each can be deleted as soon as it is packed.

A layer of experts is written once all shards with its tensors are there. The store's folder `shards` keeps each
shard's header, and its tensors outside written layers, until the last shard has come. The finished store is the
same, byte for byte, as if all shards had been there at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from edgemoe.durable import make_folder, remove_file, replace_file, sync
from edgemoe.errors import CheckpointError, ShardCutShort, StoreError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec
from edgemoe.store.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
    CheckpointTensor,
    FileStat,
    check_index,
    copied_files,
    file_stat,
    fingerprint_of,
    header_of,
    parse_header,
    read_header,
    read_json,
    weight_files,
)
from edgemoe.store.files import LOCK, lock_store, os_errors_as_store_error
from edgemoe.store.layout import FilePlan, WantedEncodings, plan, plan_layer
from edgemoe.store.manifest import JOURNAL, MANIFEST, SHARDS, Manifest, clear
from edgemoe.store.packer import AS_IT_IS, IDENTITY, Progress, finish, no_progress, place_of, refuse_foreign, start_over
from edgemoe.store.pieces import ByteRun, TensorCopy
from edgemoe.store.quantisation_config import check_method, quantisation
from edgemoe.store.writer import check_scales, intact, write_file
from edgemoe.types.json_object import Json


class PackingState(NamedTuple):
    """How far a store has come: finished where no shard is missing."""

    store: Path
    missing: tuple[str, ...]  # that have not arrived, or in part


class _Record(msgspec.Struct, frozen=True):
    """The state of a shard that may have been deleted."""

    bytes: int
    mtime_ns: int
    header: str


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard that has arrived."""

    about: FileStat
    header: bytes
    tensors: dict[str, CheckpointTensor]  # in the shard
    left: dict[str, CheckpointTensor] | None  # the tensors kept of it; None: the shard is still there


def pack_arrived(
    source_dir: str | Path,
    dest_dir: str | Path,
    progress: Progress = no_progress,
    wanted: WantedEncodings = AS_IT_IS,
    *,
    delete: bool = False,
) -> PackingState:
    """Packs the shards that have arrived of a checkpoint, and finishes the store with the last one.

    `source_dir` must have config.json and the index. With `delete` each shard is deleted as soon as the store has its
    tensors. A run that was killed is continued by the next. A shard that is cut short counts as missing. Raises
    CheckpointError and UnsupportedModel for the checkpoint; StoreError where `dest_dir` holds something else, is in
    use, or has too little room.
    """
    store = Path(dest_dir).expanduser()
    arriving = _Arriving(Path(source_dir).expanduser(), store, wanted, progress)
    with os_errors_as_store_error(store):
        make_folder(store)
        if not (store / LOCK).exists():
            refuse_foreign(store)
        with lock_store(store, exclusive=True):
            return arriving.run(delete=delete)


def arriving_store(source_dir: str | Path, store_dir: str | Path, wanted: WantedEncodings) -> Path:
    """Returns the directory of the store of a checkpoint whose shards arrive one by one. Raises CheckpointError."""
    source = Path(source_dir).expanduser()
    checkpoint = Checkpoint(source, read_json(source / CONFIG), {}, (), _identity(source))
    return place_of(Path(store_dir).expanduser(), checkpoint, wanted)


def _identity(source: Path) -> str:
    """Returns a digest that identifies a checkpoint before its shards are there."""
    digest = xxhash.xxh3_128()
    for name in (CONFIG, INDEX):
        if (path := source / name).is_file():
            digest.update(path.read_bytes())
    return str(digest.hexdigest())


class _Arriving:
    """One run of `pack_arrived`. Reading the configuration refuses unsupported models before there is a store."""

    def __init__(self, source: Path, store: Path, wanted: WantedEncodings, progress: Progress) -> None:
        self._source, self._store, self._wanted, self._progress = source, store, wanted, progress
        self._config = read_json(source / CONFIG)
        check_method(self._config)
        self._spec: ModelSpec = spec_from_config({**self._config, "dtype": "bfloat16"})
        self._kept = store / SHARDS
        self._files: list[Path] = []
        self._weight_map: Json = {}

    def run(self, *, delete: bool) -> PackingState:
        if self._is_finished():
            self._check_again(delete=delete)
            return PackingState(self._store, ())
        self._begin()
        self._files, self._weight_map = weight_files(self._source)
        shards, is_indexed = dict(self._arrived()), bool(self._weight_map)
        if not is_indexed:
            self._weight_map = {name: path.name for path, shard in shards.items() for name in shard.tensors}
        written = set(self._write_layers(shards))
        if delete and is_indexed:
            for path, shard in shards.items():
                shards[path] = self._release(path, shard, written)
        missing = tuple(path.name for path in self._files if path not in shards)
        if not missing:
            finish(self._checkpoint(shards, whole=True), self._wanted, self._store, self._progress)
            for path in self._files:
                if delete and path.is_file():
                    _delete(path)
        return PackingState(self._store, missing)

    def _is_finished(self) -> bool:
        if not (self._store / MANIFEST).is_file():
            return False
        found = Manifest.load(self._store)
        is_quantised = bool(quantisation(self._config))
        if found.config != self._config or not self._wanted.allows(found, self._spec.geometry, is_quantised):
            raise self._other()
        clear(self._store)
        return True

    def _check_again(self, *, delete: bool) -> None:
        """Checks shards beside a finished store. Raises StoreError unless it was packed from them, so encoded."""
        there: list[Path] = []
        with contextlib.suppress(CheckpointError):  # all are deleted, and there is no index
            there = [path for path in weight_files(self._source)[0] if path.is_file()]
        if not there:
            return
        found, checkpoint = Manifest.load(self._store), None
        with contextlib.suppress(CheckpointError):
            checkpoint = Checkpoint.open(self._source)
        if checkpoint is None or checkpoint.fingerprint != found.source:
            raise StoreError(
                f"{self._store} is finished, but {there[0]} has come again or changed since: delete the shards, or "
                "remove the store to pack them again"
            )
        if not plan(checkpoint, self._wanted).is_of(found):
            raise self._other()
        for path in there if delete else ():
            _delete(path)

    def _other(self) -> StoreError:
        return StoreError(f"{self._store} is the store of another checkpoint, or in other encodings; remove it first")

    def _begin(self) -> None:
        """Prepares the directory. Raises StoreError if it keeps shards of another checkpoint."""
        identity = msgspec.json.encode({"checkpoint": _identity(self._source), "encodings": self._wanted.label})
        file = self._store / IDENTITY
        if not file.is_file():
            start_over(self._store)
            replace_file(self._store / JOURNAL, identity, 0o644)
            make_folder(self._kept)
            replace_file(file, identity, 0o644)
        elif file.read_bytes() != identity:
            raise StoreError(
                f"{self._store} holds shards of another checkpoint, or for other encodings; finish packing that one, "
                "or remove the directory if you can fetch its shards again"
            )
        make_folder(self._store / "experts")
        for leftover in (*self._store.glob("experts/*.tmp"), *self._kept.glob("*.tmp")):
            remove_file(leftover)

    def _arrived(self) -> Iterator[tuple[Path, _Shard]]:
        """Yields the shards that are whole, or were."""
        for path in self._files:
            record, kept = self._kept / f"{path.name}.json", self._kept / path.name
            if record.is_file() and kept.is_file():
                found = msgspec.json.decode(record.read_bytes(), type=_Record)
                about, header = FileStat(path.name, found.bytes, found.mtime_ns), found.header.encode()
                tensors = parse_header(header, path, found.bytes)
                yield path, _Shard(about, header, tensors, self._left(path, tensors))
            elif path.is_file():
                with contextlib.suppress(ShardCutShort):
                    header, size = header_of(path)
                    tensors = parse_header(header, path, size)
                    own = {name: file for name, file in self._weight_map.items() if file == path.name}
                    check_index(own, tensors)
                    yield path, _Shard(file_stat(path), header, tensors, None)

    def _left(self, path: Path, tensors: dict[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
        """Returns the tensors that are kept of a shard, where they lie now."""
        kept = self._kept / path.name
        return {n: replace(tensors[n], file=kept, offset=place.offset) for n, place in read_header(kept).items()}

    def _checkpoint(self, shards: dict[Path, _Shard], *, whole: bool = False) -> Checkpoint:
        """Returns the checkpoint as far as it has arrived; its fingerprint is that of the shards as they came."""
        original: dict[str, CheckpointTensor] = {}
        for path in self._files:
            if path in shards:
                original |= shards[path].tensors
        places = dict(original)
        for shard in shards.values():
            places |= shard.left or {}
        copied = copied_files(self._source)
        stats = [shards[path].about for path in self._files if path in shards] + [file_stat(path) for path in copied]
        return Checkpoint(self._source, self._config, places, copied, fingerprint_of(stats, original) if whole else "")

    def _write_layers(self, shards: dict[Path, _Shard]) -> Iterator[str]:
        """Writes the layers of experts whose shards are all there; yields the tensors that they are made of."""
        checkpoint = self._checkpoint(shards)
        there, done = {path.name for path in shards}, 0
        total = sum(tensor.bytes for tensor in checkpoint.tensors.values())
        for number, layer in enumerate(self._spec.expert_layers):
            if not all(file in there for name, file in self._wanted_names() if f"layers.{layer}." in name):
                continue
            file = plan_layer(checkpoint, self._wanted, number)
            if not intact(self._store, file, thorough=False):
                check_scales([file])
                write_file(file, self._store, lambda _: None)
            names = {tensor.name for run in file.runs for tensor in run.tensors}
            yield from names
            done += sum(checkpoint.tensors[name].bytes for name in names)
            self._progress(done, total)

    @cached_property
    def _unused(self) -> set[str]:
        return self._spec.unused(self._weight_map)

    def _wanted_names(self) -> Iterator[tuple[str, str]]:
        return ((name, file) for name, file in self._weight_map.items() if name not in self._unused)

    def _release(self, path: Path, shard: _Shard, written: set[str]) -> _Shard:
        """Keeps the tensors of a shard that the store still needs, and deletes the shard."""
        names = {name for name, file in self._wanted_names() if file == path.name} - written
        if shard.left is None or names != shard.left.keys():
            record = _Record(shard.about.bytes, shard.about.mtime_ns, shard.header.decode())
            replace_file(self._kept / f"{path.name}.json", msgspec.json.encode(record), 0o644)
            places = shard.tensors if shard.left is None else shard.left
            kept = sorted((replace(places[name], dtype="U8") for name in names), key=lambda tensor: tensor.name)
            copies = ByteRun(tuple(TensorCopy(tensor, 0, tensor.bytes) for tensor in kept))
            entries = tuple((tensor.name, "U8", (tensor.bytes,)) for tensor in kept)
            write_file(FilePlan(f"{SHARDS}/{path.name}", entries, (copies,)), self._store, lambda _: None)
            shard = replace(shard, left=self._left(path, shard.tensors))
        if path.is_file():
            if header_of(path) != (shard.header, shard.about.bytes):
                raise StoreError(f"{path} is another file than the one that was packed; {self._store} is of the first")
            _delete(path)
        return shard


def _delete(path: Path) -> None:
    """Deletes a shard, and its target if it is a link of the hub's cache."""
    target = path.resolve()
    remove_file(path)
    remove_file(target, missing_ok=True)
    sync(path.parent)
