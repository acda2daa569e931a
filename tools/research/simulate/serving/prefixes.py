"""A simulated engine's prefix cache: keys of prompts' blocks, kept while blocks are free, the oldest lost first."""

from __future__ import annotations

from collections import OrderedDict

from tools.research.simulate.serving.engine_steps import BLOCK


class PrefixCache:
    """Owns an engine's keys, and the number of sequences that use each. A key stands for `key_tokens` tokens."""

    def __init__(self, key_tokens: int) -> None:
        self.key_blocks = max(1, key_tokens // BLOCK)
        self.hits = self.probes = 0  # blocks
        self._users = OrderedDict[int, int]()  # key -> sequences; unused ones in order of their last use
        self._unused = 0

    def keys(self) -> frozenset[int]:
        return frozenset(self._users)

    def known(self, prefix: tuple[int, ...]) -> int:
        """Counts the leading keys that are cached."""
        return next((n for n, key in enumerate(prefix) if key not in self._users), len(prefix))

    def open(self, prefix: tuple[int, ...], known: int) -> int:
        """Uses the first `known` keys; returns the blocks that were unused before."""
        self.hits += known * self.key_blocks
        self.probes += len(prefix) * self.key_blocks
        revived = 0
        for key in prefix[:known]:
            revived += self._users[key] == 0
            self._users[key] += 1
        self._unused -= revived
        return revived * self.key_blocks

    def keep(self, prefix: tuple[int, ...], known: int) -> int:
        """Adds a sequence's computed blocks beyond its `known` keys. Returns the number of keys that it uses now."""
        used = known
        for key in prefix[known:]:
            if key in self._users:
                break
            self._users[key] = 1
            used += 1
        return used

    def close(self, prefix: tuple[int, ...], used: int) -> int:
        """Releases the first `used` keys; returns the blocks that are unused now."""
        left = 0
        for key in prefix[:used]:
            self._users[key] -= 1
            if not self._users[key]:
                left += 1
                self._users.move_to_end(key)
        self._unused += left
        return left * self.key_blocks

    def trim(self, free_blocks: int) -> None:
        """Drops unused keys without free blocks."""
        if self._unused * self.key_blocks <= free_blocks:
            return
        for key in [key for key, users in self._users.items() if not users]:
            if self._unused * self.key_blocks <= free_blocks:
                break
            del self._users[key]
            self._unused -= 1
