"""Limits how many tokens of prompts one step prefills beside sequences that are decoding.

A step that prefills n tokens takes about a + b n seconds; a and b are fitted to recent steps. The chunk is as long as
fits the aim for a step's duration, but no shorter than a/b. Where the fixed part a dominates, as when every expert has
to be loaded for a few tokens, shorter chunks would slow the prompt down and hardly speed up the decoders. A stream
therefore waits for its next token about as long as the aim, or twice the fixed part where that is more. Every second
chunk is shorter, because steps of equal length do not tell a from b. At most two thirds of a step are taken to be
fixed, so that chunks grow at most by a factor of two at a time, on repeated evidence.
"""

from __future__ import annotations

import numpy as np

from edgemoe.types.step import BLOCK_TOKENS

MEMORY = 0.9  # weight of the past at each new step
FIRST_GUESS_TOKENS_PER_S = 2000.0
SHORTER = 0.7  # of every second chunk
FIRST_CHUNK_TOKENS = 4 * BLOCK_TOKENS  # beside decoders, before anything is known


class ChunkBudget:
    """Fits the length of prefilling steps and turns it into a token budget."""

    def __init__(self, step_tokens: int, aim_s: float) -> None:
        """Allows at most `step_tokens` a step and aims for steps of `aim_s` seconds; 0 aims for no duration."""
        self._most = step_tokens
        self._aim_s = aim_s
        self._sums = np.zeros((2, 3))  # of (1, n) times (1, n, seconds), decayed
        self._shorter = False  # the next chunk

    @property
    def tokens_per_s(self) -> float:
        """Returns the prompt tokens per second of recent steps that prefilled."""
        _, tokens, seconds = self._sums[0].tolist()
        return tokens / seconds if seconds else FIRST_GUESS_TOKENS_PER_S

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """Adds the duration of a step that prefilled `prefill_tokens` to the fit."""
        row = np.array([1.0, prefill_tokens])
        self._sums = MEMORY * self._sums + np.outer(row, [*row, seconds])
        self._shorter = not self._shorter

    def prefill_tokens(self, decoding: int) -> int:
        """Returns the prompt tokens that a step with `decoding` decoding sequences may prefill, at least one block."""
        room = max(BLOCK_TOKENS, self._most - decoding)
        if not decoding or not self._aim_s:
            return room
        chunk = self._chunk() * (SHORTER if self._shorter else 1.0)
        return int(np.clip(chunk, BLOCK_TOKENS, room))

    def _chunk(self) -> float:
        (count, tokens, seconds), (_, squares, products) = self._sums.tolist()
        if count == 0.0:
            return FIRST_CHUNK_TOKENS
        spread = count * squares - tokens * tokens
        slope = seconds / tokens  # all steps alike: no fixed part to be seen
        if spread > 1e-3 * tokens * tokens:
            slope = min(max((count * products - tokens * seconds) / spread, slope / 3), slope)
        fixed = (seconds - slope * tokens) / count
        return max((self._aim_s - fixed) / slope, fixed / slope)
