"""Hashes of principals, users and the beginnings of prompts, keyed with a secret of the cluster.

They say to the leader which requests are alike, and nothing else: without the secret nobody can try out texts or names.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

from edgemoe.cluster.control.messages import MAX_PREFIX_KEYS, PREFIX_TOKENS, SECRET_BYTES
from edgemoe.types.request import Request

_pack = struct.Struct(f"<{PREFIX_TOKENS}I").pack
KEY_BYTES = 8


class PrefixKeys:
    """Hashes with the secret of whoever leads; until it is known, with one of this box's own."""

    def __init__(self, prefix_cache: bool = True) -> None:
        """`prefix_cache` is whether our engine keeps what it has computed of prompts."""
        self._prefix_cache = prefix_cache
        self.secret = secrets.token_bytes(SECRET_BYTES)

    def name(self, label: str) -> int:
        """Returns the hash of a principal's or a user's name; 0 for nobody's."""
        return int.from_bytes(self._hash(label.encode()), "little") if label else 0

    def prefix(self, request: Request) -> bytes:
        """Returns the hashes of the prompt up to the ends of its whole pieces, as far as a message has room.

        Requests of another salt have other hashes, as they have other blocks.
        """
        prompt, keys = request.prompt, [self._hash(request.salt) if request.salt else b""]
        for begin in range(0, min(len(prompt), MAX_PREFIX_KEYS * PREFIX_TOKENS) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
            keys.append(self._hash(keys[-1] + _pack(*prompt[begin : begin + PREFIX_TOKENS])))
        return b"".join(keys[1:])

    def cached(self, request: Request) -> bytes:
        """Returns those hashes by which an engine may have the prompt; none where ours keeps no prompts."""
        return self.prefix(request) if self._prefix_cache else b""

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.secret, digest_size=KEY_BYTES).digest()
