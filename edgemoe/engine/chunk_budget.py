"""How many tokens of prompt one step takes on beside sequences that are decoding.

A step that prefills n tokens takes about a + b n seconds, fitted to recent steps. The chunk is as long as fits the
step that is aimed for, but no shorter than a/b: where the fixed part dominates, as when every expert has to be
brought in for a handful of tokens, shorter chunks would slow the prompt down and not spare the decoders much. So a
stream waits for its next token about as long as is aimed for, or twice the fixed part where that is more. Every second
chunk is shorter, for steps that are all alike do not show what is fixed. The fixed part is believed up to two thirds
of a step, so that chunks at most double at a time, on repeated evidence.
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
        """At most `step_tokens`, aiming for steps of `aim_s`; 0 aims for nothing."""
        self._most = step_tokens
        self._aim_s = aim_s
        self._sums = np.zeros((2, 3))  # of (1, n) times (1, n, seconds), decayed
        self._shorter = False  # the next chunk

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that recent steps with a prompt in them got through in a second."""
        _, tokens, seconds = self._sums[0].tolist()
        return tokens / seconds if seconds else FIRST_GUESS_TOKENS_PER_S

    def observe(self, prefill_tokens: int, seconds: float) -> None:
        """A step that prefilled so many tokens took so long."""
        row = np.array([1.0, prefill_tokens])
        self._sums = MEMORY * self._sums + np.outer(row, [*row, seconds])
        self._shorter = not self._shorter

    def prefill_tokens(self, decoding: int) -> int:
        """The budget for prompts in a step with so many decoding sequences; at least one block's worth."""
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
