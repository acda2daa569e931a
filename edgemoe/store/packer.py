"""Packs Hugging Face checkpoints: `pack` writes a store, `ensure_store` only if there is none yet.

A weight file gets its name when it is whole, and the manifest comes last. So packing again continues a pack that was
killed. Packing a finished store again verifies it and rewrites only its damaged files.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgemoe.config.sizes import format_size
from edgemoe.durable import make_folder, remove_empty, remove_file, replace_file
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.encodings.codec import unpack
from edgemoe.errors import CheckpointError, StoreError, StoreInUse, StoreVersionError
from edgemoe.store.checkpoint import Checkpoint
from edgemoe.store.files import (
    ARRIVING,
    LOCK,
    SPARE_BYTES,
    BlockChecksum,
    checksum,
    lock_holder,
    lock_store,
    os_errors_as_store_error,
)
from edgemoe.store.gguf.checkpoint_of_gguf import open_checkpoint
from edgemoe.store.layout import FilePlan, StoreLayout, WantedEncodings, plan
from edgemoe.store.manifest import (
    DENSE,
    JOURNAL,
    MANIFEST,
    READ_VERSIONS,
    SHARDS,
    VERSION,
    CopyEntry,
    DenseEntry,
    ExpertEntry,
    LayerEntry,
    Manifest,
    RowsEntry,
    clear,
    content_digest,
    finish_clearing,
)
from edgemoe.store.pieces import TensorCopy
from edgemoe.store.sources import EncodedRows
from edgemoe.store.writer import CheckpointReader, check_scales, copy_file, intact, to_bfloat16, write_file

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Check = Callable[[Path], None]  # of a checkpoint; raises CheckpointError
AS_IT_IS = WantedEncodings()
IDENTITY = f"{SHARDS}/arriving.json"  # the checkpoint and the encodings that shards are packed for as they arrive
STALLED_S = 600.0  # without anything written by the process that packs
WAIT_S = 0.2  # between looks whether another process is done
SAMPLED, SAMPLE_BYTES = 64, 1 << 20  # tensors, and bytes of each, of which a loss is computed
log = logging.getLogger(__name__)


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignores the progress: the default callback."""


def no_check(checkpoint: Path) -> None:
    """Checks nothing: the default before packing."""


def ensure_store(
    path: str | Path,
    store_dir: str | Path,
    progress: Progress = no_progress,
    wanted: WantedEncodings = AS_IT_IS,
    check: Check = no_check,
) -> Path:
    """Returns the store of a model: `path` itself where it is one, else one under `store_dir`, packed if need be.

    Before it is packed, `check` may refuse it. Raises CheckpointError, StoreError.
    """
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file():
        finish_clearing(path)
        return path
    checkpoint = open_checkpoint(path)
    store = place_of(Path(store_dir).expanduser(), checkpoint, wanted)
    waiting, seen, since_s = False, None, time.monotonic()
    if not (store / MANIFEST).is_file():
        check(path)
    while not (store / MANIFEST).is_file():
        try:
            pack(path, store, progress, wanted, again=False)
        except StoreInUse:  # by one who packs it, and whose death frees it
            if not waiting:
                log.info("waiting for another process that packs this model", extra={"store": str(store)})
            waiting = True
            if seen != (seen := _extent(store)):
                since_s = time.monotonic()
            elif time.monotonic() - since_s > STALLED_S:
                raise StoreInUse(_stalled(store)) from None
            time.sleep(WAIT_S)
    finish_clearing(store)
    return store


