"""The kinds of entries that the prefix cache has for a block's key."""

from __future__ import annotations

from enum import IntEnum


class EntryKind(IntEnum):
    """The content of an entry."""

    BLOCK = 0  # keys and values of the layers that see all tokens, then the block's expert signature
    STATE = 1  # the states after the block
    WINDOW = 2  # keys and values of the layers with windows
