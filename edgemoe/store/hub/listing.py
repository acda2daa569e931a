"""What a repository of the hub has, as the hub lists it, and which of its files a store is made from.

Nothing in a listing is trusted: names are compared with those that are wanted, sizes and lengths have bounds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import xxhash
from msgspec import Meta

from edgemoe.errors import HubError
from edgemoe.store.checkpoint import COPIED_FILES, INDEX, MAX_JSON_BYTES, SINGLE

if TYPE_CHECKING:
    from hashlib import _Hash

MOST_LISTED_BYTES = 32 << 20
MOST_SHARDS = 4096
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}")

Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class _Large(msgspec.Struct):
    """A file that git keeps apart, by its hash."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    size: Size


class _Listed(msgspec.Struct):
    """One file as the hub lists it."""

    rfilename: Annotated[str, Meta(max_length=4096)]
    size: Size | None = None
    blobId: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")] | None = None
    lfs: _Large | None = None


class _Answer(msgspec.Struct):
    """What the hub says of a repository."""

    sha: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    siblings: Annotated[tuple[_Listed, ...], Meta(max_length=100_000)] = ()


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository. `digest` is its sha256, or for small ones git's hash, which covers the size too."""

    name: str
    bytes: int
    digest: str

    def hasher(self) -> _Hash:
        """Returns what makes `digest` out of the file's bytes."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.bytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit that can be of use."""

    repository: str
    commit: str
    files: dict[str, HubFile]

    @classmethod
    def read(cls, repository: str, text: bytes) -> Listing:
        """Raises HubError for an answer that makes no sense, or a repository without safetensors."""
        try:
            answer = msgspec.json.decode(text, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HubError(f"{repository}: what the hub says of it cannot be read: {error}") from error
        files = {listed.name: listed for listed in _useful(answer)}
        for file in files.values():
            if file.name in (*COPIED_FILES, INDEX) and file.bytes > MAX_JSON_BYTES:
                raise HubError(f"{repository}: {file.name} is too large ({file.bytes} bytes)")
        listing = cls(repository, answer.sha, files)
        if not listing.shards and INDEX not in files:
            raise HubError(
                f"{repository} has no safetensors files in its first folder; pickled weights are not fetched, since "
                "they can run code when they are loaded"
            )
        return listing

    @property
    def shards(self) -> tuple[HubFile, ...]:
        """Returns every safetensors file: those that the index names may be fewer."""
        return tuple(file for name, file in sorted(self.files.items()) if SHARD.fullmatch(name))

    @property
    def copied(self) -> tuple[HubFile, ...]:
        """Returns configuration, tokenizer and templates."""
        return tuple(self.files[name] for name in COPIED_FILES if name in self.files)

    @property
    def is_indexed(self) -> bool:
        return SINGLE not in self.files and INDEX in self.files

    @property
    def fingerprint(self) -> str:
        """Returns what changes when any of the files does, and with nothing else in the repository."""
        digest = xxhash.xxh3_128()
        for name, file in sorted(self.files.items()):
            digest.update(f"{name} {file.bytes} {file.digest}\n".encode())
        return str(digest.hexdigest())

    def file(self, name: str) -> HubFile:
        """Raises HubError where the repository does not have it."""
        if name not in self.files:
            raise HubError(f"{self.repository} has no {name}; is it a model as transformers saves it?")
        return self.files[name]


def check_names(repository: str, revision: str) -> None:
    """Raises HubError for what cannot be a repository's name, or that of a branch, tag or commit."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise HubError(f"{repository[:200]!r} is no repository of the hub; it is called OWNER/NAME")
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise HubError(f"{revision[:200]!r} is no branch, tag or commit")


def _useful(answer: _Answer) -> Iterator[HubFile]:
    shards = 0
    for listed in answer.siblings:
        name, large = listed.rfilename, listed.lfs
        if not SHARD.fullmatch(name) and name not in (*COPIED_FILES, INDEX):
            continue
        if (shards := shards + 1) > MOST_SHARDS:
            raise HubError(f"the repository has more than {MOST_SHARDS} files of weights")
        size, digest = (large.size, large.sha256) if large else (listed.size, listed.blobId)
        if size is None or digest is None:
            raise HubError(f"the hub names no size and hash of {name}, so that it could not be verified")
        yield HubFile(name, size, digest)