def place_of(directory: Path, checkpoint: Checkpoint, wanted: WantedEncodings) -> Path:
    """Returns the directory of a checkpoint's store: a finished one of an older version, or one of this version."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", checkpoint.name).lstrip(".-") or "model"
    name += f"-{wanted.label}" if wanted.label else ""
    places = [directory / f"{name}-v{version}-{checkpoint.fingerprint[:12]}" for version in READ_VERSIONS]
    return next((place for place in places if (place / MANIFEST).is_file()), places[-1])


def _extent(store: Path) -> list[tuple[str, int, int]]:
    """Returns names, sizes and times of a store's files, which change whenever its packer writes."""
    found = []
    for path in sorted(store.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # it has its final name by now
            about = path.stat()
            found.append((str(path), about.st_size, about.st_mtime_ns))
    return found


def _stalled(store: Path) -> str:
    holder = lock_holder(store)
    who, how = (f"process {holder}", f"kill -9 {holder}") if holder else ("another process", "kill -9")
    return (
        f"{store} is being packed by {who}, which has written nothing for {STALLED_S / 60:.0f} minutes; if it hangs or "
        f"is stopped, end it ({how}) and start again: what is packed already is kept"
    )


def pack(
    source_dir: str | Path,
    dest_dir: str | Path,
    progress: Progress = no_progress,
    wanted: WantedEncodings = AS_IT_IS,
    *,
    again: bool = True,
) -> Manifest:
    """Writes the store of the checkpoint in `source_dir` to `dest_dir`, or finishes or repairs it.

    Without `again` a store that is finished is left as it is.

    Raises CheckpointError or UnsupportedModel for the checkpoint; StoreError where `dest_dir` holds something else,
    is in use, or has too little room.
    """
    checkpoint = open_checkpoint(source_dir)
    layout = plan(checkpoint, wanted)
    dest = Path(dest_dir).expanduser()
    with os_errors_as_store_error(dest):
        is_new = not dest.exists()
        make_folder(dest)
        if not (dest / LOCK).exists():
            refuse_foreign(dest)
        with lock_store(dest, exclusive=True):
            if not again and (dest / MANIFEST).is_file():
                return Manifest.load(dest)
            try:
                return _Packer(checkpoint, layout, dest, progress).run()
            except CheckpointError as error:
                if not isinstance(error.__cause__, OSError | EOFError):  # which may read on later
                    _leave_nothing(dest, layout, is_new)
                raise


def finish(checkpoint: Checkpoint, wanted: WantedEncodings, store: Path, progress: Progress) -> Manifest:
    """Completes a store whose layers so far are of this checkpoint. Raises as `pack`."""
    packer = _Packer(checkpoint, plan(checkpoint, wanted), store, progress)
    replace_file(store / JOURNAL, packer.journal, 0o644)
    return packer.run()


class _Packer:
    """One run of `pack`, under the store's lock."""

    def __init__(self, checkpoint: Checkpoint, layout: StoreLayout, store: Path, progress: Progress) -> None:
        self._checkpoint, self._layout, self._store, self._progress = checkpoint, layout, store, progress
        self._done_bytes = 0
        self._total_bytes = sum(run.bytes for file in self._files for run in file.runs)

    @property
    def _files(self) -> tuple[FilePlan, ...]:
        return self._layout.files

    def run(self) -> Manifest:
        finished = self._begin()
        if self._layout.rounded:
            line = "%d float16 tensors are rounded to bfloat16; the RMS error is %.2g %% of the weights"
            log.warning(line, self._layout.rounded, 100 * rounding_loss(self._files))
        for name in self._layout.unfit:
            log.warning("%s cannot be encoded so, for its rows are no multiples of 32; it keeps its type", name)
        for line in reencoding_losses(self._layout.layers):
            log.warning("%s", line)
        kept = self._keep(finished)
        self._check_room(kept)
        check_scales(file for file in self._files if file.file not in kept)
        digests = [kept.get(file.file) or write_file(file, self._store, self._advance) for file in self._files]
        copies = tuple(self._copy(path) for path in self._checkpoint.copied)
        copies += tuple(self._made(name, content) for name, content in self._checkpoint.made)
        manifest = self._manifest(digests, copies)
        manifest.save(self._store)
        clear(self._store)
        return Manifest.load(self._store)

    @property
    def journal(self) -> bytes:
        """The text of the journal while this store is unfinished."""
        source, encodings = self._checkpoint.fingerprint, self._layout.encodings
        return msgspec.json.encode({"version": VERSION, "source": source, "encodings": encodings})

    def _keep(self, finished: bool) -> dict[str, tuple[str, ...]]:
        """Returns the files that need not be written, with their runs' checksums. Files of a finished store are read
        again.
        """
        kept = {}
        for file in self._files:
            if found := intact(self._store, file, thorough=finished):
                kept[file.file] = found
                self._advance(sum(run.bytes for run in file.runs))
        return kept

    def _advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._progress(self._done_bytes, self._total_bytes)

    def _begin(self) -> bool:
        """Makes the directory ready; true where it holds a finished store of this checkpoint."""
        store, journal = self._store, self._store / JOURNAL
        finished = self._finished()
        if not finished and not (journal.exists() and journal.read_bytes() == self.journal):
            start_over(store)
            replace_file(journal, self.journal, 0o644)
        for leftover in (*store.glob("*.tmp"), *store.glob("experts/*.tmp")):
            remove_file(leftover)
        make_folder(store / "experts")
        return finished

    def _finished(self) -> bool:
        if not (self._store / MANIFEST).exists():
            return False
        try:
            found = Manifest.read(self._store)
        except StoreVersionError:
            raise
        except StoreError:
            return False
        if found.source != self._checkpoint.fingerprint:
            raise StoreError(f"{self._store} is the store of another checkpoint ({found.name}); remove it first")
        if not self._layout.is_of(found):
            held = ", ".join(dict.fromkeys(found.encodings)) or found.dtype
            raise StoreError(f"{self._store} holds this checkpoint in other encodings ({held}); remove it first")
        return True

    def _check_room(self, kept: dict[str, tuple[str, ...]]) -> None:
        copied = sum(path.stat().st_size for path in self._checkpoint.copied)
        needed = sum(file.bytes for file in self._files if file.file not in kept) + copied + SPARE_BYTES
        disk = os.statvfs(self._store)
        free = disk.f_bavail * disk.f_frsize
        if needed > free:
            raise StoreError(
                f"{self._store}: packing needs {format_size(needed)} of room and the disk has {format_size(free)}; "
                "free some, or choose another directory"
            )

    def _copy(self, path: Path) -> CopyEntry:
        digest = copy_file(path, self._store / path.name)
        return CopyEntry(file=path.name, bytes=(self._store / path.name).stat().st_size, xxh3_128=digest)

    def _made(self, name: str, content: bytes) -> CopyEntry:
        replace_file(self._store / name, content, 0o644)
        digest = BlockChecksum()
        digest.update(content)
        return CopyEntry(file=name, bytes=len(content), xxh3_128=digest.hexdigest())

    def _manifest(self, digests: Sequence[tuple[str, ...]], copies: tuple[CopyEntry, ...]) -> Manifest:
        layout, config = self._layout, self._checkpoint.config
        dense = DenseEntry(
            file=layout.dense.file,
            bytes=layout.dense.bytes,
            header=checksum(layout.dense.header(digests[0])),
            xxh3_128=digests[0][0],
            encoding=layout.spec.dense_encoding,
        )
        encodings = layout.spec.encodings or [""] * len(layout.layers)
        of_layers, of_tables = digests[1 : 1 + len(layout.layers)], digests[1 + len(layout.layers) :]
        return Manifest(
            version=VERSION,
            name=self._checkpoint.name,
            digest=content_digest(
                config, layout.spec.dtype, layout.encodings, (digest for file in digests for digest in file)
            ),
            source=self._checkpoint.fingerprint,
            dtype=layout.spec.dtype,
            config=config,
            dense=dense,
            layers=tuple(map(_layer_entry, layout.layers, of_layers, encodings)),
            files=copies,
            tables=tuple(map(_table_entry, layout.tables, of_tables)),
        )


def _leave_nothing(store: Path, layout: StoreLayout, is_new: bool) -> None:
    """Deletes an unfinished store whose checkpoint cannot become one, for other weights get another store."""
    if (store / MANIFEST).exists():
        return
    for name in (*(file.file for file in layout.files), JOURNAL, LOCK):
        remove_file(store / name, missing_ok=True)
    for folder in (store / "experts", *([store] if is_new else ())):
        with contextlib.suppress(FileNotFoundError):  # nothing was written yet
            remove_empty(folder)


def _layer_entry(file: FilePlan, digests: Sequence[str], encoding: str) -> LayerEntry:
    entries = (
        ExpertEntry(expert=expert, offset=offset, bytes=run.bytes, xxh3_128=digest)
        for expert, (run, offset, digest) in enumerate(zip(file.runs, file.offsets(), digests, strict=True))
    )
    header = checksum(file.header(digests))
    return LayerEntry(file=file.file, bytes=file.bytes, header=header, experts=tuple(entries), encoding=encoding)


def _table_entry(file: FilePlan, digests: Sequence[str]) -> RowsEntry:
    header = checksum(file.header(digests))
    return RowsEntry(file=file.file, bytes=file.bytes, header=header, xxh3_128=digests[0])


def start_over(store: Path) -> None:
    """Deletes files that cannot be shown to come from this checkpoint; only in a directory of ours."""
    if (store / IDENTITY).is_file():
        how = "go on as before, with --wait or --delete-shards and the same encodings, or remove the directory"
        raise StoreError(f"{store} holds shards that were packed as they arrived: {how}")
    if (store / MANIFEST).exists() or (store / JOURNAL).exists():
        log.warning("%s is damaged, or part of another checkpoint's store; starting over", store)
        for file in (store / DENSE, *store.glob("experts/layer_*.safetensors"), *store.glob("rows_*.safetensors")):
            remove_file(file, missing_ok=True)
        return
    refuse_foreign(store)


def refuse_foreign(store: Path) -> None:
    """Raises StoreError for a folder that has files, and none of a store. To be called before its lock is made."""
    if any((store / file).exists() for file in (MANIFEST, JOURNAL, IDENTITY)):
        return
    ours = re.compile(rf"{LOCK}|{ARRIVING}|{re.escape(JOURNAL)}\..*\.?tmp|lost\+found")
    if others := [path.name for path in store.iterdir() if not ours.fullmatch(path.name)]:
        raise StoreError(f"{store} is not empty and no store (it has {others[0]}); choose another directory")


def reencoding_losses(layers: Sequence[FilePlan]) -> Iterator[str]:
    """Yields a line for each re-encoded type: the root mean square error, relative to that of the weights."""
    samples: dict[tuple[str, str], EncodedRows] = {}
    for layer in layers:
        for piece in layer.runs[0].pieces:
            if not isinstance(piece, EncodedRows) or not piece.source.is_approximated or not _is_here(piece):
                continue
            if piece.encoding.group and not piece.source.keeps(piece.encoding):
                samples.setdefault((piece.source.kind, piece.encoding.name), piece)
    with CheckpointReader() as reader:
        for (kind, encoding), piece in samples.items():
            wanted = piece.values(reader.stretch)
            if not np.isfinite(wanted).all():  # refused later, or wanted
                continue
            rows = piece.run(reader.stretch).reshape(len(wanted), -1)
            off = unpack(rows, piece.encoding, wanted.shape[1]) - wanted
            size = float(np.sqrt(np.square(wanted, dtype=np.float64).mean()))
            share = float(np.sqrt(np.square(off, dtype=np.float64).mean())) / size if size else 0.0
            yield f"experts in {kind} are re-encoded in {encoding}; the RMS error is {100 * share:.2g} % of the weights"


def rounding_loss(files: Sequence[FilePlan]) -> float:
    """Returns the root mean square error of float16 weights that become bfloat16, over that of the weights themselves.

    Reads the first bytes of some tensors.
    """
    pieces = (piece for file in files for run in file.runs for piece in run.pieces)
    copied = (each for each in pieces if isinstance(each, TensorCopy) and each.tensor.dtype == "F16")
    off = size = 0.0
    with CheckpointReader() as reader:
        for piece in itertools.islice(copied, SAMPLED):
            if piece.tensor.file.is_file():  # else its shard arrived, and is gone
                halves = reader.stretch(piece.tensor, piece.offset, min(piece.bytes, SAMPLE_BYTES)).view(np.float16)
                halves = halves[np.isfinite(halves)]  # others are refused later, or wanted
                wanted = halves.astype(np.float64)
                off += float(np.square(from_bf16(to_bfloat16(halves)) - wanted).sum())
                size += float(np.square(wanted).sum())
    return math.sqrt(off / size) if size else 0.0


def _is_here(piece: EncodedRows) -> bool:
    """Returns whether the files are there, which are deleted where shards are packed as they arrive."""
    return all(tensor.file.is_file() for tensor in piece.source.tensors)
