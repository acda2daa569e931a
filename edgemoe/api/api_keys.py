"""The keys that clients of a TCP port give: a private file of them, and the ring that the daemon checks against.

A line of the file is `NAME KEY`, or `NAME KEY REQUESTS`, the most of its requests that may run at once. A key alone has
no limit and is named by its line number. A line that begins with # is a comment.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.durable import make_folder, read_plain, replace_file
from edgemoe.errors import QueueFull, ServiceError, write_remedy
from edgemoe.types.request import Principal, key_principal

log = logging.getLogger(__name__)

LEAST_CHARS, MOST_KEYS, MOST_BYTES, MOST_AT_ONCE = 16, 256, 64 << 10, 1 << 20
LIMIT = re.compile(r"[0-9]{1,7}")
BUSY_S = 1.0  # after which a client whose key has reached its limit may try again
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, the name that it goes by, and how many requests it may have at once (0: any number)."""

    name: str
    secret: str = field(repr=False)
    at_once: int = 0


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Returns the keys in `file`. Raises ServiceError where it is unfit to hold any."""
    return tuple(key for key, _ in _lines(file) if key is not None)


def new_key(file: Path, name: str, at_once: int = 0) -> ApiKey:
    """Adds a fresh key to `file`, which is made (0600) if it is not there, and returns it. Raises ServiceError."""
    if not NAME.fullmatch(name):
        raise ServiceError(f"{name!r} cannot be a key's name: letters, digits, '-', '_' and '.', 63 of them at most")
    if not 0 <= at_once <= MOST_AT_ONCE:
        raise ServiceError(f"{at_once} requests at once cannot be: from 1 to {MOST_AT_ONCE}, or 0 for no limit")
    lines = list(_lines(file)) if file.exists() else []
    if any(key is not None and key.name == name for key, _ in lines):
        raise ServiceError(f"{file}: there is a key of the name {name!r}; `edgemoe key remove {name}` takes it away")
    if sum(key is not None for key, _ in lines) >= MOST_KEYS:
        raise ServiceError(f"{file}: there are {MOST_KEYS} keys already; remove one with `edgemoe key remove NAME`")
    made = ApiKey(name, f"sk-{secrets.token_urlsafe(32)}", at_once)
    line = f"{made.name} {made.secret}" + (f" {at_once}" if at_once else "")
    _write(file, [*(text for _, text in lines), line])
    return made


def remove_key(file: Path, name: str) -> None:
    """Takes a key out of `file`. Raises ServiceError where it is not there."""
    lines = list(_lines(file))
    left = [text for key, text in lines if key is None or key.name != name]
    if len(left) == len(lines):
        raise ServiceError(f"{file}: there is no key of the name {name!r}; `edgemoe key list` has the names")
    _write(file, left)


class KeyRing:
    """The keys of a file, read again whenever it changes, and the requests that each has now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._running = Counter[str]()
        self._principals: dict[str, Principal] = {}  # by secret, of keys that were used
        self._keys = read_keys(file)
        self._seen = self._stamp()

    def find(self, given: str) -> ApiKey | None:
        """Returns the key that a client has given; every one is compared, whichever it is."""
        self._refresh()
        same = [hmac.compare_digest(given.encode(), key.secret.encode()) for key in self._keys]
        return self._keys[same.index(True)] if any(same) else None

    def principal(self, key: ApiKey) -> Principal:
        """Returns the principal of the key. Boxes that list the same secret name the same principal."""
        found = self._principals.get(key.secret)
        if found is None:
            found = self._principals[key.secret] = key_principal(key.secret)
        return found

    @contextmanager
    def running(self, key: ApiKey) -> Iterator[None]:
        """Counts one request of a key while it runs. Raises QueueFull where the key has as many as it may."""
        if key.at_once and self._running[key.name] >= key.at_once:
            raise QueueFull(
                f"the key {key.name!r} has {key.at_once} requests running, which is its limit; wait for one to end",
                retry_after_s=BUSY_S,
            )
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1

    def _refresh(self) -> None:
        """Reads a file that has changed. An unfit file admits no client until it is corrected."""
        if (stamp := self._stamp()) == self._seen:
            return
        self._seen, self._keys = stamp, ()
        self._principals.clear()
        try:
            self._keys = read_keys(self._file)
        except ServiceError as error:
            log.error("nobody is let in by TCP", extra={"error": str(error)})
        else:
            log.info("keys read again", extra={"keys": ",".join(key.name for key in self._keys)})

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._file.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _lines(file: Path) -> Iterator[tuple[ApiKey | None, str]]:
    """Yields each line, with the key that it holds. Raises ServiceError."""
    try:
        mode = file.stat().st_mode
        text = read_plain(file, MOST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ServiceError(f"api.api_key_file {file}: {why}; `edgemoe key new NAME` makes a key") from error
    if mode & stat.S_IRWXO:
        raise ServiceError(f"api.api_key_file {file}: everybody may read it; chmod it to 0600 or 0640")
    if len(text) > MOST_BYTES:
        raise ServiceError(f"api.api_key_file {file}: larger than {MOST_BYTES} bytes, which no list of keys is")
    names = set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        key = _key(line.split(), number, file) if line.strip() and line.strip()[0] != "#" else None
        if key is not None and (key.name in names or len(names) >= MOST_KEYS):
            raise ServiceError(
                f"api.api_key_file {file}:{number}: {key.name!r} is there twice, or {MOST_KEYS} keys are"
            )
        names |= {key.name} if key else set()
        yield key, line


def _key(words: list[str], number: int, file: Path) -> ApiKey:
    name, secret = (words[0], words[1]) if len(words) > 1 else (f"line-{number}", words[0])
    limit = words[2] if len(words) > 2 else "0"
    if len(secret) < LEAST_CHARS or not secret.isascii():
        raise ServiceError(f"api.api_key_file {file}:{number}: needs a key of at least {LEAST_CHARS} ASCII characters")
    if not NAME.fullmatch(name) or not LIMIT.fullmatch(limit) or int(limit) > MOST_AT_ONCE or len(words) > 3:
        raise ServiceError(f"api.api_key_file {file}:{number}: write NAME KEY, or NAME KEY REQUESTS-AT-ONCE")
    return ApiKey(name, secret, int(limit))


def _write(file: Path, lines: list[str]) -> None:
    """Replaces the file. It keeps its owner, so that a service can read a file that root has written."""
    try:
        make_folder(file.parent, 0o700)
        known = (file if file.exists() else file.parent).stat()
        mode = stat.S_IMODE(known.st_mode) & 0o640 if file.exists() else 0o600
        owner = (known.st_uid, known.st_gid) if os.geteuid() == 0 else None
        replace_file(file, "".join(f"{line}\n" for line in lines).encode(), mode, owner)
    except OSError as error:
        remedy = write_remedy(error, "run this as its owner")
        raise ServiceError(f"{file} cannot be written: {error.strerror}; {remedy}") from error
