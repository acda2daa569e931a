"""Makes a store of a repository of the hub: each shard is fetched, packed and deleted while the next one comes.

Fetched files lie in the folder `.hub` beside the stores, laid out as the hub's own cache. A pull that was killed goes
on when it is run again. It keeps to the same files, even if the repository has changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

from edgemoe.config.sizes import format_size
from edgemoe.durable import make_folder, remove_tree
from edgemoe.errors import HubError, StoreError
from edgemoe.families.config import spec_from_config
from edgemoe.families.spec import ModelSpec, dense_shapes, row_tables
from edgemoe.store.arriving import pack_arrived
from edgemoe.store.checkpoint import CONFIG, INDEX, MODELOPT, SINGLE, TOKENIZER, Checkpoint, read_config, weight_files
from edgemoe.store.files import ARRIVING, SPARE_BYTES, lock_store, os_errors_as_store_error
from edgemoe.store.hub import Hub, HubFile, RepositoryListing
from edgemoe.store.hub_names import hub_name
from edgemoe.store.layout import KEEP, WantedEncodings, precision
from edgemoe.store.manifest import MANIFEST, finish_clearing
from edgemoe.store.packer import AS_IT_IS, Check, Progress, no_check, no_progress, pack, place_of
from edgemoe.store.quantisation_config import check_method
from edgemoe.types.encoding import pair_of

FOLDER = ".hub"
STORE_OF_GGUF = 2  # times the bytes of the files, at most: of Q2 in int4, and of dense weights in bfloat16


def download(
    repository: str,
    store_dir: str | Path,
    wanted: WantedEncodings = AS_IT_IS,
    progress: Progress = no_progress,
    *,
    revision: str = "main",
    quant: str = "",
    check: Check = no_check,
) -> Path:
    """Returns the store of a repository, fetched and packed as far as it is not. `progress` is told of weights.

    `repository` is OWNER/NAME, or a short name.
    `quant` names one of the repository's GGUF models, as in "Q4_K_M"; where there is one alone, it need not be named.
    `check` may refuse the files beside the weights before these are fetched.
    Raises HubError, CheckpointError, UnsupportedModel, StoreError, ConfigError.
    """
    hub, directory, repository = Hub(), Path(store_dir).expanduser(), hub_name(repository)
    listing = hub.list_repository(repository, revision)
    is_gguf = bool(quant) or (not listing.shards and not listing.is_indexed)
    listing = listing.chosen(quant) if is_gguf else listing
    owner = f"models--{repository.replace('/', '--')}"
    source = directory / FOLDER / owner / "snapshots" / listing.fingerprint[:12]
    named = source / next(iter(listing.files.values())).local if is_gguf else source
    store = place_of(directory, Checkpoint(named, {}, {}, (), listing.fingerprint), wanted)
    if (store / MANIFEST).is_file():
        finish_clearing(store)
        if not source.exists():
            return store
    with os_errors_as_store_error(source, "pulling"):
        make_folder(source)
        with lock_store(source, exclusive=True):
            if not (store / MANIFEST).is_file():
                run = _Download(hub, listing, source, store, wanted, check)
                (run.run_gguf if is_gguf else run.run)(progress)
            remove_tree(source)
    return store


def fetch_config(repository: str, revision: str, folder: Path) -> bool:
    """Fetches a repository's configuration. Returns False for one of GGUF files, which has none to go by.

    Raises HubError.
    """
    hub = Hub()
    listing = hub.list_repository(hub_name(repository), revision)
    if not listing.shards and not listing.is_indexed:
        return False
    for name in (CONFIG, MODELOPT):
        if name == CONFIG or name in listing.files:
            hub.fetch(listing, listing.file(name), folder, lambda _: None)
    return True


class _Download:
    """One run of `download`, under the lock of the folder that files come to."""

    def __init__(
        self, hub: Hub, listing: RepositoryListing, source: Path, store: Path, wanted: WantedEncodings, check: Check
    ) -> None:
        self._hub, self._listing, self._source, self._store, self._wanted = hub, listing, source, store, wanted
        self._check = check
        self._ended = threading.Event()
        self._done_bytes = 0

    def run(self, progress: Progress) -> None:
        self._fetch(self._listing.file(CONFIG))
        self._listing.file(TOKENIZER)
        if MODELOPT in self._listing.files:
            self._fetch(self._listing.file(MODELOPT))
        config = read_config(self._source)
        check_method(config)
        spec = spec_from_config({**config, "dtype": precision(config)})
        encodings = [self._wanted.of_layer(layer, spec.geometry.layers) for layer in range(spec.geometry.layers)]
        shards = self._shards()
        total_bytes = sum(shard.bytes for shard in shards)
        self._check_room(_most_bytes(spec, encodings, [shard.bytes for shard in shards]))
        for file in self._listing.copied:
            self._fetch(file)
        self._check(self._source)

        def report(more_bytes: int) -> None:
            if self._ended.is_set():
                raise HubError("stopped")
            self._done_bytes += more_bytes
            progress(self._done_bytes, total_bytes)

        make_folder(self._store)
        with lock_store(self._store, exclusive=True, lock=ARRIVING):
            missing = self._missing(shards)
            self._done_bytes = total_bytes - sum(shard.bytes for shard in missing)
            self._fetch_and_pack(missing, report)
        if not (self._store / MANIFEST).is_file():
            raise StoreError(f"{self._store} was removed while it was pulled; run it again")

    def run_gguf(self, progress: Progress) -> None:
        """Fetches all files of a GGUF model, then packs them."""
        files = tuple(self._listing.files.values())
        total_bytes = sum(file.bytes for file in files)
        self._check_room(STORE_OF_GGUF * total_bytes + total_bytes)

        def report(more_bytes: int) -> None:
            self._done_bytes += more_bytes
            progress(self._done_bytes, total_bytes)

        for file in files:
            self._fetch(file, report)
        self._check(self._source / files[0].local)
        pack(self._source / files[0].local, self._store, progress, self._wanted)

    def _fetch(self, file: HubFile, report: Callable[[int], None] = lambda _: None) -> None:
        if not (self._source / file.local).is_file():  # which has its name only once it is whole
            self._hub.fetch(self._listing, file, self._source, report)

    def _shards(self) -> tuple[HubFile, ...]:
        """Returns the files of weights: the ones in the index if there is one. Raises HubError."""
        if self._listing.is_indexed:
            self._fetch(self._listing.file(INDEX))
            return tuple(self._listing.file(path.name) for path in weight_files(self._source)[0])
        if SINGLE in self._listing.files:
            return (self._listing.files[SINGLE],)
        if len(self._listing.shards) > 1:
            raise HubError(f"{self._listing.repository} has several safetensors files but no {INDEX}")
        return self._listing.shards

    def _missing(self, shards: Sequence[HubFile]) -> tuple[HubFile, ...]:
        """Packs and deletes the shards that are here, and returns the missing ones."""
        if not self._listing.is_indexed and not (self._source / shards[0].name).is_file():
            return tuple(shards)
        names = pack_arrived(self._source, self._store, no_progress, self._wanted, delete=True).missing
        return tuple(shard for shard in shards if shard.name in names)

    def _fetch_and_pack(self, missing: Sequence[HubFile], report: Callable[[int], None]) -> None:
        """Fetches shard after shard and packs each, while the next one comes where the disk has room for two."""
        with ThreadPoolExecutor(1, "hub") as fetcher:
            try:
                fetching: Future[None] | None = None
                for shard, following in zip(missing, (*missing[1:], None), strict=True):
                    (fetching or fetcher.submit(self._fetch, shard, report)).result()
                    ahead = following is not None and _free_bytes(self._source) > 3 * max(shard.bytes, following.bytes)
                    fetching = fetcher.submit(self._fetch, following, report) if ahead and following else None
                    if shard in self._missing([shard]):
                        raise HubError(f"{self._listing.repository}: {shard.name} ends before its tensors do")
            finally:
                self._ended.set()

    def _check_room(self, needed_bytes: int) -> None:
        """Raises StoreError with the number of missing bytes if store and one shard do not fit on the disk."""
        there = sum(_bytes_of(folder) for folder in (self._source, self._store))
        short = needed_bytes + SPARE_BYTES - there - _free_bytes(self._source)
        if short > 0:
            raise StoreError(
                f"{self._source}: the store and one shard need {short} bytes ({format_size(short)}) more than the disk "
                "has. Free them, name another model.store_dir, or pack in fewer bits (--experts int4)"
            )


def _most_bytes(spec: ModelSpec, encodings: Sequence[str], shards: Sequence[int]) -> int:
    """Returns the most bytes on disk at once: the store, and beside it one shard, or the dense weights again."""
    weights_bytes = sum(shards)
    outside = (dense_shapes(spec) | row_tables(spec)).values()
    dense_bytes = min(weights_bytes, spec.dtype_bytes * sum(prod(shape) for shape in outside))
    if all(name == KEEP for name in encodings):
        return weights_bytes + max(dense_bytes, *shards)
    sizes = (spec.geometry.hidden, spec.geometry.width)
    chosen = (spec.dtype if name == KEEP else name for name in encodings)
    fitting = tuple(
        name if all(each.fits(size) for each in pair_of(name) for size in sizes) else spec.dtype for name in chosen
    )
    return replace(spec, encodings=fitting).geometry.all_bytes + dense_bytes + max(dense_bytes, *shards)


def _free_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
