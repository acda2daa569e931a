"""What the leader remembers of an engine between its reports: whose requests, which prompts, and what these choose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import TypeVar

from edgemoe.cluster.rpc.messages.choices import EngineChoices

K = TypeVar("K", bound=Hashable)
MAX_KEYS = 4096  # of prompts; the longest unused go first, as they do in the engine's cache
MAX_USERS = 1024


class EngineMemory:
    """One engine's keyed hashes, the latest last."""

    def __init__(self) -> None:
        self.prefixes: frozenset[int] = frozenset()
        self.users: frozenset[str] = frozenset()
        self.choices: EngineChoices | None = None
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._users: OrderedDict[str, None] = OrderedDict()

    def note(self, users: Iterable[str], prefixes: Iterable[int]) -> None:
        """Adds what the engine has had since."""
        if _use(self._users, users, MAX_USERS):
            self.users = frozenset(self._users)
        if _use(self._prefixes, prefixes, MAX_KEYS):
            self.prefixes = frozenset(self._prefixes)


def _use(known: OrderedDict[K, None], keys: Iterable[K], most: int) -> bool:
    """Returns whether any was new."""
    new = False
    for key in keys:
        new |= key not in known
        known[key] = None
        known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)
    return new
