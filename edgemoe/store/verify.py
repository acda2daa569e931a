"""Compares the files of a store with its manifest, each before it is used. Imports no torch.

What is read whole when a model is loaded is verified here; experts are verified by `ExpertStore`, each as it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgemoe.errors import StoreError
from edgemoe.store.files import PageFile, header_bytes, range_checksum
from edgemoe.store.manifest import JOURNAL, MANIFEST, CopyEntry, DenseEntry, LayerEntry, Manifest

THREADS = 4  # that read and hash blocks of one file
READ_BY_NAME = (".json", ".jinja")  # files that are used because they are there, whoever put them there


def verify_weights(directory: Path, entry: LayerEntry | DenseEntry) -> None:
    """Compares a weight file's header, and all dense weights, with the manifest. Raises StoreError."""
    _verify(directory, entry, direct=True)


def verify_dense(directory: Path, entry: DenseEntry, tell: Callable[[float], None]) -> None:
    """Compares the dense weights with the manifest and leaves them in the page cache, for who loads them next.

    `tell` hears which share is done. Raises StoreError.
    """
    _verify(directory, entry, direct=False, tell=tell)


def _verify(
    directory: Path, entry: LayerEntry | DenseEntry, *, direct: bool, tell: Callable[[float], None] | None = None
) -> None:
    path = directory / entry.file
    try:
        with PageFile(path, direct=direct) as file:
            start = min(header_bytes(file), entry.bytes)
            intact = range_checksum(file, 0, start) == entry.header
            if intact and isinstance(entry, DenseEntry):
                found = range_checksum(file, start, entry.bytes - start, threads=THREADS, tell=tell)
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
