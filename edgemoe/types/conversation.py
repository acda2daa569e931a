"""Tells by the prompt alone which requests belong to one conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ENDING = 3  # tokens, with which a chat template ends every turn's prompt


def conversation_of(prompt: Sequence[int] | npt.NDArray[np.integer]) -> int:
    """Returns the same number, of 56 bits, for equal prompts and for all turns of a chat; 0 for an empty prompt.

    It hashes the prompt up to where its last tokens occur first. A chat template ends the prompt of every turn with the
    same tokens, those that begin an answer, so that this is the first turn's prompt. A template that ends its prompts
    otherwise leaves each turn a conversation of its own.
    """
    tokens = np.asarray(prompt, "<i4")
    if not len(tokens):
        return 0
    ending = min(ENDING, len(tokens))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, ending)
    first = int((windows == tokens[-ending:]).all(axis=1).argmax())
    return int.from_bytes(hashlib.blake2b(tokens[: first + ending].tobytes(), digest_size=7).digest(), "little")
