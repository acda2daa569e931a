"""A small hub on this machine: repositories out of folders, spoken to as huggingface.co is."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", "tokenizer.json")  # kept by git-lfs, and served by another host
PIECE_BYTES = 1 << 20


class Asked(NamedTuple):
    """One request that came."""

    path: str
    start: int  # the first byte asked for
    token: str


Listed = dict[str, object]


@functools.cache
def files_of(folder: Path) -> list[Listed]:
    """Lists the files of a repository, as the hub does."""
    return [_listed(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _listed(path: Path, folder: Path) -> Listed:
    data, name = path.read_bytes(), str(path.relative_to(folder))
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    about: Listed = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(LARGE):
        sha = hashlib.sha256(data).hexdigest()
        about["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
    return about


@dataclass
class Repository:
    """One repository, and its faults."""

    folder: Path
    gated: bool = False
    private: bool = False
    damaged: dict[str, int] = field(default_factory=dict)  # file -> how many answers come damaged
    more: list[Listed] = field(default_factory=list)  # files that are only listed

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(self.listed()).encode()).hexdigest()

    def listed(self) -> list[Listed]:
        return [*self.more, *files_of(self.folder)]


class LocalHub:
    """Serves repositories; `token` opens gated and private ones."""

    token = "hf_right"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.stop_after: dict[str, int] = {}  # file -> how many bytes are sent before the hub holds its breath
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fetched(self, end: str) -> list[Asked]:
        """Returns the requests for files whose names end with `end`."""
        return [each for each in self.asked if each.path.endswith(end)]


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Runs a hub on a thread until the end of the block."""
    hub = LocalHub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        given = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(given[1]) if given else 0
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(path, start, self.token))
        if listed := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
            self._list(*listed.groups())
        elif file := re.fullmatch(r"/(cdn/)?(.+)/resolve/([0-9a-f]{40})/([^/]+(?:/[^/]+)?)", path):
            self._give(file[2], file[3], file[4], start, is_elsewhere=bool(file[1]))
        else:
            self._refuse(404, "RepoNotFound")

    def log_message(self, *_: object) -> None:
        """Suppresses the server's log lines."""

    def _list(self, name: str, revision: str) -> None:
        if (repository := self._open(name)) is None:
            return
        if revision not in ("main", repository.commit):
            self._refuse(404, "RevisionNotFound")
            return
        self._answer(json.dumps({"sha": repository.commit, "siblings": repository.listed(), "likes": 3}).encode())

    def _give(self, name: str, commit: str, file: str, start: int, *, is_elsewhere: bool) -> None:
        repository = self.hub.repositories[name] if is_elsewhere else self._open(name)
        if repository is None:
            return
        if repository.gated and not is_elsewhere and self.token != self.hub.token:
            self._refuse(403 if self.token else 401, "GatedRepo")
        elif not (repository.folder / file).is_file() or commit != repository.commit:
            self._refuse(404, "EntryNotFound")
        elif file.endswith(LARGE) and not is_elsewhere:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.hub.port}/cdn/{name}/resolve/{commit}/{file}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            data = bytearray((repository.folder / file).read_bytes())
            if repository.damaged.get(file, 0) > 0:
                repository.damaged[file] -= 1
                data[-1] ^= 1
            self._answer(bytes(data), start, self.hub.stop_after.get(file, len(data)))

    def _open(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if self.token not in ("", self.hub.token):
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        if repository is None or (repository.private and not self.token):
            self._refuse(401 if not self.token else 404, "RepoNotFound")
            return None
        return repository

    def _answer(self, data: bytes, start: int = 0, stop: int = 1 << 40) -> None:
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        for at in range(start, len(data), PIECE_BYTES):
            if at >= stop:
                self.hub.stopped.set()
                self.hub.go_on.wait(60)
            try:
                self.wfile.write(data[at : at + PIECE_BYTES])
            except OSError:
                self.close_connection = True
                return

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message), ("Content-Length", "0")):
            if value:
                self.send_header(name, value)
        self.end_headers()
