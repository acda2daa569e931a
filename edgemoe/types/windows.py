"""Counts the KV blocks that layers with a window need of a sequence."""

from __future__ import annotations

from collections.abc import Callable

from edgemoe.types.step import BLOCK_TOKENS

ROLLBACK_TOKENS = 64  # the last tokens of a sequence, which may be taken back: their windows are kept, too


def first_seen(position: int, window: int) -> int:
    """Returns the first block that the token at `position` sees."""
    return max(0, position + 1 - window) // BLOCK_TOKENS


def first_kept(computed: int, window: int) -> int:
    """Returns the first block that a sequence of `computed` tokens keeps."""
    return first_seen(computed - ROLLBACK_TOKENS, window)


def most_kept(window: int) -> int:
    """Returns the most blocks that a sequence keeps, with that of its next token."""
    return -(-(window + ROLLBACK_TOKENS - 1) // BLOCK_TOKENS) + 1


def last_covered(count: int, window: int, is_known: Callable[[int], bool]) -> int:
    """Returns the most of the first `count` blocks after which a token sees known blocks only."""
    place = count
    while place > first_seen(count * BLOCK_TOKENS, window):
        place -= 1
        if not is_known(place):
            count = place
    return count


def least_blocks(window: int) -> int:
    """Returns the fewest blocks with which a sequence is computed: its own, one that it begins, and one of zeros."""
    return most_kept(window) + 2
