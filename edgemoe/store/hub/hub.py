"""Asks the hub for listings and files, by its own library: endpoint and token come from where it looks for them.

The library's `hf_hub_download` begins a file anew after a death, so what is asked for here is `http_get` from where
the file ends, into a file that verifies itself (`Partial`).
"""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils.tqdm import disable_progress_bars

import edgemoe
from edgemoe.errors import EdgemoeError, HubError
from edgemoe.store.hub.listing import MOST_LISTED_BYTES, HubFile, Listing, check_names
from edgemoe.store.hub.partial import Partial, Tell

TRIES = 4  # without a byte more
FIRST_PAUSE_S = 1.0  # doubled each time
TOKEN = "set HF_TOKEN, or log in with `hf auth login`"
log = logging.getLogger(__name__)


class _Bounded(io.BytesIO):
    """Memory for an answer that may not be endless."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > MOST_LISTED_BYTES:
            raise HubError("the hub's answer is too long to be a listing of files")
        return super().write(data)


class Hub:
    """The hub that HF_ENDPOINT names, for whom HF_TOKEN (or the token that was saved) names."""

    def __init__(self) -> None:
        disable_progress_bars()
        self._headers = {"User-Agent": f"edgemoe/{edgemoe.__version__}", "Accept-Encoding": "identity"}
        if token := get_token():
            self._headers["Authorization"] = f"Bearer {token}"

    def look(self, repository: str, revision: str) -> Listing:
        """Returns what a branch, tag or commit has. Raises HubError."""
        check_names(repository, revision)
        url = f"{constants.ENDPOINT}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        for pause_s in _pauses():
            answer = _Bounded()
            if self._get(url, answer, repository, last=pause_s is None):
                return Listing.read(repository, answer.getvalue())
            time.sleep(pause_s or 0.0)
        raise AssertionError("the last try raises")

    def fetch(self, listing: Listing, file: HubFile, directory: Path, tell: Tell) -> None:
        """Has a file in the directory, verified; what was there of it is not fetched again.

        Raises HubError, StoreError, OSError.
        """
        url = hf_hub_url(listing.repository, file.name, revision=listing.commit)
        with Partial(file, directory, tell) as partial:
            for again in (True, False):
                self._fill(url, partial, file)
                if partial.finish():
                    return
                log.warning("what came of a file is damaged", extra={"file": file.name, "again": again})
        raise HubError(
            f"{listing.repository}: {file.name} came damaged twice: its hash is not {file.digest}, as the hub says; "
            "something on the way changes it"
        )

    def _fill(self, url: str, partial: Partial, file: HubFile) -> None:
        while not partial.is_complete:
            for pause_s in _pauses():
                before = partial.tell()
                self._get(url, partial, file.name, last=pause_s is None)
                if partial.is_complete or partial.tell() > before:
                    break
                if pause_s is None:
                    raise HubError(f"{file.name}: the hub sends nothing more after {before} of {file.bytes} bytes")
                time.sleep(pause_s)

    def _get(self, url: str, into: _Bounded | Partial, what: str, *, last: bool) -> bool:
        """Gets what is at a URL from where `into` ends. False where it may come another time; raises HubError."""
        try:
            http_get(url, into, resume_size=into.tell(), headers=self._headers)  # type: ignore[arg-type]
        except EdgemoeError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code < 500 or last:
                raise HubError(_told(error, what)) from error
        except Exception as error:  # whatever the library's transport raises, which depends on its release
            if last:
                raise HubError(f"{what}: {constants.ENDPOINT} cannot be reached: {error}; run it again") from error
            log.warning("the hub does not answer", extra={"file": what, "why": str(error)[:200]})
        else:
            return True
        return False


def _pauses() -> list[float | None]:
    """Returns how long to wait after each try; None after the last."""
    return [FIRST_PAUSE_S * 2**number for number in range(TRIES - 1)] + [None]


def _told(error: HfHubHTTPError, what: str) -> str:
    endpoint, status = constants.ENDPOINT, error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{what}: its owner lets in who has agreed to its terms; do so at {endpoint}, and {TOKEN}"
    if isinstance(error, RevisionNotFoundError):
        return f"{what}: {endpoint} has the repository, but no such branch, tag or commit"
    if isinstance(error, RepositoryNotFoundError):
        return f"{what} is not at {endpoint}, or is private; check its name, and for a private one {TOKEN}"
    if status == 401:
        return f"{what}: {endpoint} refuses the token; {TOKEN}"
    return f"{what}: {endpoint} answers {status}; run it again, or check the name and the token"
