"""Lists a repository of the hub, and selects the files that a store is made from.

Nothing in a listing is trusted: names are compared with the wanted ones, sizes and lengths have bounds.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import quote

import msgspec
import xxhash
from huggingface_hub import constants, get_session, get_token, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils.tqdm import disable_progress_bars
from msgspec import Meta

import edgemoe
from edgemoe.config.sizes import format_size
from edgemoe.durable import open_kept, remove_file, rename_file
from edgemoe.errors import EdgemoeError, HubError, StoreError, write_remedy
from edgemoe.store.checkpoint import COPIED_FILES, INDEX, MAX_JSON_BYTES, SINGLE
from edgemoe.store.files import BLOCK_BYTES
from edgemoe.store.hub_names import suggestion

if TYPE_CHECKING:
    from hashlib import _Hash

MOST_LISTED_BYTES = 32 << 20
MOST_SHARDS = 4096
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
GGUF = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,100}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.gguf")
BESIDE_MODELS = ("mmproj", "mtp-", "imatrix")  # beginnings of the names of GGUF files that are no language model
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE)
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
    """The hub's description of a repository."""

    sha: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    siblings: Annotated[tuple[_Listed, ...], Meta(max_length=100_000)] = ()


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository. `digest` is its sha256, or for small ones git's hash, which covers the size too."""

    name: str
    bytes: int
    digest: str

    @property
    def local(self) -> str:
        """Returns the name without the folder that it may lie in."""
        return self.name.rpartition("/")[2]

    def hasher(self) -> _Hash:
        """Returns the hash object for `digest`."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.bytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RepositoryListing:
    """The files of one commit that can be of use."""

    repository: str
    commit: str
    files: dict[str, HubFile]

    @classmethod
    def read(cls, repository: str, text: bytes) -> RepositoryListing:
        """Parses the hub's answer. Raises HubError if it is invalid, or the repository has no safetensors."""
        try:
            answer = msgspec.json.decode(text, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HubError(f"{repository}: the hub's answer cannot be read: {error}") from error
        files = {listed.name: listed for listed in _useful(answer)}
        for file in files.values():
            if file.name in (*COPIED_FILES, INDEX) and file.bytes > MAX_JSON_BYTES:
                raise HubError(f"{repository}: {file.name} is too large ({file.bytes} bytes)")
        listing = cls(repository, answer.sha, files)
        if not listing.shards and INDEX not in files and not listing.quants:
            raise HubError(
                f"{repository} has neither safetensors nor GGUF files; pickled weights are not fetched, since "
                "they can run code when they are loaded"
            )
        return listing

    @property
    def shards(self) -> tuple[HubFile, ...]:
        """Returns every safetensors file, also files that the index does not name."""
        return tuple(file for name, file in sorted(self.files.items()) if SHARD.fullmatch(name))

    @property
    def quants(self) -> dict[str, tuple[HubFile, ...]]:
        """Returns the GGUF models by their quantisation, such as "Q4_K_M", each with all of its files."""
        found: dict[str, list[HubFile]] = {}
        for path, file in sorted(self.files.items()):
            stem = path.rpartition("/")[2].removesuffix(".gguf")
            if GGUF.fullmatch(path) and not stem.startswith(BESIDE_MODELS):
                whole = SPLIT.sub("", stem)
                named = QUANT.search(whole)
                found.setdefault(named[1].upper() if named else whole, []).append(file)
        return {quant: tuple(files) for quant, files in found.items()}

    def chosen(self, quant: str) -> Self:
        """Returns the listing of one of the GGUF models alone: the one named, or the only one. Raises HubError."""
        found = self.quants
        sizes = ", ".join(f"{name} ({format_size(sum(file.bytes for file in files))})" for name, files in found.items())
        if not found:
            raise HubError(f"{self.repository} has no GGUF files; leave --quant out, and say --experts int4 if need be")
        if not quant and len(found) > 1:
            raise HubError(f"{self.repository} has {len(found)} GGUF models; name one with --quant: {sizes}")
        files = found.get(quant.upper()) if quant else next(iter(found.values()))
        if files is None:
            raise HubError(f"{self.repository} has no GGUF called {quant[:80]!r}; it has {sizes}")
        return replace(self, files={file.name: file for file in files})

    @property
    def copied(self) -> tuple[HubFile, ...]:
        """Returns configuration, tokenizer and templates."""
        return tuple(self.files[name] for name in COPIED_FILES if name in self.files)

    @property
    def is_indexed(self) -> bool:
        return SINGLE not in self.files and INDEX in self.files

    @property
    def fingerprint(self) -> str:
        """Returns a digest that changes when any of the files does, and with nothing else in the repository."""
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
    """Raises HubError unless these are valid names of a repository, and of a branch, tag or commit."""
    if not REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        called = f"it is called OWNER/NAME{suggestion(repository)}"
        raise HubError(f"{repository[:200]!r} is no repository of the hub; {called}")
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise HubError(f"{revision[:200]!r} is no branch, tag or commit")


def _useful(answer: _Answer) -> Iterator[HubFile]:
    shards = 0
    for listed in answer.siblings:
        name, large = listed.rfilename, listed.lfs
        if not SHARD.fullmatch(name) and not GGUF.fullmatch(name) and name not in (*COPIED_FILES, INDEX):
            continue
        if (shards := shards + 1) > MOST_SHARDS:
            raise HubError(f"the repository has more than {MOST_SHARDS} files of weights")
        size, digest = (large.size, large.sha256) if large else (listed.size, listed.blobId)
        if size is None or digest is None:
            raise HubError(f"the hub names no size and hash of {name}, so that it could not be verified")
        yield HubFile(name, size, digest)


ReportBytes = Callable[[int], None]  # of bytes more; fewer where some are fetched again


class PartialFile:
    """A file under a temporary name until `finish` has verified it. The hub's library writes into it."""

    def __init__(self, file: HubFile, directory: Path, report: ReportBytes) -> None:
        """Opens the part that is there of the file, and hashes it. Raises OSError."""
        self._file, self._path, self._report = file, directory / file.local, report
        self._temporary = directory / f"{file.local}.{file.digest[:16]}.part"
        self._position, self._digest = 0, file.hasher()
        self._opened = os.fdopen(open_kept(self._temporary, 0o644), "r+b")
        self._opened.seek(0)
        while block := self._opened.read(BLOCK_BYTES):
            self._count(block)
        if self._position > file.bytes:
            self.start_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()
        if not self._position:
            remove_file(self._temporary, missing_ok=True)

    @property
    def is_complete(self) -> bool:
        return self._position == self._file.bytes

    def write(self, data: bytes) -> int:
        """Appends bytes. Raises StoreError, and HubError if there are more than the listed size."""
        if self._position + len(data) > self._file.bytes:
            raise HubError(f"{self._file.name}: the hub sends more than the {self._file.bytes} bytes that it names")
        try:
            self._opened.write(data)
        except OSError as error:  # distinguished here from the connection's OSError
            remedy = write_remedy(error, "run it again")
            raise StoreError(f"{self._temporary}: {error.strerror}; fetching stopped, {remedy}") from error
        self._count(data)
        return len(data)

    def position(self) -> int:
        """Returns the number of bytes written so far."""
        return self._position

    tell = position  # the name in Python's file protocol

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Goes back to the start, the only position supported."""
        if (position, whence) != (0, os.SEEK_SET):
            raise OSError(f"{self._temporary} is written from its start, or at its end")
        self.start_over()
        return 0

    def truncate(self) -> int:
        """Truncates the file at the present position."""
        return self._opened.truncate(self._position)

    def start_over(self) -> None:
        """Deletes the bytes that have come."""
        self._report(-self._position)
        self._opened.seek(0)
        self._opened.truncate(0)
        self._position, self._digest = 0, self._file.hasher()

    def finish(self) -> bool:
        """Gives the file its name. Returns False, and deletes its bytes, if their hash is not the hub's."""
        if self._digest.hexdigest() != self._file.digest:
            self.start_over()
            return False
        self._opened.flush()
        os.fsync(self._opened.fileno())
        rename_file(self._temporary, self._path.name)
        return True

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._position += len(data)
        self._report(len(data))


TRIES = 4  # without a byte more
RETRIED = (408, 429)  # statuses below 500
UNKNOWN_TOKEN = "Invalid credentials in Authorization header"
FIRST_PAUSE_S = 1.0  # doubled each time
TOKEN = "set HF_TOKEN, or log in with `hf auth login`"
log = logging.getLogger(__name__)


class _Bounded(io.BytesIO):
    """Memory for an answer that may not be endless."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > MOST_LISTED_BYTES:
            raise HubError("the hub's answer is too long to be a listing of files")
        return super().write(data)


class _Refused(Exception):
    """The hub's answer is no success. The library would read all of it, however long, for its message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{constants.ENDPOINT} answers {status}")
        self.status, self.code, self.message = status, code, message


def _check_answer(answer: Any) -> None:
    """Looks at an answer's head, before any of its body is read. Raises _Refused, and HubError for packed bodies."""
    if answer.status_code >= 400:
        named = (answer.headers.get(name, "") for name in ("X-Error-Code", "X-Error-Message"))
        raise _Refused(answer.status_code, *named)
    if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise HubError(f"the hub packs its answer ({packed[:40]!r}), which was not asked for; look for a proxy between")


class Hub:
    """The hub of HF_ENDPOINT, for the user of HF_TOKEN or of the saved token."""

    def __init__(self) -> None:
        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # its retries: ours are reported below
        self._headers = {"User-Agent": f"edgemoe/{edgemoe.__version__}", "Accept-Encoding": "identity"}
        hooks = get_session().event_hooks["response"]
        if _check_answer not in hooks:
            hooks.append(_check_answer)
        if token := get_token():
            self._headers["Authorization"] = f"Bearer {token}"

    def list_repository(self, repository: str, revision: str) -> RepositoryListing:
        """Lists the files of a branch, tag or commit. Raises HubError."""
        check_names(repository, revision)
        url = f"{constants.ENDPOINT}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        for pause_s in _pauses():
            answer = _Bounded()
            if self._get(url, answer, repository, last=pause_s is None):
                return RepositoryListing.read(repository, answer.getvalue())
            time.sleep(pause_s or 0.0)
        raise AssertionError("the last try raises")

    def fetch(self, listing: RepositoryListing, file: HubFile, directory: Path, report: ReportBytes) -> None:
        """Fetches the rest of a file into the directory, and verifies it.

        Raises HubError, StoreError, OSError.
        """
        url = hf_hub_url(listing.repository, file.name, revision=listing.commit)
        with PartialFile(file, directory, report) as partial:
            for again in (True, False):
                self._fill(url, partial, file)
                if partial.finish():
                    return
                log.warning("what came of a file is damaged", extra={"file": file.name, "again": again})
        raise HubError(
            f"{listing.repository}: {file.name} came damaged twice: its hash is not {file.digest}, as the hub says; "
            "something on the way changes it"
        )

    def _fill(self, url: str, partial: PartialFile, file: HubFile) -> None:
        while not partial.is_complete:
            for pause_s in _pauses():
                before = partial.tell()
                self._get(url, partial, file.name, last=pause_s is None)
                if partial.is_complete or partial.tell() > before:
                    break
                if pause_s is None:
                    raise HubError(f"{file.name}: the hub sends nothing more after {before} of {file.bytes} bytes")
                time.sleep(pause_s)

    def _get(self, url: str, into: _Bounded | PartialFile, what: str, *, last: bool) -> bool:
        """Appends the rest of a URL's content to `into`. Returns False if a retry may help; raises HubError if not."""
        try:
            http_get(url, into, resume_size=into.tell(), headers=self._headers)  # type: ignore[arg-type]
        except EdgemoeError:
            raise
        except _Refused as error:
            if (error.status < 500 and error.status not in RETRIED) or last:
                raise HubError(_refusal_text(error, what)) from error
            log.warning("the hub does not answer", extra={"file": what, "status": error.status})
        except Exception as error:  # of the library's transport, which depends on its release
            if last:
                raise HubError(f"{what}: {constants.ENDPOINT} cannot be reached: {error}; run it again") from error
            log.warning("the hub does not answer", extra={"file": what, "why": str(error)[:200]})
        else:
            return True
        return False


def _pauses() -> list[float | None]:
    """Returns how long to wait after each try; None after the last."""
    return [FIRST_PAUSE_S * 2**number for number in range(TRIES - 1)] + [None]


def _refusal_text(error: _Refused, what: str) -> str:
    endpoint = constants.ENDPOINT
    if error.code == "GatedRepo":
        return f"{what}: its owner lets in who has agreed to its terms; do so at {endpoint}, and {TOKEN}"
    if error.code == "RevisionNotFound":
        return f"{what}: {endpoint} has the repository, but no such branch, tag or commit"
    if error.code == "RepoNotFound" or (error.status == 401 and error.message != UNKNOWN_TOKEN):
        return f"{what} is not at {endpoint}, or is private; check its name, and for a private one {TOKEN}"
    if error.status == 401:
        return f"{what}: {endpoint} refuses the token; {TOKEN}"
    return f"{what}: {endpoint} answers {error.status}; run it again, or check the name and the token"
