"""What is known of a request's experts before its prompt is computed: what its cached part, or alike prompts chose.

Alike is the last one of which this is the continuation, as a conversation's turns are, else the last one of its user.
"""

from __future__ import annotations

from collections import OrderedDict

from edgemoe.front.requests.prefix_keys import KEY_BYTES, PrefixKeys
from edgemoe.types.expert_signatures import ExpertSignature

MAX_BYTES = 16 << 20  # of all that is remembered; the longest unused goes first
ENTRY_BYTES = 256  # of an entry beside its table's bytes
TELLING_SHARE = 0.25  # of a prompt: less of it says less than an alike prompt


class Signatures:
    """Owns the signatures of prompts that were computed, by keyed hashes; knows none of those by a former secret."""

    def __init__(self, keys: PrefixKeys) -> None:
        self._keys, self._secret = keys, keys.secret
        self._known: OrderedDict[bytes | int, ExpertSignature] = OrderedDict()
        self._bytes = 0

    def note(self, user: int, prefix: bytes, signature: ExpertSignature) -> None:
        """Remembers what a prompt chose; `user` and `prefix` are hashes as they are offered."""
        self._look()
        for key in (prefix[-KEY_BYTES:], user):
            if key:
                self._drop(key)
                self._known[key] = signature
                self._bytes += _bytes(signature)
        while self._bytes > MAX_BYTES:
            self._drop(next(iter(self._known)))

    def of(self, user: int, prefix: bytes) -> ExpertSignature | None:
        """Returns what the prompt of a request is likely to choose."""
        self._look()
        keys: list[bytes | int] = [prefix[at : at + KEY_BYTES] for at in range(0, len(prefix), KEY_BYTES)]
        known = next((key for key in (*reversed(keys), user) if key in self._known), None)
        if known is None:
            return None
        self._known.move_to_end(known)
        return self._known[known]

    def _look(self) -> None:
        if self._secret != self._keys.secret:
            self._secret, self._bytes = self._keys.secret, 0
            self._known.clear()

    def _drop(self, key: bytes | int) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._bytes -= _bytes(known)


def more_telling(cached: ExpertSignature | None, alike: ExpertSignature | None, tokens: int) -> ExpertSignature | None:
    """Returns what says more of a prompt of so many tokens: what its cached part chose, or what an alike prompt did."""
    if cached is None or (alike is not None and cached.tokens < TELLING_SHARE * tokens):
        return alike
    return cached


def _bytes(signature: ExpertSignature) -> int:
    return ENTRY_BYTES + len(signature.chosen)
