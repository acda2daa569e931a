"""Compares prompts by keyed hashes of their beginnings, and by the experts that earlier ones chose.

Hashes are keyed with a secret of the cluster, so that without it nobody can try out texts or names.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict

from edgemoe.cluster.control.messages import MAX_PREFIX_KEYS, PREFIX_TOKENS, SECRET_BYTES
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Request

_pack = struct.Struct(f"<{PREFIX_TOKENS}I").pack
KEY_BYTES = 8
MAX_SIGNATURE_BYTES = 16 << 20  # of all signatures that are remembered; the longest unused goes first
ENTRY_BYTES = 256  # of an entry beside its table's bytes
TELLING_SHARE = 0.25  # of a prompt: a cached part below it says less than a similar prompt


class PrefixKeys:
    """Hashes names and prompts with the leader's secret; until that is known, with one of this box's own."""

    def __init__(self, prefix_cache: bool = True) -> None:
        """Takes `prefix_cache`: whether this box's engine keeps the KV blocks of prompts."""
        self._prefix_cache = prefix_cache
        self.secret = secrets.token_bytes(SECRET_BYTES)

    def name(self, label: str) -> int:
        """Returns the hash of a principal's or a user's name; 0 for an empty one."""
        return int.from_bytes(self._hash(label.encode()), "little") if label else 0

    def prefix(self, request: Request) -> bytes:
        """Returns the hashes of the prompt up to the end of each whole piece, as many as a message may hold.

        Requests with different salts share no hashes, as they share no KV blocks.
        """
        prompt, keys = request.prompt, [self._hash(request.salt) if request.salt else b""]
        for begin in range(0, min(len(prompt), MAX_PREFIX_KEYS * PREFIX_TOKENS) - PREFIX_TOKENS + 1, PREFIX_TOKENS):
            keys.append(self._hash(keys[-1] + _pack(*prompt[begin : begin + PREFIX_TOKENS])))
        return b"".join(keys[1:])

    def cached(self, request: Request) -> bytes:
        """Returns the same hashes; none if this box's engine caches no prompts."""
        return self.prefix(request) if self._prefix_cache else b""

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.secret, digest_size=KEY_BYTES).digest()


class PromptSignatures:
    """Owns the expert signatures of computed prompts, by keyed hashes; a new secret makes it forget them.

    A request resembles the last prompt that it continues, as a conversation's turns do, else its user's last prompt.
    """

    def __init__(self, keys: PrefixKeys) -> None:
        self._keys, self._secret = keys, keys.secret
        self._known: OrderedDict[bytes | int, ExpertSignature] = OrderedDict()
        self._bytes = 0

    def note(self, request: Request, signature: ExpertSignature) -> None:
        """Remembers the experts of a request's prompt."""
        self._forget_former_secret()
        for key in (self._keys.prefix(request)[-KEY_BYTES:], self._keys.name(request.user)):
            if key:
                self._drop(key)
                self._known[key] = signature
                self._bytes += _bytes(signature)
        while self._bytes > MAX_SIGNATURE_BYTES:
            self._drop(next(iter(self._known)))

    def of(self, request: Request) -> ExpertSignature | None:
        """Returns the signature of the prompt that resembles this request most."""
        self._forget_former_secret()
        prefix = self._keys.prefix(request)
        keys: list[bytes | int] = [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]
        known = next((key for key in (*reversed(keys), self._keys.name(request.user)) if key in self._known), None)
        if known is None:
            return None
        self._known.move_to_end(known)
        return self._known[known]

    def _forget_former_secret(self) -> None:
        if self._secret != self._keys.secret:
            self._secret, self._bytes = self._keys.secret, 0
            self._known.clear()

    def _drop(self, key: bytes | int) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._bytes -= _bytes(known)


def better_signature(
    cached: ExpertSignature | None, alike: ExpertSignature | None, tokens: int
) -> ExpertSignature | None:
    """Returns the better forecast for a prompt of `tokens` tokens: its cached part's signature or a similar one's."""
    if cached is None or (alike is not None and cached.tokens < TELLING_SHARE * tokens):
        return alike
    return cached


def _bytes(signature: ExpertSignature) -> int:
    return ENTRY_BYTES + len(signature.chosen)
