"""A hub whose answers are endless, packed or lies, for `edgemoe pull`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

UNPACKED_BYTES = 1 << 30  # of a bomb
PIECE = b" " * 65536
CONFIG = b'{"architectures": ["Qwen3MoeForCausalLM"]}'
Reply = Callable[["HubHandler"], None]


@functools.cache
def bomb(times: int) -> bytes:
    """Returns a gigabyte of zeros, packed by gzip `times` times."""
    packed = b""
    for number in range(times):
        packer, parts = zlib.compressobj(9, wbits=31), list[bytes]()
        for _ in range(1 if number else UNPACKED_BYTES >> 20):
            parts.append(packer.compress(packed if number else bytes(1 << 20)))
        packed = b"".join((*parts, packer.flush()))
    return packed


def listing(*files: dict[str, Any]) -> bytes:
    """Returns the description of a repository with a configuration, weights and further files."""
    blob = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG, usedforsecurity=False).hexdigest()
    own = {"rfilename": "config.json", "size": len(CONFIG), "blobId": blob}
    weights = {"rfilename": "model.safetensors", "size": 9, "lfs": {"sha256": "0" * 64, "size": 9}}
    return json.dumps({"sha": "0" * 40, "siblings": [own, weights, *files]}).encode()


class HubHandler(BaseHTTPRequestHandler):
    """Answers every question by the server's `reply`."""

    protocol_version = "HTTP/1.1"
    reply: Reply

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            type(self).reply(self)
        self.close_connection = True

    do_HEAD = do_GET

    @property
    def is_listing(self) -> bool:
        return self.path.startswith("/api/")

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.head(status, **{"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def head(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def go_on(self, status: int = 200, **headers: str) -> None:
        """Sends without end."""
        self.head(status, **headers)
        while True:
            self.wfile.write(PIECE)

    def log_message(self, *_: object) -> None:
        """Suppresses the server's log lines."""


def _packed(times: int, *, in_file: bool) -> Reply:
    def reply(asked: HubHandler) -> None:
        if asked.is_listing and in_file:
            asked.send(listing())
        else:
            asked.send(bomb(times), Content_Encoding=", ".join(["gzip"] * times))

    return reply


def _endless_file(asked: HubHandler) -> None:
    if asked.is_listing:
        asked.send(listing())
    else:
        asked.go_on()


def _endless_head(asked: HubHandler) -> None:
    asked.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        asked.wfile.write(b"X-Letter: " + PIECE[:1000] + b"x\r\n")


def _circle(asked: HubHandler) -> None:
    asked.send(b"", 302, Location=f"{asked.path}x")


def _elsewhere(asked: HubHandler) -> None:
    asked.send(b"", 302, Location="file:///etc/passwd")


def _coloured(asked: HubHandler) -> None:
    asked.head(
        404, X_Error_Message="\x1b[2J\x1b]0;owned\x07gone", X_Error_Code="\x1b[31mRepoNotFound", Content_Length="0"
    )


def _wrong_hash(asked: HubHandler) -> None:
    asked.send(listing() if asked.is_listing else b"\0" * len(CONFIG))


def _listed(body: bytes) -> Reply:
    return lambda asked: asked.send(body)


def _odd(name: str, size: int = 5, digest: str = "0" * 40) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": digest}


REPLIES: dict[str, Reply] = {
    "packed listing": _packed(1, in_file=False),
    "listing packed three times": _packed(3, in_file=False),
    "packed file": _packed(1, in_file=True),
    "file packed three times": _packed(3, in_file=True),
    "endless listing": lambda asked: asked.go_on(),
    "endless file": _endless_file,
    "endless refusal": lambda asked: asked.go_on(404, X_Error_Code="RepoNotFound"),
    "endless failure": lambda asked: asked.go_on(500),
    "endless head": _endless_head,
    "redirects in a circle": _circle,
    "redirect to a file": _elsewhere,
    "escape sequences in a refusal": _coloured,
    "wrong hash": _wrong_hash,
    "deep listing": _listed(b'{"sha":' + b"[" * 1_000_000),
    "listing with a long number": _listed(b'{"sha": ' + b"9" * 1_000_000 + b"}"),
    "many files": _listed(listing(*(_odd(f"model-{n}.safetensors") for n in range(99_000)))),
    "names outside": _listed(
        listing(*(_odd(name) for name in ("../x.gguf", "/etc/passwd", "a/../../b.gguf", "\x1b[2J.gguf")))
    ),
    "impossible sizes": _listed(listing(_odd("tokenizer.json", 2**63), _odd("vocab.json", -1))),
}


@contextmanager
def hostile_hub(reply: Reply) -> Iterator[str]:
    """Runs a hub that answers so; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"reply": staticmethod(reply)}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
